"""What one process has seen of a run: who is there and who was, what happened, round by round."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from node.snapshot import Event, EventKind, Phase, Sighting, Snapshot
from swarm.documents import Commit, Signed
from swarm.history import RoundLine
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.records import NodeRecord, State, View
from swarm.warmup import warmup

MOST_EVENTS = 200
MOST_PHASES = 60
FORGET_SECONDS = 24 * 3600.0
"""A node that is gone is told of for so long."""


class Observer:
    """Puts together what is seen; a snapshot says it all."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        *,
        me: NodeId | None = None,
        rounds: Sequence[RoundLine] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        manifest: the run.
        me: the node whose process this is, if it is a node's.
        rounds: what has happened so far; it may grow.
        clock: Unix seconds.
        """
        self._manifest = manifest
        self._me = me
        self._rounds = rounds
        self._clock = clock
        self._nodes: dict[NodeId, Sighting] = {}
        self._commit: Signed[Commit] | None = None
        self._phases = deque[Phase](maxlen=MOST_PHASES)
        self._events = deque[Event](maxlen=MOST_EVENTS)
        self._version = 0
        self._looked = False

    def see(self, view: View) -> None:
        """Take in who is there. Whoever is not in the view any more has been lost, unless it said goodbye."""
        now, lease = self._clock(), self._manifest.document.round.lease_seconds
        for node, record in view.nodes.items():
            seen = view.until[node] - lease if node in view.until else now
            before, self._nodes[node] = self._nodes.get(node), Sighting(record=record, seen=seen)
            self._compare(node, before, record)
        for node, sighting in list(self._nodes.items()):
            if node in view.nodes:
                continue
            if now - sighting.seen > FORGET_SECONDS:
                del self._nodes[node]
            elif sighting.is_there:
                self._nodes[node] = Sighting(record=sighting.record, seen=sighting.seen, lost=True)
                held = f" with {_experts(sighting.record.experts)}" if sighting.record.experts else ""
                self._note("lost", node, f"{sighting.record.name} is not heard of any more{held}")
        self._looked = True

    def _compare(self, node: NodeId, before: Sighting | None, record: NodeRecord) -> None:
        """Note what has changed about a node."""
        name = record.name
        if before is None:
            if self._looked and record.state != "left":  # who was there before this process is no news
                self._note("joined", node, f"{name} has joined")
            return
        if before.is_there and record.state == "left":
            self._note("left", node, f"{name} has left the swarm")
        elif not before.is_there and record.state != "left":
            self._note("back", node, f"{name} is back")
        if record.complaint and record.complaint != before.record.complaint:
            self._note("complaint", node, f"{name} says of {record.complaint}")
        if new := set(record.experts) - set(before.record.experts):
            self._note("experts", node, f"{name} now trains {_experts(sorted(new))}")

    def adopt(self, commit: Signed[Commit]) -> None:
        """Take in a commit."""
        document, before = commit.document, self._commit
        self._commit = commit
        if before is None or document.round <= before.document.round:
            return
        if document.merge is not None:
            self._note("merge", None, f"round {document.round} merged the experts, alpha {document.merge.alpha:.3g}")
        if document.missing:
            self._note("round", None, f"round {document.round} ended without {self._named(document.missing)}")
        if document.carried:
            some = ", ".join(document.carried[:3]) + (" and more" if len(document.carried) > 3 else "")
            self._note(
                "round", None, f"round {document.round} left {len(document.carried)} shards as they were: {some}"
            )

    def tell(self, state: State, reason: str) -> None:
        """Take in what this node does now."""
        last = self._phases[-1] if self._phases else None
        if last is not None and last.state == state:
            self._phases[-1] = Phase(state=state, reason=reason, since=last.since)
        else:
            self._phases.append(Phase(state=state, reason=reason, since=self._clock()))

    def snapshot(self) -> Snapshot:
        """All of it, as it is now."""
        run, commit = self._manifest.document, self._commit
        self._version += 1
        return Snapshot(
            version=self._version,
            time=self._clock(),
            manifest=self._manifest,
            me=self._me,
            nodes=dict(self._nodes),
            commit=commit,
            warmup=warmup(run, commit.document.round) if run.merge.alpha and commit is not None else None,
            rounds=tuple(self._rounds),
            phases=tuple(self._phases),
            events=tuple(self._events),
        )

    def _named(self, nodes: Sequence[NodeId]) -> str:
        return View({node: sighting.record for node, sighting in self._nodes.items()}).call(nodes)

    def _note(self, kind: EventKind, node: NodeId | None, text: str) -> None:
        self._events.append(Event(time=self._clock(), kind=kind, node=node, text=text))


def _experts(experts: Sequence[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts))}"
