"""One round on one node, from the accepted plan to the commit."""

import asyncio
import logging
from collections.abc import Collection

from swarm import blocks
from swarm.collect import collect_results
from swarm.context import Context
from swarm.documents import Commit, Contribution, Plan, Reduction, Result, Signed
from swarm.leader import is_plausible, make_commit, reducers, resolve
from swarm.patience import LOOK_SECONDS
from swarm.planner import accepted_commit
from swarm.ranking import ranked
from swarm.reduce import Reducer
from swarm.shard_names import expert_of, trained
from swarm.trainer import Task, Trainer, Work

ASLEEP_SECONDS = 10.0
"""A node that has not looked for this long was stopped: its deadlines have passed without its having waited."""

log = logging.getLogger(__name__)


class Round:
    """The four duties of a node in a round, side by side: train, reduce, collect results, commit."""

    def __init__(self, context: Context, plan: Signed[Plan], trainer: Trainer) -> None:
        """Take part in `plan`, which this node has accepted and in whose roster it is."""
        self.plan = plan.document
        self.work: Work | None = None
        """What this node has trained, once it has."""
        self._context = context
        self._digest = plan.digest
        self._trainer = trainer
        self._me = context.me
        self._board = context.board
        self._replica = context.replica
        self._margin = context.margin
        self._head = context.replica.head.document
        self._started = asyncio.get_running_loop().time()
        self._led_nowhere = False
        """Nobody contributed, or this node was asleep: it must look around before it decides anything."""
        self._patience = context.patience(self._show_wait)

    async def run(self) -> Signed[Commit] | None:
        """Take part; returns the round's commit, or None when none came by any deadline."""
        collect = collect_results(self.plan.round, self._digest, self._replica, self._board)
        async with asyncio.TaskGroup() as group:
            training = group.create_task(self._train())
            duties = [group.create_task(duty) for duty in (self._reduce(), collect, self._commit())]
            await self._patience.wait(
                lambda: True if self._led_nowhere or self._find_commit() else None,
                what="the commit",
                whom=lambda: [n for n in self._commit_order() if n != self._me and not self._excused(n)][:1],
                seconds=self._commit_deadline(len(self.plan.roster)),
            )
            for duty in duties:
                duty.cancel()
            if not training.done():
                self._trainer.stop()
                await training
        return self._find_commit()

    # training

    async def _train(self) -> None:
        member = self.plan.roster[self._me]
        experts = self.plan.owners.get(self._me, ())
        self._context.tell(
            "training", f"round {self.plan.round}: up to {self.plan.local_steps} steps on experts {_list(experts)}"
        )
        state = self._head.shards
        store = self._replica.store
        mine = set(trained(state, self._head.owners.get(self._me, ())))
        work = await self._trainer.train(
            Task(
                round=self.plan.round,
                shards={name: (shard.digest, store.path(shard.digest)) for name, shard in state.items()},
                carried=frozenset(
                    n
                    for n, s in state.items()
                    if n in mine and expert_of(n) is not None and s.version < self._head.round
                ),
                experts=experts,
                blocks=blocks.ids(member.blocks),
                heldout=member.heldout,
                local_steps=self.plan.local_steps,
                seconds=self.plan.train_seconds,
                folder=store.scratch(self.plan.round),
            )
        )
        self.work = work
        for digest in work.shards.values():
            store.place(store.scratch(self.plan.round) / digest)
        if self._find_commit() is not None:
            return
        self._context.tell("averaging", f"round {self.plan.round}: {work.steps} steps done")
        self._context.publish(
            Contribution(
                run=self.plan.run,
                round=self.plan.round,
                plan=self._digest,
                node=self._me,
                tokens=work.tokens,
                steps=work.steps,
                used_blocks=work.used_blocks,
                loss=work.loss,
                heldout_nats=work.heldout_nats,
                heldout_tokens=work.heldout_tokens,
                train_seconds=work.seconds,
                shards=dict(work.shards),
            )
        )

    # reducing

    async def _reduce(self) -> None:
        """Average the shards whose turn has come, first as their reducer, then as a stand-in."""
        reducer = Reducer(self.plan, self._head, self._replica.store, self._context.exchange)
        possible = [name for name in self._head.shards if self._me in reducers(self.plan, name)]
        await self._patience.wait(
            lambda: True if not self._awaited_contributors() else None,
            what="the contributions",
            whom=self._awaited_contributors,
            seconds=self.plan.train_seconds + self._margin,
        )
        results: dict[str, Result] = {}
        tried: set[str] = set()

        def due() -> list[str] | None:
            return [name for name in possible if name not in tried and self._is_my_turn(name)] or None

        while True:
            if turn := due():
                tried |= set(turn)
                if made := await reducer.reduce(turn, self._contributions()):
                    results |= made
                    log.debug("round %d: reduced %s", self.plan.round, ", ".join(made))
                    self._context.publish(
                        Reduction(
                            run=self.plan.run, round=self.plan.round, plan=self._digest, node=self._me, results=results
                        )
                    )
            await self._patience.wait(due, what="the results", whom=self._awaited_reducers, seconds=self._margin)

    def _is_my_turn(self, name: str) -> bool:
        """Whether this node should average a shard now: nobody has, and those before it are gone or overdue."""
        if name in self._announced():
            return False
        before = reducers(self.plan, name)
        before = before[: before.index(self._me)]
        overdue = self._elapsed() - self.plan.train_seconds - self.plan.reduce_seconds
        return all(self._excused(node) or overdue > place * self._margin for place, node in enumerate(before, 1))

    def _awaited_contributors(self) -> list[str]:
        offered = self._offers()
        return [node for node in self.plan.roster if node not in offered and not self._excused(node)]

    def _awaited_reducers(self) -> list[str]:
        """The nodes whose turn it is to average the shards that have no result yet."""
        announced = self._announced()
        open_shards = [name for name in self._head.shards if name not in announced]
        first = (next((n for n in reducers(self.plan, name) if not self._excused(n)), None) for name in open_shards)
        return sorted({node for node in first if node is not None and node != self._me})

    def _announced(self) -> set[str]:
        """Shards with a result that can be had: its maker is there, or its bytes are here."""
        return {
            name
            for node, reduction in self._reductions().items()
            for name, result in reduction.results.items()
            if not self._excused(node) or self._holds(result.digest)
        }

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
            if contributed is None and not self._awaited_contributors():
                contributed = loop.time()
            results = self._resolved()
            if self._may_commit() and (self._is_complete(results) or self._elapsed() > self._commit_deadline(0)):
                commit = make_commit(
                    self.plan,
                    self._digest,
                    self._me,
                    self._head,
                    results,
                    self._contributions(),
                    loop.time() - (contributed or self._started),
                )
                if commit.shares:
                    self._context.publish(commit)
                else:
                    self._lead_nowhere()
                return
            await self._board.changed(LOOK_SECONDS)

    def _lead_nowhere(self) -> None:
        self._led_nowhere = True
        self._board.notify()

    def _commit_order(self) -> list[str]:
        """Who may write the commit: the leader of the plan, then the others."""
        leader = self.plan.leader
        return [leader, *(n for n in ranked(self.plan.roster, self.plan.run, self.plan.round, "commit") if n != leader)]

    def _commit_deadline(self, place: int) -> float:
        """Seconds after the plan's arrival when the node at this place of the order commits what there is."""
        return self.plan.train_seconds + self.plan.reduce_seconds + (1 + place) * self._margin

    def _may_commit(self) -> bool:
        order = self._commit_order()
        place = order.index(self._me)
        return all(
            self._excused(node) or self._elapsed() > self._commit_deadline(before)
            for before, node in enumerate(order[:place])
        )

    def _is_complete(self, results: dict[str, tuple[str, Result]]) -> bool:
        """Whether no result can come any more that is not here: all are, or those who could make them are gone."""
        if self._awaited_contributors():
            return False
        return all(
            name in results or all(self._excused(node) for node in self._possible_makers(name))
            for name in self._head.shards
        )

    def _possible_makers(self, name: str) -> list[str]:
        """Reducers of a shard that could still announce a result: some contribution to it must be there."""
        if not any(name in c.shards and c.tokens > 0 for c in self._contributions().values()):
            return []
        return reducers(self.plan, name)

    # what the board says about this round

    def _offers(self) -> dict[str, Contribution]:
        found = self._board.contributions.get((self.plan.round, self._digest), {})
        return {node: signed.document for node, signed in found.items() if node in self.plan.roster}

    def _contributions(self) -> dict[str, Contribution]:
        """The offers that can be believed."""
        tokens = self._context.manifest.data.block_tokens
        offers = self._offers().items()
        return {node: offer for node, offer in offers if is_plausible(offer, self.plan, self._head, tokens)}

    def _reductions(self) -> dict[str, Reduction]:
        found = self._board.reductions.get((self.plan.round, self._digest), {})
        return {node: signed.document for node, signed in found.items() if node in self.plan.roster}

    def _resolved(self) -> dict[str, tuple[str, Result]]:
        found = resolve(self.plan, self._head, self._reductions(), self._holds)
        # a digest that belongs to an object of another size is a lie about this shard
        return {name: result for name, result in found.items() if self._fits(name, result[1].digest)}

    def _fits(self, name: str, digest: str) -> bool:
        path = self._replica.store.find(digest)
        return path is not None and path.stat().st_size == self._head.shards[name].size

    def _holds(self, digest: str) -> bool:
        return self._replica.store.find(digest) is not None

    def _find_commit(self) -> Signed[Commit] | None:
        return accepted_commit(self._context)

    def _excused(self, node: str) -> bool:
        return self._board.excused(node, self.plan.round)

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    def _show_wait(self, text: str) -> None:
        if self.work is not None:
            self._context.tell("averaging", f"round {self.plan.round}: {text}")


def _list(experts: Collection[int]) -> str:
    return ", ".join(map(str, experts)) or "none"
