"""What is known of a run at one moment. The command line, the page, the API and the metrics all tell from one of these,
so that none of them says anything else than the others."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from node.expert_load import dead, shares
from node.health import examine
from swarm.documents import Commit, Signed
from swarm.history import RoundLine
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.records import NodeRecord, State
from swarm.release import VERSION
from swarm.shard_names import expert_of
from swarm.warmup import Warmup

SCHEMA = 1
"""Version of the JSON form: keys are added within one, not taken away."""

EventKind = Literal["joined", "left", "lost", "back", "complaint", "experts", "round", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A node as it was seen last."""

    record: NodeRecord
    seen: float
    """Unix seconds of its last sign of life."""
    lost: bool = False
    """Its record has ended, and it has not said goodbye."""

    @property
    def is_there(self) -> bool:
        """Whether it is part of the swarm."""
        return not self.lost and self.record.state != "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What this node is doing, and why."""

    state: State
    reason: str
    since: float
    """Unix seconds at which the state began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in the swarm."""

    time: float
    kind: EventKind
    node: NodeId | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A run at one moment, as one process sees it."""

    version: int
    """A later one has a higher number."""
    time: float
    manifest: Signed[Manifest]
    me: NodeId | None
    """The node whose process this is; None for one that only looks on."""
    nodes: Mapping[NodeId, Sighting]
    commit: Signed[Commit] | None
    """The last one that is known."""
    warmup: Warmup | None
    rounds: tuple[RoundLine, ...]
    phases: tuple[Phase, ...]
    """Of this node, the last one being the one it is in."""
    events: tuple[Event, ...]

    def holders(self) -> dict[int, list[NodeId]]:
        """For each leased expert, the nodes that are there and hold it."""
        found = dict[int, list[NodeId]]()
        for node, sighting in sorted(self.nodes.items()):
            for expert in sighting.record.experts if sighting.is_there else ():
                found.setdefault(expert, []).append(node)
        return found

    @property
    def eta_seconds(self) -> float | None:
        """Until the run is complete if its rounds take as long as the last ones; None where that cannot be said."""
        if self.commit is None or not (total := self.manifest.document.round.total):
            return None
        recent = sorted(line.seconds for line in self.rounds[-9:] if line.seconds)
        return (total - self.commit.document.round) * recent[len(recent) // 2] if recent else None


def as_json(snapshot: Snapshot, *, rounds: bool = True) -> dict[str, Any]:
    """A snapshot as JSON-able data; `rounds` and events are the long part of it."""
    run, commit = snapshot.manifest.document, snapshot.commit.document if snapshot.commit is not None else None
    holders, state = snapshot.holders(), commit.state if commit is not None else None
    told = {
        "schema": SCHEMA,
        "version": snapshot.version,
        "time": snapshot.time,
        "software": VERSION,
        "run": {
            "id": snapshot.manifest.digest,
            "name": run.name,
            "rounds": run.round.total,
            "author": run.author,
            "layers": run.model.num_layers,
            "local_steps": run.round.local_steps,
            "owners_per_expert": run.round.owners_per_expert,
            "lease_seconds": run.round.lease_seconds,
        },
        "me": snapshot.me,
        "phases": [asdict(phase) for phase in snapshot.phases],
        "round": commit.round if commit is not None else None,
        "warmup": snapshot.warmup.model_dump() if snapshot.warmup is not None else None,
        "loss": commit.loss if commit is not None and commit.round else None,
        "heldout_loss": commit.heldout_loss if commit is not None else None,
        "utilisation": commit.busy if commit is not None else None,
        "tokens": commit.tokens if commit is not None else None,
        "eta_seconds": snapshot.eta_seconds,
        "state": state,
        "experts": run.model.num_experts,
        "experts_covered": len(holders),
        "leases": {str(expert): holders[expert] for expert in sorted(holders)},
        "expert_rounds": expert_rounds(commit),
        "expert_load": shares(commit.choices) if commit is not None else [],
        "dead_experts": dead(commit.choices) if commit is not None else [],
        "health": [asdict(trouble) for trouble in examine(snapshot)],
        "last_round": round_facts(commit) if commit is not None else None,
        "nodes": [_node(snapshot, node, state) for node in sorted(snapshot.nodes)],
    }
    if rounds:
        told["rounds"] = [asdict(line) for line in snapshot.rounds]
        told["events"] = [asdict(event) for event in snapshot.events]
    return told


def expert_rounds(commit: Commit | None) -> dict[str, int]:
    """The round of the oldest shard of each expert: how far its training is behind if nobody trains it."""
    found = dict[str, int]()
    for name, shard in commit.shards.items() if commit is not None else ():
        if (expert := expert_of(name)) is not None:
            found[str(expert)] = min(shard.version, found.get(str(expert), shard.version))
    return found


def round_facts(commit: Commit) -> dict[str, Any]:
    """Who did what in a round, as JSON-able data."""
    return {
        "round": commit.round,
        "leader": commit.leader,
        "owners": {node: list(experts) for node, experts in commit.owners.items()},
        "tokens": {node: share.tokens for node, share in commit.shares.items()},
        "missing": list(commit.missing),
        "carried": list(commit.carried) if commit.round else [],
        "train_seconds": commit.train_seconds,
        "reduce_seconds": commit.reduce_seconds[-1] if commit.reduce_seconds else 0.0,
    }


def _node(snapshot: Snapshot, node: NodeId, state: str | None) -> dict[str, Any]:
    sighting, run = snapshot.nodes[node], snapshot.manifest.document
    record = sighting.record
    step_tokens = run.round.batch_blocks * run.data.block_tokens
    return {
        "id": node,
        **record.model_dump(include={"name", "role", "round", "digest", "version", "device"}),
        "state": "lost" if sighting.lost else record.state,
        "reason": _lost(snapshot, sighting) if sighting.lost else record.reason,
        "seen": sighting.seen,
        "experts": list(record.experts),
        "capacity": record.capacity,
        "in_sync": record.digest == state,
        "trained_tokens": record.trained_tokens,
        "tokens_per_second": step_tokens / record.seconds_per_step if record.seconds_per_step else 0.0,
        "utilisation": record.utilisation,
        "uplink": record.uplink,
        "complaint": record.complaint,
        "sent": record.sent,
        "received": record.received,
        "addresses": list(record.addresses),
    }


def _lost(snapshot: Snapshot, sighting: Sighting) -> str:
    held = ", ".join(map(str, sighting.record.experts))
    return f"not heard of any more, last in round {sighting.record.round}" + (
        f"; it held experts {held}" if held else ""
    )
