"""What is not as it should be in a run, as far as one snapshot tells: absent means healthy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from node.expert_load import dead
from swarm.release import VERSION

if TYPE_CHECKING:
    from node.snapshot import Snapshot

BEHIND_ROUNDS = 2
"""A node that is so many rounds behind the newest one should have caught up."""
STALLED_TIMES = 4
"""A round that takes so many times the usual time, and longer than a margin beside it, stands still."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong."""

    code: str
    """Always the same for the same kind of trouble; docs/health.md has a paragraph for each."""
    severity: Literal["warning", "error"]
    text: str
    action: str
    """What somebody can do about it."""


def examine(snapshot: "Snapshot") -> Iterator[Trouble]:
    """What is wrong in a run, the worst first."""
    yield from _uncovered(snapshot)
    yield from _stalled(snapshot)
    yield from _me_behind(snapshot)
    yield from _lost(snapshot)
    yield from _versions(snapshot)
    yield from _complaints(snapshot)
    yield from _dead_experts(snapshot)


def _is_complete(snapshot: "Snapshot") -> bool:
    total = snapshot.manifest.document.round.total
    return snapshot.commit is not None and 0 < total <= snapshot.commit.document.round


def _uncovered(snapshot: "Snapshot") -> Iterator[Trouble]:
    total, holders = snapshot.manifest.document.model.num_experts, snapshot.holders()
    missing = [expert for expert in range(total) if expert not in holders]
    if missing and not _is_complete(snapshot):
        text = f"no node holds expert {', '.join(map(str, missing))}"
        yield Trouble("experts-uncovered", "error", text, "join with another box, or allow more experts on one")


def _stalled(snapshot: "Snapshot") -> Iterator[Trouble]:
    recent = sorted(line.seconds for line in snapshot.rounds[-9:] if line.seconds)
    last = snapshot.rounds[-1].time if snapshot.rounds else 0.0
    if not recent or not last or _is_complete(snapshot):
        return
    waited, usual = snapshot.time - last, recent[len(recent) // 2]
    if waited > STALLED_TIMES * usual + snapshot.manifest.document.round.margin_seconds:
        reason = f"; this node is {snapshot.phases[-1].state}: {snapshot.phases[-1].reason}" if snapshot.phases else ""
        text = f"the last round ended {waited:.0f} s ago, usually one takes {usual:.0f} s{reason}"
        yield Trouble("round-stalled", "error", text, "see for whom the nodes wait, and whether those still run")


def _me_behind(snapshot: "Snapshot") -> Iterator[Trouble]:
    mine = snapshot.nodes.get(snapshot.me) if snapshot.me is not None else None
    newest = max((s.record.round for s in snapshot.nodes.values() if s.is_there), default=0)
    if mine is not None and newest - mine.record.round > BEHIND_ROUNDS:
        text = f"this node holds round {mine.record.round}, others hold {newest}"
        yield Trouble("node-behind", "warning", text, "wait while it fetches the state; its reason says how far it is")


def _lost(snapshot: "Snapshot") -> Iterator[Trouble]:
    names = sorted(s.record.name for s in snapshot.nodes.values() if s.lost and s.record.role == "trainer")
    if names and not _is_complete(snapshot):
        text = f"{len(names)} not heard of any more: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
        yield Trouble("nodes-lost", "warning", text, "if one of them is yours, start it again; the others go on")


def _versions(snapshot: "Snapshot") -> Iterator[Trouble]:
    others = sorted({s.record.version for s in snapshot.nodes.values() if s.is_there} - {VERSION})
    if others:
        text = f"version {VERSION} here, {', '.join(others)} elsewhere"
        yield Trouble("versions-differ", "warning", text, "bring all nodes to the newest one")


def _complaints(snapshot: "Snapshot") -> Iterator[Trouble]:
    for sighting in snapshot.nodes.values():
        if sighting.is_there and sighting.record.complaint:
            text = f"{sighting.record.name} says of {sighting.record.complaint}"
            yield Trouble("peer-misbehaves", "warning", text, "what it sent was left out; ask whose box it is")


def _dead_experts(snapshot: "Snapshot") -> Iterator[Trouble]:
    found = dead(snapshot.commit.document.choices) if snapshot.commit is not None else []
    if found:
        some = ", ".join(f"{expert} of layer {layer}" for layer, expert in found[:3])
        text = f"{len(found)} experts get almost no tokens: {some}{' and more' if len(found) > 3 else ''}"
        yield Trouble("experts-dead", "warning", text, "a larger loss.load_balancing in the next run keeps them busy")
