"""What nodes say about themselves in the DHT, and the swarm as one of them sees it."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import msgpack
from pydantic import Field

from model.settings import Settings
from swarm.documents import Count, Digest
from swarm.identity import NodeId, short
from swarm.manifest import PROTOCOL

BUCKETS = 16
"""DHT keys that the records of a run are spread over, so that the few nodes that keep one have little of them each."""

State = Literal[
    "starting", "syncing", "waiting", "merging", "training", "averaging", "following", "paused", "finished", "left"
]
Text = Field(max_length=120)
MOST_NAME = 40
"""Of a node's name, so many letters are shown."""


class NodeRecord(Settings):
    """What a node says about itself to everybody, leases included."""

    run: Digest
    protocol: Count = PROTOCOL
    version: str = Text
    name: str = Text
    role: Literal["trainer", "rendezvous", "seed"]
    state: State = "starting"
    reason: str = Field(default="", max_length=120)
    """Why the node is in this state, as a sentence."""
    addresses: tuple[str, ...] = Field(max_length=4)
    round: Count = 0
    """Last commit this node holds completely."""
    commit: str = Field(default="", max_length=64)
    """Digest of that commit."""
    digest: str = Field(default="", max_length=64)
    """Digest of the model state, computed from the shards on this node's disk."""
    tokens: Count = 0
    """Tokens of the run up to that commit: of two chains the one with more wins."""
    capacity: Count = 0
    """Experts this node can train."""
    experts: tuple[Count, ...] = Field(default=(), max_length=4096)
    """Those it holds a lease on: as long as this record lives."""
    device: str = Field(default="", max_length=120)
    seconds_per_step: float = Field(default=0.0, ge=0)
    utilisation: float = Field(default=0.0, ge=0, le=1)
    """Share of its time that it spent in training steps between its last two contributions."""
    complaint: str = Field(default="", max_length=120)
    """What a peer did wrong, as this node saw it last; empty when none did."""
    uplink: Count = 0
    """Bytes/s that it can send, as measured while it served its peers, see `steady_rate`; 0 until it is known."""
    trained_tokens: Count = 0
    """Tokens this node has trained since it started."""
    sent: Count = 0
    """Bytes of shards and documents sent since the start."""
    received: Count = 0

    @classmethod
    def open(cls, value: bytes, run_id: str) -> Self:
        """Read what a node has stored. Raises ValueError when that is no record of this run and protocol."""
        record = cls.model_validate(msgpack.unpackb(value, use_list=False))
        if (record.run, record.protocol) != (run_id, PROTOCOL):
            raise ValueError("it belongs to another run or protocol")
        return record


@dataclass(frozen=True, slots=True)
class View:
    """The swarm as one node sees it at one moment."""

    nodes: Mapping[NodeId, NodeRecord] = field(default_factory=dict)
    until: Mapping[NodeId, float] = field(default_factory=dict)
    """When the record of a node ends unless it renews it, Unix seconds; none for the node itself."""

    def call(self, nodes: Collection[str]) -> str:
        """Nodes for people, three of them at most: by name, and by the end of the id where nobody knows the name."""
        some = [self._called(node) for node in list(nodes)[:3]]
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        return ", ".join(some) + more if some else "nobody"

    def _called(self, node: str) -> str:
        """The name of a node, which it has chosen itself: without what a terminal would take for more than text."""
        record = self.nodes.get(NodeId(node))
        name = "".join(filter(str.isprintable, record.name))[:MOST_NAME].strip() if record is not None else ""
        return name or short(node)

    def without(self, node: NodeId) -> "View":
        """The view when a node is gone."""
        return View({other: record for other, record in self.nodes.items() if other != node})

    def present(self) -> dict[NodeId, NodeRecord]:
        """Nodes that have not said goodbye."""
        return {node: record for node, record in self.nodes.items() if record.state != "left"}

    def is_beyond(self, number: int) -> bool:
        """Whether somebody holds a later round than this one."""
        return any(record.round > number for record in self.present().values())

    def trainers(self) -> dict[NodeId, NodeRecord]:
        """Nodes that train."""
        return {node: record for node, record in self.present().items() if record.role == "trainer"}

    def holders(self) -> dict[int, list[NodeId]]:
        """For each leased expert, who holds a lease on it."""
        found = dict[int, list[NodeId]]()
        for node, record in self.present().items():
            for expert in record.experts:
                found.setdefault(expert, []).append(node)
        return found


def record_key(run_id: str, node: NodeId) -> str:
    """The DHT key that a node's record is under."""
    return record_keys(run_id)[hashlib.sha256(node.encode()).digest()[0] % BUCKETS]


def record_keys(run_id: str) -> list[str]:
    """The DHT keys of a run's records."""
    return [f"{run_id}.{bucket}" for bucket in range(BUCKETS)]
