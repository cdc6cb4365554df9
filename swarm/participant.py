"""A node's life in a run, round after round: plan or be planned, train, reduce, commit, hold the state."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from swarm.board import Board
from swarm.collect import collect_results
from swarm.context import Context
from swarm.documents import Commit, Document, Leave, Plan, Signed
from swarm.exchange import Exchange
from swarm.identity import Identity
from swarm.leader import standing
from swarm.lease import settle
from swarm.manifest import Manifest
from swarm.membership import Membership, NodeRecord, State, View
from swarm.network import Network
from swarm.patience import LOOK_SECONDS, names
from swarm.planner import Planner, accepted_commit, accepted_plan
from swarm.replica import Replica, Unobtainable
from swarm.round import Round
from swarm.store import ShardStore
from swarm.trainer import Trainer

FAREWELL_SECONDS = 20.0
"""After the last round a node serves its peers until they have the final state, at most this long."""

log = logging.getLogger(__name__)


class Participant:
    """One node in one run. With a trainer it takes part in rounds; without one it follows them and serves the state."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        *,
        identity: Identity,
        network: Network,
        store: ShardStore,
        record: NodeRecord,
        trainer: Trainer | None,
        on_commit: Callable[[Signed[Commit], View, float], None],
        on_state: Callable[[State, str], None],
    ) -> None:
        """Args:
        manifest: the run.
        identity, network, store: this node's.
        record: what the node says about itself at the start.
        trainer: trains, or None.
        on_commit: called with each commit this node has adopted, its view of the swarm, and the seconds since the
            commit before (for the first one: since its plan arrived).
        on_state: called when the node's state or its reason changes.
        """
        self.manifest = manifest.document
        self.run_id = manifest.digest
        self.board = Board()
        self.exchange = Exchange(network, self.run_id, self)
        self.membership = Membership(network, manifest, record, lambda: (self.exchange.sent, self.exchange.received))
        self.replica = Replica(store, self.exchange, self.membership)
        self._context = Context(
            manifest=self.manifest,
            run_id=self.run_id,
            identity=identity,
            board=self.board,
            exchange=self.exchange,
            membership=self.membership,
            replica=self.replica,
            tell=self._tell,
        )
        self._manifest_wire = manifest.wire
        self._me = identity.node_id
        self._trainer = trainer
        self._on_commit = on_commit
        self._on_state = on_state
        self._round_started: float | None = None
        self._given_up: set[str] = set()
        """Plans whose whole roster is gone, or that led to nothing here."""
        self._idle: State = "waiting" if trainer is not None else "following"
        """The state of this node when it does nothing itself."""
        self._patience = self._context.patience(lambda text: self._tell(self._idle, text))

    # what peers ask (exchange.Handler)

    def receive(self, signed: Signed[Document]) -> str:
        """Put a posted document on the board."""
        return self.board.post(signed)

    def document(self, kind: str, number: int) -> bytes | None:
        """Give a document: the manifest, a commit of the chain, or the plan of the round in progress."""
        if kind == "manifest":
            return self._manifest_wire
        if kind == "commit":
            return self.replica.store.commit_wire(number)
        plans = self.board.plans.get(number, {}) if kind == "plan" else {}
        return next((plan.wire for plan in plans.values()), None)

    def object(self, digest: str) -> Path | None:
        """Where an object is."""
        return self.replica.store.find(digest)

    def position(self) -> tuple[str, int]:
        """Digest and round of the head."""
        head = self.replica.store.head
        return (head.digest, head.document.round) if head is not None else ("", 0)

    # the life

    async def run(self) -> None:
        """Take part until the run's last round is committed here and the peers have it too."""
        await self.exchange.start()
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self.membership.beat())
            await self._synchronise()
            while not self.is_finished():
                await self._advance()
            await self._finish()
            beat.cancel()

    def is_finished(self) -> bool:
        """Whether the head is the run's last round."""
        return 0 < self.manifest.round.total <= self.replica.head.document.round

    async def leave(self) -> None:
        """Tell everybody that nobody should wait for this node, and withdraw its lease."""
        head = self.replica.store.head
        number = head.document.round if head is not None else 0
        await self.membership.say_goodbye()
        self._context.publish(Leave(run=self.run_id, node=self._me, round=number))
        await self.exchange.flush()

    async def _synchronise(self) -> None:
        """Get the newest state that any peer has."""
        while True:
            moved = await self.replica.catch_up()
            if self.replica.store.head is not None:
                break
            if not moved:
                self._tell("syncing", "waiting for a peer that holds the state of the run")
                await asyncio.sleep(LOOK_SECONDS)
        self.replica.announce()
        self.board.advance(self.replica.head.document.round)
        if self._trainer is not None:
            self._claim()

    def _claim(self) -> None:
        """Lease the experts that fall to this node, from what it sees; the next plan confirms them."""
        view = self.membership.view
        capacity = {node: record.capacity for node, record in view.trainers().items()}
        capacity[self._me] = self.membership.record.capacity
        owner = settle(
            self.run_id,
            self.manifest.model.num_experts,
            capacity,
            standing(self.replica.head.document, view.holders(), self.run_id),
        )
        self.membership.lease(tuple(sorted(expert for expert, node in owner.items() if node == self._me)))

    async def _advance(self) -> None:
        """From one commit to the next."""
        plan = await self._next_plan()
        if plan is None:
            return
        self._round_started = self._round_started or asyncio.get_running_loop().time()
        commit: Signed[Commit] | None
        if self._trainer is not None and self._me in plan.document.roster:
            self.membership.lease(plan.document.owners.get(self._me, ()))
            this_round = Round(self._context, plan, self._trainer)
            commit = await this_round.run()
            self._account(this_round)
        else:
            self._tell("following", f"round {plan.document.round} is in progress without this node")
            commit = await self._watch(plan)
        if commit is None:
            if all(self.board.excused(node, plan.document.round) for node in plan.document.roster if node != self._me):
                self._given_up.add(plan.digest)
            await self._catch_up()
        else:
            await self._adopt(commit, list(plan.document.roster))

    async def _adopt(self, commit: Signed[Commit], roster: list[str]) -> None:
        holders = [node for node, record in self.membership.view.present().items() if record.commit == commit.digest]
        sources = [commit.document.leader, *roster, *holders]
        try:
            await self.replica.adopt(commit, [n for n in dict.fromkeys(sources) if n != self._me])
        except Unobtainable as error:
            log.warning("%s; looking for a newer one", error)
            await self._catch_up()
            return
        self._moved()

    async def _catch_up(self) -> None:
        if await self.replica.catch_up():
            self._moved()

    def _moved(self) -> None:
        """The head has changed."""
        head = self.replica.head
        self.board.advance(head.document.round)
        self._given_up.clear()
        now = asyncio.get_running_loop().time()
        self._on_commit(head, self.membership.view, now - (self._round_started or now))
        self._round_started = now

    def _account(self, this_round: Round) -> None:
        work = this_round.work
        if work is not None and work.steps:
            self.membership.note(
                seconds_per_step=work.seconds / work.steps,
                trained_tokens=self.membership.record.trained_tokens + work.tokens,
            )

    # plans

    async def _next_plan(self) -> Signed[Plan] | None:
        """The plan that follows the head: somebody's, or this node's own; None when the head has moved instead."""
        self._tell(self._idle, f"round {self.replica.head.document.round + 1} is being planned")
        head = self.replica.head.digest
        await self._catch_up()  # whoever was away must not go on alone where the others have left
        if self.replica.head.digest != head:
            return None
        lead = asyncio.create_task(Planner(self._context).run()) if self._trainer is not None else None
        try:
            while True:
                if (plan := await self.board.until(self._find_plan, LOOK_SECONDS)) is not None:
                    return plan
                if lead is not None and lead.done():
                    lead.result()  # an error in it is this node's error
                if (commit := self._find_commit()) is not None:
                    await self._adopt(commit, list(commit.document.owners))
                else:
                    await self._catch_up()
                if self.replica.head.digest != head:
                    return None
        finally:
            if lead is not None:
                lead.cancel()

    def _find_plan(self) -> Signed[Plan] | None:
        return accepted_plan(self._context, self._given_up)

    def _find_commit(self) -> Signed[Commit] | None:
        return accepted_commit(self._context)

    async def _watch(self, plan: Signed[Plan]) -> Signed[Commit] | None:
        """The commit of a round this node is not part of; None when it should look for a newer head instead."""
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(collect_results(plan.document.round, plan.digest, self.replica, self.board))
            commit = await self._patience.wait(
                self._find_commit,
                what="the commit",
                whom=lambda: plan.document.roster,
                seconds=self.manifest.round.margin_seconds,
            )
            collecting.cancel()
        return commit

    # the end

    async def _finish(self) -> None:
        """Serve the final state until every peer that is there has it."""
        self._tell("finished", "the run is complete")
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                while True:
                    await self._catch_up()  # of two last rounds the better one counts
                    digest, present = self.replica.head.digest, self.membership.view.present()
                    behind = [node for node, record in present.items() if record.commit != digest]
                    if not behind:
                        return
                    self._tell("finished", f"the run is complete; serving the last round to {names(behind)}")
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            return

    def _tell(self, state: State, reason: str) -> None:
        self.membership.note(state=state, reason=reason[:120])
        self._on_state(state, reason)
