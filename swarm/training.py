"""A node's training in a round: from the plan to what it hands in."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from swarm import blocks
from swarm.context import Context
from swarm.contribute import Contributor
from swarm.documents import Commit, Contribution, Encoded, Plan, Signed
from swarm.identity import NodeId
from swarm.progress import HandedIn, references
from swarm.store import ShardStore
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
        store = context.replica.store
        folder = store.scratch(tally.plan.round)
        self._contributor = Contributor(context.manifest.encoding, tally.base, store, context.residuals, folder)
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
            moments = self._context.inheritance.take(experts)
            work = await self._trainer.train(
                make_task(
                    plan,
                    self._tally.base,
                    self._context.replica.head,
                    self._context.me,
                    self._last,
                    self._context.replica.store,
                    self._context.manifest.round.local_steps,
                    moments,
                )
            )
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
        busy = self._context.utilisation.since_last(work.busy_seconds)
        self._context.publish(make_contribution(plan, self._tally.digest, self._context.me, work, shards, busy))
        log.debug("round %d: this node hands in %d shards after %d steps", plan.round, len(shards), work.steps)

    def settle(self, commit: Commit) -> None:
        """The round has ended with this commit: keep what its encoding has rounded away."""
        if self.work is not None:
            self._contributor.settle(commit, self._context.me, self.work)

    async def _hurry(self) -> None:
        """When half of the roster has handed in, this node does so, too, after the margin: with what it has by then."""
        while not self._tally.half_handed_in():
            await self._context.board.changed(self._context.margin)
        await asyncio.sleep(self._context.margin)
        self._trainer.stop()


def make_task(
    plan: Plan,
    base: Commit,
    head: Signed[Commit],
    node: NodeId,
    last: HandedIn | None,
    store: ShardStore,
    local_steps: int,
    moments: Mapping[str, Path],
) -> Task:
    """What a node's trainer is asked for in a round.

    Args:
        plan: the round's.
        base: what it starts from.
        head: the commit before.
        node: whose trainer it is.
        last: what the node has handed in last.
        store: has the values of the base, and takes the snapshot.
        local_steps: of a round, H.
        moments: what others have handed over, by shard.
    """
    member = plan.roster[node]
    kept, counted = references(last, head, node, store)
    return Task(
        round=plan.round,
        shards={name: (shard.digest, store.locate(shard.digest)) for name, shard in base.shards.items()},
        references=kept,
        counted=counted,
        experts=plan.owners.get(node, ()),
        blocks=blocks.ids(member.blocks),
        heldout=member.heldout,
        steps=member.steps,
        first_step=(plan.round - 1) * local_steps,
        seconds=plan.train_seconds,
        folder=store.scratch(plan.round),
        moments=moments,
    )


def make_contribution(
    plan: Plan, plan_digest: str, node: NodeId, work: Work, shards: dict[str, Encoded], busy: float
) -> Contribution:
    """What a node hands in.

    Args:
        plan: the round's, with its digest.
        node: who hands in.
        work: what it has trained.
        shards: that, encoded; nothing counts when there are none.
        busy: share of the time since it handed in last that it spent in training steps.
    """
    return Contribution(
        run=plan.run,
        round=plan.round,
        plan=plan_digest,
        node=node,
        tokens=work.tokens if shards else 0,
        steps=work.steps if shards else 0,
        used_blocks=work.used_blocks if shards else 0,
        loss=work.loss,
        heldout_nats=work.heldout_nats,
        heldout_tokens=work.heldout_tokens,
        choices=work.choices,
        train_seconds=work.seconds,
        busy=busy,
        shards=shards,
    )


def _list(experts: Collection[int]) -> str:
    return ", ".join(map(str, experts)) or "none"
