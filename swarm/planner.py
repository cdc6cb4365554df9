"""Planning a round: who does it when, and waiting for the roster."""

import asyncio
import logging
import statistics
from collections.abc import Collection

from swarm import blocks
from swarm.context import Context
from swarm.documents import Commit, Merge, Plan, Signed
from swarm.exchange import CallFailed
from swarm.identity import NodeId, short
from swarm.leader import blocks_for, leaders, make_plan
from swarm.merging import choose_donors
from swarm.patience import ASLEEP_SECONDS, LOOK_SECONDS
from swarm.records import NodeRecord
from swarm.warmup import strength

POLL_SECONDS = 0.2
"""How often a leader looks whether the roster is complete."""

FIRST_LEADERS = 2
"""So many of those who are to plan next are told who is ready, and watched by the others."""
CATCH_UP_SECONDS = 3.0
"""Rounds that are shorter than a node needs to fetch a state would run away from it, again and again: who is catching
up is waited for this long, which is nothing to a round of minutes."""

log = logging.getLogger(__name__)


def is_sound(context: Context, plan: Signed[Plan]) -> bool:
    """Whether a plan follows the head, comes from somebody who may write one, and asks for what the run says."""
    return context.board.verdict(plan.digest, lambda: _judge(context, plan))


def _judge(context: Context, plan: Signed[Plan]) -> bool:
    document, rounds, head = plan.document, context.manifest.round, context.replica.head
    if document.parent != head.digest or plan.signer not in document.roster:
        return False
    if not document.owners.keys() <= document.roster.keys() <= document.uplinks.keys():
        return False
    if not context.replica.merges_right(document):
        return False
    members = document.roster.values()
    wanted = {node: blocks_for(rounds, member.steps) for node, member in document.roster.items()}
    return (
        all(0 < member.steps <= rounds.local_steps for member in members)
        and all(0 <= member.heldout[0] <= member.heldout[1] <= rounds.heldout_blocks for member in members)
        and document.train_seconds <= rounds.train_seconds
        and document.reduce_seconds <= max(rounds.train_seconds, rounds.margin_seconds)
        and {node: member.blocks for node, member in document.roster.items()}
        == blocks.hand_out(head.document.ledger, wanted)
    )


def accepted_commit(context: Context) -> Signed[Commit] | None:
    """The commit that follows the head: by a member of its round, and claiming no more than that round allowed.

    The members are the roster of its plan; where that was not delivered, everybody who may have been in it.
    """
    head, rounds = context.replica.head.document, context.manifest.round
    plans = {
        plan.digest: plan.document
        for plan in context.board.plans.get(head.round + 1, {}).values()
        if is_sound(context, plan)
    }
    known = head.shares.keys() | context.membership.view.trainers().keys()

    def is_fit(commit: Signed[Commit]) -> bool:
        plan = plans.get(commit.document.plan)
        members = plan.roster.keys() if plan is not None else known
        # what a member may hand in: what was left for it, and what a plan adds to that
        most = (
            sum(map(blocks.count, head.ledger.reserved.values()))
            + len(members) * blocks_for(rounds, rounds.local_steps)
        ) * context.manifest.data.block_tokens
        return (
            commit.signer in members
            and (plan is None or commit.document.merge == plan.merge)
            and commit.document.shares.keys() <= members
            and 0 <= commit.document.tokens - head.tokens <= most
        )

    commits = context.board.commits.get(head.round + 1, {}).values()
    return context.replica.successor([commit for commit in commits if is_fit(commit)])


def accepted_plan(context: Context, given_up: Collection[str] = ()) -> Signed[Plan] | None:
    """The plan that follows the head: of several, that of the leader who comes first.

    Args:
        context: the node's.
        given_up: digests of plans that led to nothing.
    """
    head = context.replica.head
    found = [
        plan
        for plan in context.board.plans.get(head.document.round + 1, {}).values()
        if plan.digest not in given_up and is_sound(context, plan)
    ]
    order = leaders(context.run_id, head.document, [plan.signer for plan in found])
    return min(found, key=lambda plan: order.index(plan.signer), default=None)


