"""A node's training in a round: from the plan to what it hands in."""

import asyncio
import logging
from collections.abc import Collection

from swarm import blocks
from swarm.context import Context
from swarm.contribute import Contributor
from swarm.documents import Commit, Contribution
from swarm.progress import HandedIn, references
from swarm.tally import Tally
from swarm.trainer import Task, Trainer, Work

log = logging.getLogger(__name__)


class Training:
    """Trains this node's part of one round and hands it in."""

    def __init__(self, context: Context, tally: Tally, trainer: Trainer, last: HandedIn | None) -> None:
        """Args:
        context: the node's.
        tally: the round's.
        trainer: trains.
        last: what this node has handed in last.
        """
        self._context = context
        self._tally = tally
        self._trainer = trainer
        self._last = last
        self._contributor = Contributor(context.manifest.encoding, tally.base, context.replica.store, context.residuals)
        self.work: Work | None = None
        """What this node has trained, once it has."""

    @property
    def handed_in(self) -> HandedIn | None:
        """The contribution of this round, or the last one before it."""
        if self.work is None:
            return self._last
        return HandedIn(self._tally.digest, self._tally.plan.parent, self._tally.base, self.work)

    async def run(self) -> None:
        """Train and hand in."""
        plan = self._tally.plan
        experts = plan.owners.get(self._context.me, ())
        steps = plan.roster[self._context.me].steps
        self._context.tell("training", f"round {plan.round}: up to {steps} steps on experts {_list(experts)}")
        log.debug("round %d: this node trains up to %d steps", plan.round, steps)
        hurry = asyncio.create_task(self._hurry())
        try:
            work = await self._trainer.train(self._task())
        finally:
            hurry.cancel()
        for digest in work.shards.values():
            self._context.replica.store.place(self._context.replica.store.scratch(plan.round) / digest)
        self.work = work
        if self._tally.commit() is not None:
            return  # too late for this round: it goes into the next one
        self._context.tell("averaging", f"round {plan.round}: {work.steps} steps done")
        try:
            shards = await asyncio.to_thread(self._contributor.encode, work)
        except FloatingPointError as error:
            log.warning("round %d: nothing is handed in: %s", plan.round, error)
            shards = {}
        self._context.publish(
            Contribution(
                run=plan.run,
                round=plan.round,
                plan=self._tally.digest,
                node=self._context.me,
                tokens=work.tokens if shards else 0,
                steps=work.steps if shards else 0,
                used_blocks=work.used_blocks if shards else 0,
                loss=work.loss,
                heldout_nats=work.heldout_nats,
                heldout_tokens=work.heldout_tokens,
                train_seconds=work.seconds,
                busy=self._context.utilisation.since_last(work.busy_seconds),
                shards=shards,
            )
        )
        log.debug("round %d: this node hands in %d shards after %d steps", plan.round, len(shards), work.steps)

    def settle(self, commit: Commit) -> None:
        """The round has ended with this commit: keep what its encoding has rounded away."""
        if self.work is not None:
            self._contributor.settle(commit, self._context.me, self.work)

    def _task(self) -> Task:
        plan, store = self._tally.plan, self._context.replica.store
        member = plan.roster[self._context.me]
        kept, counted = references(self._last, self._context.replica.head, self._context.me, store)
        return Task(
            round=plan.round,
            shards={n: (shard.digest, store.locate(shard.digest)) for n, shard in self._tally.base.shards.items()},
            references=kept,
            counted=counted,
            experts=plan.owners.get(self._context.me, ()),
            blocks=blocks.ids(member.blocks),
            heldout=member.heldout,
            steps=member.steps,
            first_step=(plan.round - 1) * self._context.manifest.round.local_steps,
            seconds=plan.train_seconds,
            folder=store.scratch(plan.round),
            moments=self._context.inheritance.take(plan.owners.get(self._context.me, ())),
        )

    async def _hurry(self) -> None:
        """When half of the roster has handed in, this node does so, too, after the margin: with what it has by then."""
        while not self._tally.half_handed_in():
            await self._context.board.changed(self._context.margin)
        await asyncio.sleep(self._context.margin)
        self._trainer.stop()


def _list(experts: Collection[int]) -> str:
    return ", ".join(map(str, experts)) or "none"
