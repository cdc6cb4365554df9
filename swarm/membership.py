"""Who is in the swarm: node records and leases in the DHT, kept alive while the daemon lives."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgpack
from pydantic import Field, ValidationError

from model.settings import Settings
from swarm.documents import Count, Digest, Signed, canonical
from swarm.identity import NodeId
from swarm.manifest import PROTOCOL, Manifest
from swarm.network import Network
from swarm.ranking import ranked

log = logging.getLogger(__name__)

MANIFEST_KEY = "spes.manifest"
"""DHT key under which a few nodes keep the author's signed manifest, for those who join."""
MANIFEST_KEEPERS = 3
BEATS_PER_LEASE = 5
"""A record is renewed this often in its life, so that one lost renewal or two do not matter."""

State = Literal["starting", "syncing", "waiting", "training", "averaging", "following", "finished", "left"]
Text = Field(max_length=120)


class NodeRecord(Settings):
    """What a node says about itself to everybody; at most 4 kB."""

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


class LeaseRecord(Settings):
    """The experts a node holds; the record's expiry is the lease's."""

    run: Digest
    experts: tuple[Count, ...] = Field(max_length=4096)


@dataclass(frozen=True, slots=True)
class View:
    """The swarm as one node sees it at one moment."""

    nodes: Mapping[NodeId, NodeRecord] = field(default_factory=dict)
    leases: Mapping[NodeId, tuple[int, ...]] = field(default_factory=dict)

    def without(self, node: NodeId) -> "View":
        """The view when a node is gone."""
        return View(
            {other: record for other, record in self.nodes.items() if other != node},
            {other: experts for other, experts in self.leases.items() if other != node},
        )

    def present(self) -> dict[NodeId, NodeRecord]:
        """Nodes that have not said goodbye."""
        return {node: record for node, record in self.nodes.items() if record.state != "left"}

    def trainers(self) -> dict[NodeId, NodeRecord]:
        """Nodes that train."""
        return {node: record for node, record in self.present().items() if record.role == "trainer"}

    def holders(self) -> dict[int, list[NodeId]]:
        """For each leased expert, who holds a lease on it."""
        present, found = self.present(), dict[int, list[NodeId]]()
        for node, experts in self.leases.items():
            if node in present:
                for expert in experts:
                    found.setdefault(expert, []).append(node)
        return found


STEADY = 0.75
"""A rate that is at least this part of another is told as if it were the same."""


def steady_rate(told: int, measured: float) -> int:
    """What to tell of a rate: small changes of a measurement must not change who does what.

    Args:
        told: bytes/s that were told last; 0 for none.
        measured: bytes/s.
    """
    return told if STEADY * told <= measured <= told / STEADY else int(measured)


R = TypeVar("R", bound=Settings)


def _parse(model: type[R], node: NodeId, value: bytes) -> R | None:
    try:
        fields: Any = msgpack.unpackb(value, use_list=False)
        return model.model_validate(fields)
    except (ValueError, TypeError, ValidationError) as error:
        log.debug("record of %s is not a %s: %s", node, model.__name__, error)
        return None


def nodes_key(run_id: str) -> str:
    """DHT key of a run's node records."""
    return f"{run_id}.nodes"


def leases_key(run_id: str) -> str:
    """DHT key of a run's leases."""
    return f"{run_id}.leases"


async def read_view(network: Network, run_id: str) -> View:
    """Read the swarm's records from the DHT; those of another run or another form are left out."""
    records, leases = await asyncio.gather(network.read(nodes_key(run_id)), network.read(leases_key(run_id)))
    nodes = {node: _parse(NodeRecord, node, value) for node, value in records.items()}
    held = {node: _parse(LeaseRecord, node, value) for node, value in leases.items()}
    return View(
        {n: r for n, r in nodes.items() if r is not None and r.run == run_id and r.protocol == PROTOCOL},
        {n: r.experts for n, r in held.items() if r is not None and r.run == run_id},
    )


class Membership:
    """This node's records, and its view of the others'."""

    def __init__(
        self,
        network: Network,
        manifest: Signed[Manifest],
        record: NodeRecord,
        traffic: Callable[[], tuple[int, int]],
    ) -> None:
        """Args:
        network: joined.
        manifest: the run's.
        record: what the node says about itself at the start.
        traffic: bytes sent and received so far.
        """
        self.network = network
        self._traffic = traffic
        self.record = record
        self.experts: tuple[int, ...] = ()
        self.view = View()
        self._manifest = manifest.wire
        self._lease_seconds = manifest.document.round.lease_seconds
        self._changed = asyncio.Event()

    def note(self, **changes: Any) -> None:
        """Change fields of this node's record that nobody waits for; the next beat publishes them."""
        self.record = self.record.model_copy(update=changes)

    def update(self, **changes: Any) -> None:
        """Change fields of this node's record; it is published at once."""
        self.note(**changes)
        self._changed.set()

    def lease(self, experts: tuple[int, ...]) -> None:
        """Change the experts this node holds; a change is published at once."""
        if experts != self.experts:
            self.experts = experts
            self._changed.set()

    async def publish(self) -> None:
        """Store this node's record and lease, and the manifest when this node is one of its keepers."""
        self._count_traffic()
        run_id = self.record.run
        lease = LeaseRecord(run=run_id, experts=self.experts)
        records = {nodes_key(run_id): canonical(self.record), leases_key(run_id): canonical(lease)}
        if self._keeps_manifest():
            records[MANIFEST_KEY] = self._manifest
        await asyncio.gather(*[self.network.store(k, value, self._lease_seconds) for k, value in records.items()])

    def _count_traffic(self) -> None:
        sent, received = self._traffic()
        self.record = self.record.model_copy(update={"sent": sent, "received": received})

    def _keeps_manifest(self) -> bool:
        others = self.view.present().keys() - {self.network.node_id}
        keepers = ranked([*others, self.network.node_id], self.record.run, "manifest")[:MANIFEST_KEEPERS]
        return self.record.role == "rendezvous" or self.network.node_id in keepers

    async def refresh(self) -> View:
        """Read the view again; this node's own record is always in it, as it knows itself best."""
        view = await read_view(self.network, self.record.run)
        self._count_traffic()
        me = self.network.node_id
        self.view = View({**view.nodes, me: self.record}, {**view.leases, me: self.experts})
        self.network.book.update({n: r.addresses for n, r in self.view.present().items() if n != me})
        return self.view

    async def beat(self) -> None:
        """Renew the records for ever, at once when they change, and look for peers that are out of sight.

        The two go side by side: a peer that does not answer must not delay this node's own sign of life.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            group.create_task(self._look_around())

    async def _renew(self) -> None:
        while True:
            self._changed.clear()
            await self.publish()
            try:
                async with asyncio.timeout(self._lease_seconds / BEATS_PER_LEASE):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _look_around(self) -> None:
        while True:
            view = await self.refresh()
            # p2pd finds few peers by itself, and a record says where its node is
            there = view.nodes.keys() & await self.network.connected()
            if missing := self.network.book.contacts.keys() - there:
                await self.network.redial(missing)
            await asyncio.sleep(self._lease_seconds / BEATS_PER_LEASE)

    async def say_goodbye(self) -> None:
        """Withdraw the lease and mark the node as gone."""
        self.experts = ()
        self.record = self.record.model_copy(update={"state": "left", "reason": "left the swarm"})
        await self.publish()
