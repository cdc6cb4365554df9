"""Taking over from a node that leaves: the optimiser's moments of its experts go to those who train them next."""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from swarm.documents import Commit, Leave
from swarm.exchange import CallFailed, Exchange
from swarm.shard_names import expert_of
from swarm.store import ShardStore

log = logging.getLogger(__name__)


class Inheritance:
    """Fetches moments when they are offered, and keeps them until a task needs them."""

    def __init__(self, store: ShardStore, exchange: Exchange) -> None:
        self._store = store
        self._exchange = exchange
        self._moments: dict[str, Path] = {}
        self._fetches: set[asyncio.Task[None]] = set()

    def accept(self, leave: Leave, experts: Collection[int], head: Commit) -> None:
        """Begin to fetch what a leaving node offers of these experts; without it their moments start at zero.

        Args:
            leave: says what there is.
            experts: those that this node trains from now on.
            head: names the shards.
        """
        wanted = {
            name: offer
            for name, offer in leave.moments.items()
            # twice the values and a few words: more is not what it says it is
            if name in head.shards and expert_of(name) in experts and offer.size <= 2 * head.shards[name].size + 64
        }
        if wanted:
            fetch = asyncio.create_task(self._fetch(leave.node, {n: (w.digest, w.size) for n, w in wanted.items()}))
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)

    async def _fetch(self, node: str, wanted: dict[str, tuple[str, int]]) -> None:
        try:
            await self._exchange.fetch(node, list(wanted.values()), self._store.inherited_writer)
        except CallFailed as error:
            log.info("moments of experts left by %s", error)
        found = {name: path for name, (digest, _) in wanted.items() if (path := self._store.find(digest)) is not None}
        self._moments |= found
        log.debug("took over the moments of %d shards from %s", len(found), node)

    def take(self, experts: Collection[int]) -> dict[str, Path]:
        """The moments that are here of these experts, by shard; they are given once."""
        taken = {name: path for name, path in self._moments.items() if expert_of(name) in experts}
        for name in taken:
            del self._moments[name]
        return taken
