"""Fetches the results of a round as they are announced: its commit finds them here, and a lost maker is no loss."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.context import Context
from swarm.documents import Commit, Encoded, Plan, Reduction
from swarm.gather import Gather
from swarm.leader import reducers
from swarm.patience import LOOK_SECONDS, ask
from swarm.relay import relay_orders, sources_for
from swarm.sharing import Tempo
from swarm.store import ObjectWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announced:
    """A result, and who has made it."""

    name: str
    maker: str
    encoded: Encoded
    values: str


class Collector:
    """Brings the results of one round here and makes the new values from them.

    Results come by a tree of its own for each of them (`swarm.relay`), so that its maker hands it out once.
    """

    def __init__(self, context: Context, plan: Plan, digest: str, base: Commit) -> None:
        """Args:
        context: the node's; its head is the commit that the round follows.
        plan: the round's, with its digest.
        base: what the round starts from.
        """
        self._context = context
        self._replica = context.replica
        self._board = context.board
        self._plan = plan
        self._digest = digest
        self._base = base
        shards = base.shards
        self._orders = relay_orders(
            reducers(plan, {name: shard.size for name, shard in shards.items()}),
            {name: self._replica.encoded_size(name) for name in shards},
            plan.uplinks,
        )
        self._results: dict[str, list[Announced]] = {}
        """By digest of what travels: two shards may have changed by the same bytes."""
        self._seen: set[str] = set()
        """Digests of the announcements that have been looked at."""
        self._arrived: asyncio.Queue[str] = asyncio.Queue()
        self._gather = Gather(
            context.exchange,
            self._writer,
            on_arrival=self._arrived.put_nowait,
            on_liar=lambda node: context.complain(node, "it sent wrong bytes"),
            tempo=Tempo(
                progress_seconds=context.exchange.progress_seconds,
                patience_seconds=2 * context.exchange.progress_seconds,
            ),
        )
        self._lost: set[str] = set()
        """Nodes that nobody counts on."""

    async def run(self) -> None:
        """Collect until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._gather.run())
            group.create_task(self._apply_arrivals())
            while True:
                for node, signed in self._board.reductions.get((self._plan.round, self._digest), {}).items():
                    if node in self._plan.roster and signed.digest not in self._seen:
                        self._seen.add(signed.digest)
                        group.create_task(self._look_for_contributors(node, signed.document))
                        for name, result in signed.document.results.items():
                            self._want(Announced(name, node, result.encoded, result.values))
                lost = {node for node in self._plan.uplinks if self._board.excused(node, self._plan.round)}
                for node in lost - self._lost:
                    self._gather.lose(node)
                self._lost = lost
                await self._board.changed(LOOK_SECONDS)

    async def _look_for_contributors(self, maker: str, reduction: Reduction) -> None:
        """Ask the maker of results for the contributions to them that are not delivered here before long: without these
        nobody can tell what the results contain."""
        number, key = self._plan.round, (self._plan.round, self._digest)
        named = {node for result in reduction.results.values() for node in result.contributors}
        named &= self._plan.roster.keys()
        await self._board.until(lambda: named <= self._board.contributions.get(key, {}).keys() or None, LOOK_SECONDS)
        for node in sorted(named - self._board.contributions.get(key, {}).keys()):
            await ask(self._board, self._context.exchange, maker, "contribution", number, node)

    async def complete(self, commit: Commit) -> None:
        """Wait until all results that a commit contains have been made to values here, or nobody can give them.

        Others that are still on their way are not waited for: the commit was written without them.
        """
        for name, update in commit.updates.items():
            if name in self._base.shards:
                self._want(Announced(name, update.reducer, update.encoded, commit.shards[name].digest))
        settled = asyncio.ensure_future(self._gather.settled({u.encoded.digest for u in commit.updates.values()}))
        try:
            # peers that are further have what travelled in this round no more before long, but the state
            while not settled.done() and not self._context.membership.view.is_beyond(commit.round):
                await asyncio.wait([settled], timeout=LOOK_SECONDS)
        finally:
            settled.cancel()
        await self._arrived.join()
        log.debug("round %d: all results are here, or nobody has them", commit.round)

    def _want(self, result: Announced) -> None:
        if result.name not in self._base.shards or self._replica.store.find(result.values) is not None:
            return
        if result.encoded.size != self._replica.encoded_size(result.name):
            self._context.complain(result.maker, f"its result for {result.name} has the size of another shard")
            return
        known = self._results.setdefault(result.encoded.digest, [])
        if result in known:
            return
        known.append(result)
        if self._replica.store.find(result.encoded.digest) is not None:
            self._arrived.put_nowait(result.encoded.digest)
        else:
            sources, reserve = self._sources(result)
            self._gather.want(result.encoded.digest, result.encoded.size, sources, reserve)

    def _sources(self, result: Announced) -> tuple[Sequence[str], Sequence[str]]:
        """Whom to ask, and whom else; those that do not answer only if there is no other way."""
        me = self._context.me
        planned = self._orders.get(result.name, self._plan.uplinks)
        order = [result.maker, *(node for node in planned if node != result.maker)]  # a stand-in may have made it
        if me == result.maker:  # it was started again since, and others have what it made
            sources, reserve = order[1:2], order[2:]
        elif me in order:
            sources, reserve = sources_for(order, me)
        else:  # it came after the plan was written: nobody counts on it
            sources, reserve = order[-1:], order[:-1]
        if sources and self._board.excused(sources[0], self._plan.round):
            present = [node for node in reserve if not self._board.excused(node, self._plan.round)]
            sources, reserve = present[:1] or sources, present[1:]
        return sources, reserve

    def _writer(self, digest: str, size: int) -> ObjectWriter:
        first = self._results[digest][0]
        return self._replica.result_writer(first.name, first.encoded)

    async def _apply_arrivals(self) -> None:
        while True:
            digest = await self._arrived.get()
            for result in self._results[digest]:
                trouble = await asyncio.to_thread(
                    self._replica.apply, self._base, result.name, result.encoded, result.values
                )
                if trouble:
                    self._context.complain(result.maker, trouble)
                    self._board.lose(result.maker)  # its shards go to their stand-ins, or are carried
            self._arrived.task_done()
            self._board.notify()
