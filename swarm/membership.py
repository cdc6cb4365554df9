"""Who is in the swarm: this node's record in the DHT, kept alive while the daemon lives, and those of the others."""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from swarm.documents import Signed, canonical
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.network import Network, Stored
from swarm.ranking import ranked
from swarm.records import NodeRecord, View, record_key, record_keys
from swarm.warmup import Warmup, warmup, warmup_key

log = logging.getLogger(__name__)

MANIFEST_KEY = "spes.manifest"
"""DHT key under which a few nodes keep the author's signed manifest, for those who join."""
MANIFEST_KEEPERS = 3
BEATS_PER_LEASE = 5
"""A record is renewed this often in its life, so that one lost renewal or two do not matter."""
RECORDS_PER_SECOND = 16
"""That a node reads at most when it looks more often than it must: the larger the swarm, the fewer looks."""
FRESHEST_SECONDS = 0.25
"""A view that is not older than this is as good as a new one."""

STEADY = 0.75
"""A rate that is at least this part of another is told as if it were the same."""


def steady_rate(told: int, measured: float) -> int:
    """What to tell of a rate: small changes of a measurement must not change who does what.

    Args:
        told: bytes/s that were told last; 0 for none.
        measured: bytes/s.
    """
    return told if STEADY * told <= measured <= told / STEADY else int(measured)


class Lookout:
    """The records of a run as they are found in the DHT, little by little: each counts until it ends, whatever a later
    look misses."""

    def __init__(self, network: Network, run_id: str) -> None:
        self._network = network
        self._run_id = run_id
        self._found: dict[NodeId, tuple[Stored, NodeRecord]] = {}

    async def look(self, *, thorough: bool) -> dict[NodeId, NodeRecord]:
        """Read the records again; `thorough` as in `Network.read`. Returns those that have not ended."""
        for node, stored in (await self._network.read(record_keys(self._run_id), thorough=thorough)).items():
            if node in self._found and self._found[node][0].until >= stored.until:
                continue
            try:
                self._found[node] = stored, NodeRecord.open(stored.value, self._run_id)
            except (ValueError, TypeError) as error:
                log.debug("record of %s: %s", node, error)
                self._found.pop(node, None)
        self._found = {node: found for node, found in self._found.items() if found[0].is_live}
        return {node: record for node, (_, record) in self._found.items()}

    @property
    def until(self) -> dict[NodeId, float]:
        """When each of them ends, Unix seconds."""
        return {node: stored.until for node, (stored, _) in self._found.items()}


async def read_view(network: Network, run_id: str) -> View:
    """The swarm as it is now, for somebody who does not stay."""
    lookout = Lookout(network, run_id)
    return View(await lookout.look(thorough=True), lookout.until)


async def read_warmup(network: Network, manifest: Signed[Manifest]) -> Warmup | None:
    """Where a run stands in its merging warm-up, as the furthest of those who keep it tells; None when nobody does."""
    found = []
    for node, stored in (await network.read([warmup_key(manifest.digest)])).items():
        try:
            found.append(Warmup.open(stored.value, manifest.document))
        except (ValueError, TypeError) as error:
            log.debug("phase from %s: %s", node, error)
    return max(found, key=lambda told: told.round, default=None)


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
        self.view = View()
        self._manifest = manifest
        self._lease_seconds = manifest.document.round.lease_seconds
        self._beat_seconds = self._lease_seconds / BEATS_PER_LEASE
        self._lookout = Lookout(network, manifest.digest)
        self._looking = asyncio.Lock()
        self._looked = -math.inf
        self._looked_thoroughly = -math.inf
        self._others: dict[NodeId, NodeRecord] = {}
        self._changed = asyncio.Event()

    def note(self, **changes: Any) -> None:
        """Change fields of this node's record that nobody waits for; the next beat publishes them."""
        self.record = self.record.model_copy(update=changes)

    def update(self, **changes: Any) -> None:
        """Change fields of this node's record; it is published at once."""
        self.note(**changes)
        self._changed.set()

    @property
    def experts(self) -> tuple[int, ...]:
        """Those this node holds."""
        return self.record.experts

    def lease(self, experts: tuple[int, ...]) -> None:
        """Change the experts this node holds; a change is published at once."""
        if experts != self.experts:
            self.update(experts=experts)

    async def publish(self) -> None:
        """Store this node's record, its lease in it."""
        self._count_traffic()
        await self.network.store(
            record_key(self.record.run, self.network.node_id), canonical(self.record), self._lease_seconds
        )

    def _count_traffic(self) -> None:
        sent, received = self._traffic()
        self.record = self.record.model_copy(update={"sent": sent, "received": received})

    async def refresh(self) -> View:
        """Look again, unless that was done a moment ago; this node's own record is always there, as it knows itself
        best."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            enough = min(len(self.view.nodes) / RECORDS_PER_SECOND, self._beat_seconds)
            if now - self._looked > max(FRESHEST_SECONDS, enough):
                # who has just come, or was asleep, knows nothing that is true
                await self._look(thorough=now - self._looked_thoroughly > 2 * self._lease_seconds)
        return self._see()

    async def _look(self, *, thorough: bool) -> None:
        self._others = await self._lookout.look(thorough=thorough)
        self._looked = asyncio.get_running_loop().time()
        if thorough:
            self._looked_thoroughly = self._looked

    def _see(self) -> View:
        self._count_traffic()
        me = self.network.node_id
        self.view = View({**self._others, me: self.record}, self._lookout.until)
        self.network.book.update({n: r.addresses for n, r in self.view.present().items() if n != me})
        return self.view

    async def beat(self) -> None:
        """Renew the records for ever, at once when they change, and look for peers that are out of sight.

        All that goes side by side: a peer that does not answer must not delay this node's own sign of life.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            group.create_task(self._keep_for_all())
            group.create_task(self._look_around())

    async def _renew(self) -> None:
        while True:
            self._changed.clear()
            await self.publish()
            try:
                async with asyncio.timeout(self._beat_seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _keep_for_all(self) -> None:
        """Store the manifest and the phase of the run as long as this node is one of their keepers."""
        me, run_id = self.network.node_id, self._manifest.digest
        while True:
            keepers = ranked({*self.view.present(), me}, run_id, "manifest")[:MANIFEST_KEEPERS]
            if self.record.role == "rendezvous" or me in keepers:
                await self.network.store(MANIFEST_KEY, self._manifest.wire, self._lease_seconds)
                if self._manifest.document.merge.alpha:
                    phase = canonical(warmup(self._manifest.document, self.record.round))
                    await self.network.store(warmup_key(run_id), phase, self._lease_seconds)
            await asyncio.sleep(self._beat_seconds)

    async def _look_around(self) -> None:
        while True:
            # Now and then everybody is asked: whoever answers first may have missed some. Nobody has to wait for it.
            age = asyncio.get_running_loop().time() - self._looked_thoroughly
            await self._look(thorough=age > self._lease_seconds)
            view = self._see()
            # p2pd finds few peers by itself, and a record says where its node is
            there = view.nodes.keys() & await self.network.connected()
            missing = self.network.book.contacts.keys() - there
            if missing and await self.network.redial(missing):
                self._looked_thoroughly -= self._lease_seconds  # they know whom nobody here knows
            await asyncio.sleep(self._beat_seconds)

    async def say_goodbye(self) -> None:
        """Withdraw the lease and mark the node as gone."""
        self.note(state="left", reason="left the swarm", experts=())
        await self.publish()