class Planner:
    """Writes the plan of the next round when those who come first in the order do not."""

    def __init__(self, context: Context, given_up: Collection[str] = ()) -> None:
        """Args:
        context: the node's.
        given_up: digests of plans that led to nothing.
        """
        self._context = context
        self._given_up = given_up
        self._board = context.board
        self._head = context.replica.head
        self._number = self._head.document.round + 1
        self._started = asyncio.get_running_loop().time()
        self._slept = False
        """Whether this node was stopped for a while."""
        self._assembled: float | None = None
        """When the roster was complete here. Only from then on can those who come first be late."""
        self._patience = context.patience(lambda text: context.tell("waiting", text))

    async def run(self) -> None:
        """Wait for the turn and the roster, then publish the plan; ends without one when this node was asleep, and does
        not know what the others have done meanwhile."""
        context = self._context
        first = leaders(context.run_id, self._head.document, [context.me])[0]
        log.debug("round %d: %s is the first to plan", self._number, short(first))
        while True:
            roster = await self._assemble()
            if self._assembled is None:
                self._assembled = self._elapsed()
                for node in roster:
                    self._board.hear(node)  # one that was lost has told since that it holds this state
            roster = {n: record for n, record in roster.items() if n == context.me or not self._excused(n)}
            order = leaders(context.run_id, self._head.document, list(roster))
            before = [node for node in order[: order.index(context.me)] if not self._excused(node)]
            left = len(before) * context.margin - (self._elapsed() - self._assembled)
            if before and left > 0:
                await self._wait_for(before, left)
            elif await self._was_planned_by(before):
                await self._board.changed(LOOK_SECONDS)
            elif self._slept:
                return
            else:
                log.debug("round %d: this node plans", self._number)
                merge = await self._merge()
                context.publish(
                    make_plan(
                        context.manifest,
                        context.run_id,
                        context.me,
                        self._head.document,
                        self._head.digest,
                        roster,
                        context.membership.view,
                        merge,
                    )
                )
                return

    async def _merge(self) -> Merge | None:
        """How the round begins, if it begins with a merge."""
        replica, manifest, head = self._context.replica, self._context.manifest, self._head.document
        alpha = strength(manifest, head.round)
        if not alpha:
            return None
        self._context.tell("merging", f"choosing the experts that are merged before round {self._number}")
        donors = await asyncio.to_thread(choose_donors, replica.store, head, manifest.model, manifest.merge.donors)
        return Merge(alpha=alpha, donors=donors, state=(await replica.merged(alpha, donors)).state)

    async def _assemble(self) -> dict[NodeId, NodeRecord]:
        """Wait for the roster: those of the last round that are still there, and everybody else who is ready.

        Newcomers that hold the state of the round before are one step behind and are waited for, too; those that hold
        an older one for a moment only.
        """
        context, head, rounds = self._context, self._head.document, self._context.manifest.round
        needed = rounds.start_nodes if head.round == 0 else 1
        look = self._elapsed() + LOOK_SECONDS
        # Nobody is waited for much longer than the last rounds took, nor longer than the margin allows.
        usual = 1 + head.train_seconds / 4 + statistics.median(head.reduce_seconds or (0.0,))
        began = looked = self._elapsed()
        while True:
            self._slept = self._slept or self._elapsed() - looked > ASLEEP_SECONDS
            looked = self._elapsed()
            trainers = (await context.membership.refresh()).trainers()
            for node, record in trainers.items():
                self._board.see(node, record.round, arriving=record.state in ("starting", "syncing"))
            ready = {node: record for node, record in trainers.items() if self._is_ready(node, record)}
            close = head.shares.keys() | {node for node, record in trainers.items() if record.commit == head.parent}
            awaited = [node for node in close if node not in ready and not self._excused(node)]
            # The few do not go on without the many: these are at the same place before long, or their records end.
            there = [node for node in head.shares if node in trainers]
            few = 2 * sum(node in ready for node in there) < len(there)
            patience = context.margin + rounds.lease_seconds if few else min(context.margin / 2, usual)
            if len(ready) < needed:
                context.tell(
                    "waiting", f"{len(ready)} of the {needed} nodes that the run waits for (start_nodes) are here"
                )
            elif (not awaited and not few) or self._elapsed() > began + patience:
                coming = [
                    node
                    for node, record in trainers.items()
                    if node not in ready and record.round < head.round and self._board.is_moving(node)
                ]
                if not coming or self._elapsed() > began + CATCH_UP_SECONDS:
                    return ready
                context.tell(
                    "waiting", f"waiting {CATCH_UP_SECONDS:g} s for {context.membership.view.call(coming)} to catch up"
                )
            else:
                behind = [node for node in there if node not in ready]
                context.tell(
                    "waiting",
                    f"waiting for {context.membership.view.call(behind or awaited)} to finish round {head.round}",
                )
            # Who is not to plan next need not know at once who is ready.
            first = leaders(context.run_id, head, list(ready))[:1] == [context.me]
            await self._board.changed(POLL_SECONDS if first else LOOK_SECONDS)
            if self._elapsed() > look:
                look = self._elapsed() + LOOK_SECONDS
                await self._patience.look(awaited, "plan")

    def _is_ready(self, node: NodeId, record: NodeRecord) -> bool:
        """Whether a node holds the head, as it has told this one or everybody."""
        return self._head.digest in (record.commit, self._board.heads.get(node))

    async def _wait_for(self, leaders_before: list[str], seconds: float) -> None:
        """Wait until one of those who come first is gone, or their time is over."""
        await self._patience.wait(
            lambda: True if any(map(self._excused, leaders_before)) else None,
            what="plan",
            whom=lambda: [node for node in leaders_before if not self._excused(node)][:FIRST_LEADERS],
            seconds=seconds,
        )

    async def _was_planned_by(self, nodes: list[str]) -> bool:
        """Ask those who come first whether they have written a plan that counts, and it was not delivered."""
        for node in nodes:
            try:
                plan = await self._context.exchange.read(node, "plan", self._number)
            except CallFailed:
                self._board.lose(node)
                continue
            if plan is not None:
                self._board.post(plan)
                if accepted_plan(self._context, self._given_up) is not None:
                    return True
        return False

    def _excused(self, node: str) -> bool:
        return self._board.excused(node, self._number)

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._started
