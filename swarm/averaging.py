"""The duty of a reducer and of its stand-ins in a round: average each shard when its turn has come."""

import asyncio
import logging

from swarm.context import Context
from swarm.documents import Reduction, Result
from swarm.patience import LOOK_SECONDS, Patience
from swarm.reduce import Reducer
from swarm.tally import Tally

log = logging.getLogger(__name__)


class Averaging:
    """Averages the shards that fall to this node, first as their reducer, then as a stand-in."""

    def __init__(self, context: Context, tally: Tally, patience: Patience) -> None:
        self._context = context
        self._tally = tally
        self._patience = patience
        self._started = asyncio.get_running_loop().time()
        self.reducer = Reducer(
            tally.plan,
            tally.base,
            context.manifest.encoding,
            store=context.replica.store,
            residuals=context.residuals,
            exchange=context.exchange,
            margin=context.margin,
            complain=context.complain,
            rate=context.manifest.round.outer_rate,
            excused=tally.excused,
        )
        self._possible = [name for name, nodes in tally.order.items() if context.me in nodes]
        self._tried: set[str] = set()
        self._results: dict[str, Result] = {}

    async def run(self) -> None:
        """Average until it is cancelled."""
        await self._wait_for_contributions()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            await self._average()

    async def _watch(self) -> None:
        """Find out which of the other reducers are gone, while this node is busy itself."""
        while True:
            await self._patience.wait(
                lambda: None,
                what="reduction",
                whom=lambda: self._tally.awaited_reducers(self._context.me),
                seconds=self._context.margin,
            )

    async def _average(self) -> None:
        while True:
            if turn := self._due():
                self._tried |= set(turn)
                others = [offer for node, offer in self._tally.contributions().items() if node != self._context.me]
                theirs = {name for offer in others for name in offer.shards}
                # what needs nothing from others is on its way to them while the rest is being fetched
                await self._reduce([name for name in turn if name not in theirs])
                log.debug("round %d: this node averages what others have trained, too", self._tally.plan.round)
                await self._reduce([name for name in turn if name in theirs])
            await self._context.board.until(self._due, LOOK_SECONDS)

    async def _reduce(self, names: list[str]) -> None:
        """Average shards, and announce what has come of it."""
        if not names or not (made := await self.reducer.reduce(names, self._tally.contributions())):
            return
        plan = self._tally.plan
        self._results |= made
        self._context.publish(
            Reduction(
                run=plan.run,
                round=plan.round,
                plan=self._tally.digest,
                node=self._context.me,
                results=dict(self._results),
            )
        )
        log.debug("round %d: this node announces %s", plan.round, ", ".join(made))

    async def _wait_for_contributions(self) -> None:
        """Until all who are there have handed in. Once half of them have, the others get the margin to stop training,
        and half of it again for the way; nobody waits longer than the plan's time and the margin."""
        tally, margin = self._tally, self._context.margin
        deadline = tally.plan.train_seconds + margin

        await self._patience.wait(
            lambda: True if tally.half_handed_in() or not tally.awaited_contributors() else None,
            what="contribution",
            whom=tally.awaited_contributors,
            seconds=deadline,
        )
        await self._patience.wait(
            lambda: True if not tally.awaited_contributors() else None,
            what="contribution",
            whom=tally.awaited_contributors,
            seconds=max(0.0, min(1.5 * margin, deadline - self._elapsed())),
        )

    def _due(self) -> list[str] | None:
        announced = self._tally.announced()
        return [
            name
            for name in self._possible
            if name not in self._tried and name not in announced and self._is_my_turn(name)
        ] or None

    def _is_my_turn(self, name: str) -> bool:
        """Whether those who come before this node are gone or overdue: the first stand-in has one margin until the
        leader commits what there is."""
        plan, order = self._tally.plan, self._tally.order[name]
        before = order[: order.index(self._context.me)]
        overdue = self._elapsed() - plan.train_seconds - plan.reduce_seconds
        return all(
            self._tally.excused(node) or overdue > place * self._context.margin for place, node in enumerate(before)
        )

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._started
