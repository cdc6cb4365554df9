"""One round on one node, from the accepted plan to the commit."""

import asyncio
import logging
from collections.abc import Callable

from swarm.averaging import Averaging
from swarm.collect import Collector
from swarm.context import Context
from swarm.documents import Commit, Plan, Result, Signed
from swarm.leader import make_commit
from swarm.patience import ASLEEP_SECONDS, LOOK_SECONDS
from swarm.progress import HandedIn
from swarm.ranking import ranked
from swarm.tally import Tally
from swarm.trainer import Trainer
from swarm.training import Training

log = logging.getLogger(__name__)


class Round:
    """The four duties of a node in a round, side by side: train, average, collect results, commit."""

    def __init__(
        self,
        context: Context,
        plan: Signed[Plan],
        base: Commit,
        trainer: Trainer,
        last: HandedIn | None,
        accepted: Callable[[], Signed[Plan] | None],
    ) -> None:
        """Take part in `plan`, which this node has accepted and in whose roster it is.

        Args:
            context: the node's.
            plan: the round's.
            base: what it starts from.
            trainer: trains.
            last: what this node has handed in last.
            accepted: the plan that this node would accept now.
        """
        self._accepted = accepted
        self.plan = plan.document
        self._context = context
        self._tally = Tally(context, plan, base)
        self._trainer = trainer
        self._board = context.board
        self._margin = context.margin
        self._started = asyncio.get_running_loop().time()
        self._led_nowhere = False
        """Nobody contributed, or this node was asleep: it must look around before it decides anything."""
        self._patience = context.patience(self._show_wait)
        self._training = Training(context, self._tally, trainer, last)
        self._averaging = Averaging(context, self._tally, self._patience)

    @property
    def handed_in(self) -> HandedIn | None:
        """What this node has handed in last, in this round if it has."""
        return self._training.handed_in

    async def run(self) -> Signed[Commit] | None:
        """Take part; returns the round's commit, or None when none came by any deadline, or another plan counts."""
        collector = Collector(self._context, self._tally.plan, self._tally.digest, self._tally.base)
        async with asyncio.TaskGroup() as group:
            training = group.create_task(self._training.run())
            collecting = group.create_task(collector.run())
            duties = [group.create_task(duty) for duty in (self._averaging.run(), self._commit())]
            await self._patience.wait(
                lambda: True if self._led_nowhere or self._is_superseded() or self._tally.commit() else None,
                what="commit",
                whom=lambda: [n for n in self._commit_order() if n != self._context.me and not self._tally.excused(n)][
                    :1
                ],
                seconds=self._commit_deadline(len(self.plan.roster)),
            )
            for duty in duties:
                duty.cancel()
            if (commit := self._tally.commit()) is not None:
                await collector.complete(commit.document)
            collecting.cancel()
            if not training.done():
                self._trainer.stop()
                await training
        return self._tally.commit()

    def _is_superseded(self) -> bool:
        """Whether the plan of a leader who comes before this one's has arrived late: all go by that one. Another plan
        of the same leader is none, or it could keep everybody changing plans."""
        plan = self._accepted()
        return plan is not None and plan.signer != self.plan.leader

    def settle(self, commit: Commit) -> None:
        """The round has ended with this commit, whose state is now here."""
        if commit.plan == self._tally.digest:
            self._training.settle(commit)
            self._averaging.reducer.settle(commit, self._context.me)

    # committing

    async def _commit(self) -> None:
        """Write the commit when it is this node's turn and all results are in, or their time is over."""
        loop = asyncio.get_running_loop()
        contributed: float | None = None
        looked = loop.time()
        while True:
            if loop.time() - looked > ASLEEP_SECONDS:
                self._lead_nowhere()
                return
            looked = loop.time()
            if contributed is None and not self._tally.awaited_contributors():
                contributed = loop.time()
            results = self._tally.resolved()
            if self._may_commit() and (self._tally.is_complete(results) or self._elapsed() > self._commit_deadline(0)):
                self._write_commit(results, loop.time() - (contributed or self._started))
                return
            await self._board.changed(LOOK_SECONDS)

    def _write_commit(self, results: dict[str, tuple[str, Result]], reduce_seconds: float) -> None:
        log.debug("round %d: this node commits %d results", self.plan.round, len(results))
        commit = make_commit(
            self.plan,
            self._tally.digest,
            self._context.me,
            self._tally.base,
            results,
            self._tally.contributions(),
            reduce_seconds,
        )
        quorum = self._context.manifest.round.commit_quorum * len(self._tally.base.shares)
        if commit.shares and len(commit.shares) >= quorum:
            self._context.publish(commit)
        else:
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        self._led_nowhere = True
        self._board.notify()

    def _commit_order(self) -> list[str]:
        """Who may write the commit: the leader of the plan, then the others."""
        leader = self.plan.leader
        return [leader, *(n for n in ranked(self.plan.roster, self.plan.run, self.plan.round, "commit") if n != leader)]

    def _commit_deadline(self, place: int) -> float:
        """Seconds after the plan's arrival when the node at this place of the order, the leader at 0, commits what
        there is. The next one follows a margin later: two commits at once would split the swarm."""
        return self.plan.train_seconds + self.plan.reduce_seconds + (1 + place) * self._margin

    def _may_commit(self) -> bool:
        order = self._commit_order()
        place = order.index(self._context.me)
        return all(
            self._tally.excused(node) or self._elapsed() > self._commit_deadline(before)
            for before, node in enumerate(order[:place], start=1)
        )

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    def _show_wait(self, text: str) -> None:
        if self._training.work is not None:
            self._context.tell("averaging", f"round {self.plan.round}: {text}")
