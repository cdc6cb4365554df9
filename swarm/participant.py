"""A node's life in a run, round after round: plan or be planned, train, reduce, commit, hold the state."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.board import Board
from swarm.collect import Collector
from swarm.context import Context
from swarm.documents import Commit, Contribution, Document, Encoded, Leave, Plan, Reduction, Signed
from swarm.exchange import PROGRESS_SECONDS, Exchange
from swarm.identity import Identity, NodeId, short
from swarm.inheritance import Inheritance
from swarm.leader import claims, leaders
from swarm.manifest import Manifest
from swarm.membership import Membership, steady_rate
from swarm.network import Network
from swarm.patience import LOOK_SECONDS
from swarm.planner import FIRST_LEADERS, Planner, accepted_commit, accepted_plan
from swarm.progress import HandedIn, Utilisation
from swarm.pursuit import Pursuit
from swarm.records import NodeRecord, State, View
from swarm.replica import Replica, Unobtainable
from swarm.residuals import Residuals
from swarm.round import Round
from swarm.store import ShardStore
from swarm.trainer import Trainer

HANDOVER_SECONDS = 10.0
"""A node that leaves serves its moments to those who take over, at most this long."""
PAUSED = "paused: it keeps and serves the state of the run, and trains again when it is told to"
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
        margin = self.manifest.round.margin_seconds
        self.exchange = Exchange(
            network, self.run_id, self, progress_seconds=min(PROGRESS_SECONDS, max(2.0, margin / 2))
        )
        self.exchange.on_served = self.board.notify  # a result that a peer has may be committed
        self.membership = Membership(network, manifest, record, lambda: (self.exchange.sent, self.exchange.received))
        self.replica = Replica(store, self.exchange, self.membership, self.manifest)
        self._pursuit = Pursuit(self.replica, self.exchange, self.membership, lambda text: self._tell("syncing", text))
        self._context = Context(
            manifest=self.manifest,
            run_id=self.run_id,
            identity=identity,
            board=self.board,
            exchange=self.exchange,
            membership=self.membership,
            replica=self.replica,
            residuals=Residuals(store.folder / "residuals"),
            utilisation=Utilisation(),
            inheritance=Inheritance(store, self.exchange),
            tell=self._tell,
        )
        self._manifest_wire = manifest.wire
        self._me = identity.node_id
        self._trainer = trainer
        self._on_commit = on_commit
        self._on_state = on_state
        self._round_started: float | None = None
        self._round: Round | None = None
        """The last round this node took part in, until its commit is here."""
        self._handed_in: HandedIn | None = None
        """This node's last contribution."""
        self._given_up: set[str] = set()
        """Plans whose whole roster is gone, or that led to nothing here."""
        self._corrected: set[tuple[str, str]] = set()
        """Nodes that were given a plan because they went by another one, with its digest."""
        self._idle: State = "waiting" if trainer is not None else "following"
        """The state of this node when it does nothing itself."""
        self._patience = self._context.patience(lambda text: self._tell(self._idle, text))
        self._wants_pause = False
        self._paused = False
        self._work = {"role": record.role, "capacity": record.capacity}
        """What the record says while this node trains."""

    # what peers ask (exchange.Handler)

    def receive(self, signed: Signed[Document]) -> str:
        """Put a posted document on the board."""
        if self.replica.store.head is None:
            return self.board.post(signed)
        if isinstance(signed.document, Leave):
            self._inherit(signed.document)
        refusal = self.board.post(signed)
        if not refusal:
            self._correct(signed)
        return refusal

    def _correct(self, signed: Signed[Document]) -> None:
        """Give the plan that counts to a peer that goes by another one: it may never have got it."""
        match signed.document:
            case Plan():
                named = signed.digest
            case Contribution() | Reduction():
                named = signed.document.plan
            case _:
                return
        plan = self._find_plan()
        if plan is not None and plan.digest != named and (signed.signer, plan.digest) not in self._corrected:
            self._corrected.add((signed.signer, plan.digest))  # two that do not agree must not go on for ever
            self.exchange.post([signed.signer], plan)

    def document(self, kind: str, number: int, author: str) -> bytes | None:
        """Give a document: the manifest, a commit of the chain, or one of the round in progress: any plan if no author
        is named, else what that node has handed in or announced, or this one if none is named."""
        if kind == "manifest":
            return self._manifest_wire
        if kind == "commit":
            return self.replica.store.commit_wire(number)
        if kind == "plan" and not author:
            found: list[Signed[Any]] = list(self.board.plans.get(number, {}).values())
        else:
            found = self.board.of(kind, number, author or self._me)
        return found[-1].wire if found else None

    def object(self, digest: str) -> Path | None:
        """Where an object is."""
        return self.replica.store.find(digest)

    def position(self) -> tuple[str, int]:
        """Digest and round of the head."""
        head = self.replica.store.head
        return (head.digest, head.document.round) if head is not None else ("", 0)

    def meet(self, node: NodeId, digest: str, number: int) -> None:
        """Note what a peer's head is."""
        if node in self.membership.view.nodes:  # nobody is remembered who is not part of the swarm
            self.board.meet(node, digest, number)

    # the life

    async def run(self) -> None:
        """Take part until the run's last round is committed here and the peers have it too."""
        await self.exchange.start()
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self.membership.beat())
            await self._synchronise()
            while not self.is_finished():
                await self._heed()
                await self._advance()
            await self._finish()
            beat.cancel()

    def is_finished(self) -> bool:
        """Whether the head is the run's last round."""
        return 0 < self.manifest.round.total <= self.replica.head.document.round

    def pause(self, *, at_once: bool = False) -> None:
        """Train nothing more from the end of the round on, but keep the state, follow and serve, until `resume`.

        Args:
            at_once: end the training of the round after the step it is in; what was reached is handed in.
        """
        if self._trainer is None:
            return
        self._wants_pause = True
        if at_once:
            self._trainer.stop()
        self.board.notify()

    def resume(self) -> None:
        """Train again from the next round on."""
        self._wants_pause = False
        self.board.notify()

    @property
    def is_trainer(self) -> bool:
        """Whether this node trains, or would if it were not paused."""
        return self._trainer is not None

    @property
    def is_paused(self) -> bool:
        """Whether this node trains nothing, because it was told to."""
        return self._paused

    async def until_paused(self) -> None:
        """Wait until a node that was told to pause has done so; one that trains nothing anyway has."""
        while self._wants_pause and not self._paused:
            if self.replica.store.head is None or self.is_finished():
                return
            await self.board.changed(LOOK_SECONDS)

    @property
    def _trains(self) -> bool:
        return self._trainer is not None and not self._paused

    async def _heed(self) -> None:
        """Between two rounds: stop training, or begin again, if that is wanted."""
        if self._trainer is None or self._wants_pause == self._paused:
            return
        if self._wants_pause:
            moments = await self._moments_for_others()
            self._paused, self._handed_in = True, None
            self._trainer.stop()  # nothing is trained ahead, either
            self.membership.update(role="seed", capacity=0, experts=(), state="paused", reason=PAUSED)
            number = self.replica.head.document.round
            self._context.publish(Leave(run=self.run_id, node=self._me, round=number, moments=moments))
            self._tell("paused", PAUSED)
        else:
            self._paused = False
            self.board.come_back(self._me)
            self.membership.update(**self._work, state="waiting", reason="is back from a pause")
            self._claim()

    async def leave(self) -> None:
        """Tell everybody that nobody should wait for this node, withdraw its leases, and hand over what only it has of
        its experts, the optimiser's moments, to those who train them next."""
        head = self.replica.store.head
        number = head.document.round if head is not None else 0
        moments = await self._moments_for_others() if head is not None else {}
        await self.membership.say_goodbye()
        self._context.publish(Leave(run=self.run_id, node=self._me, round=number, moments=moments))
        await self.exchange.flush()
        if moments:
            digests = {offer.digest for offer in moments.values()}
            await self.exchange.until_served(digests, min(HANDOVER_SECONDS, self.manifest.round.margin_seconds))

    async def _moments_for_others(self) -> dict[str, Encoded]:
        """The moments of the experts that somebody else has room for, in files that peers can fetch."""
        head, view = self.replica.head.document, self.membership.view
        capacity = {node: record.capacity for node, record in view.trainers().items() if node != self._me}
        if self._trainer is None or self._paused or not capacity:
            return {}
        heirs = claims(self.manifest, self.run_id, head, capacity, view.without(self._me).holders())
        wanted = {expert for experts in heirs.values() for expert in experts} & set(self.membership.experts)
        folder = self.replica.store.scratch(head.round + 1)
        offered = {}
        for name, digest in (await self._trainer.moments(tuple(sorted(wanted)), folder)).items():
            self.replica.store.place(folder / digest)
            offered[name] = Encoded(digest=digest, size=(folder / digest).stat().st_size)
        return offered

    def _inherit(self, leave: Leave) -> None:
        """Fetch the moments of the experts that fall to this node when another one leaves."""
        if not self._trains or not leave.moments or leave.node == self._me:
            return
        head, view = self.replica.head.document, self.membership.view.without(leave.node)
        capacity = {node: record.capacity for node, record in view.trainers().items()}
        capacity[self._me] = self.membership.record.capacity
        heirs = claims(self.manifest, self.run_id, head, capacity, view.holders())
        mine = set(heirs[self._me]) - set(self.membership.experts)
        self._context.inheritance.accept(leave, mine, head)

    async def _synchronise(self) -> None:
        """Get the newest state that any peer has."""
        while True:
            moved = await self._pursuit.run()
            if self.replica.store.head is not None:
                break
            if not moved:
                self._tell("syncing", "waiting for a peer that holds the state of the run")
                await asyncio.sleep(LOOK_SECONDS)
        self.replica.announce()
        self.board.advance(self.replica.head.document.round)
        if self._trains and not self._wants_pause:
            self._claim()

    def _claim(self) -> None:
        """Lease the experts that fall to this node, from what it sees; the next plan confirms them."""
        view = self.membership.view
        capacity = {node: record.capacity for node, record in view.trainers().items()}
        capacity[self._me] = self.membership.record.capacity
        mine = claims(self.manifest, self.run_id, self.replica.head.document, capacity, view.holders())[self._me]
        self.membership.lease(mine)

    async def _advance(self) -> None:
        """From one commit to the next."""
        plan = await self._next_plan()
        if plan is None:
            return
        self._round_started = self._round_started or asyncio.get_running_loop().time()
        base = await self._base(plan)
        if base is None:
            self._given_up.add(plan.digest)
            return
        commit: Signed[Commit] | None
        if self._trainer is not None and self._trains and self._me in plan.document.roster:
            self.membership.lease(plan.document.owners.get(self._me, ()))
            self._round = Round(self._context, plan, base, self._trainer, self._handed_in, self._find_plan)
            commit = await self._round.run()
            self._handed_in = self._round.handed_in
        else:
            self._tell("following", f"round {plan.document.round} is in progress without this node")
            commit = await self._watch(plan, base)
        if commit is None:
            others = plan.document.roster.keys() - {self._me}
            # who is alone in it may try again, and would make the same plan
            if others and all(self.board.excused(node, plan.document.round) for node in others):
                self._given_up.add(plan.digest)
            await self._catch_up()
        else:
            await self._adopt(commit, list(plan.document.roster))

    async def _base(self, plan: Signed[Plan]) -> Commit | None:
        """What the round starts from; None when this node does not come to the state that the leader names."""
        merge = plan.document.merge
        if merge is not None:
            self._tell("merging", f"round {plan.document.round} begins with a merge, alpha {merge.alpha:.3g}")
        base = await self.replica.base(merge)
        if merge is not None and base.state != merge.state:
            log.warning(
                "round %d: merging gives another state here than %s says; that plan is left out",
                plan.document.round,
                short(plan.signer),
            )
            return None
        return base

    async def _adopt(self, commit: Signed[Commit], roster: list[str]) -> None:
        if self.replica.lacking(commit.document) and self.membership.view.is_beyond(commit.document.round + 1):
            await self._catch_up()  # nobody keeps what travelled for longer than two rounds
            return
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
        before = self.replica.head
        if await self._pursuit.run():
            after = self.replica.head.document
            if after.round <= before.document.round or (
                after.round == before.document.round + 1 and after.parent != before.digest
            ):
                log.warning(
                    "the others went on without round %d of this node: it now has round %d of their chain, which has "
                    "more tokens; the blocks it trained since they parted are trained again",
                    before.document.round,
                    after.round,
                )
            self._moved()

    def _moved(self) -> None:
        """The head has changed."""
        head = self.replica.head
        self.board.advance(head.document.round)
        self._given_up.clear()
        self._corrected.clear()
        if self._round is not None:
            self._round.settle(head.document)
            self._round = None
        self._account(head.document)
        now = asyncio.get_running_loop().time()
        self._on_commit(head, self.membership.view, now - (self._round_started or now))
        self._round_started = now

    def _account(self, commit: Commit) -> None:
        """Tell in this node's record what it did in the round."""
        if self._me in commit.shares and self._handed_in is not None:
            self.membership.note(
                seconds_per_step=self._handed_in.work.seconds_per_step,
                utilisation=self._context.utilisation.last,
                trained_tokens=self.membership.record.trained_tokens + commit.shares[self._me].tokens,
                uplink=steady_rate(self.membership.record.uplink, self.exchange.upload_rate),
            )

    # plans

    async def _next_plan(self) -> Signed[Plan] | None:
        """The plan that follows the head: somebody's, or this node's own; None when the head has moved instead."""
        self._tell(self._idle, f"round {self.replica.head.document.round + 1} is being planned")
        head = self.replica.head.digest
        if self._trains:
            self._report()
        await self._catch_up()  # whoever was away must not go on alone where the others have left
        await self._give_way()
        if self.replica.head.digest != head:
            return None
        lead = asyncio.create_task(Planner(self._context, self._given_up).run()) if self._trains else None
        try:
            while True:
                if (plan := await self.board.until(self._find_plan, LOOK_SECONDS)) is not None:
                    return plan
                if lead is not None and lead.done():
                    lead.result()  # an error in it is this node's error
                    if self._find_plan() is None:
                        return None  # it was asleep: look around first
                if (commit := self._find_commit()) is not None:
                    await self._adopt(commit, list(commit.document.owners))
                else:
                    await self._catch_up()
                if self.replica.head.digest != head or self._wants_pause != self._paused:
                    return None
        finally:
            if lead is not None:
                lead.cancel()

    def _report(self) -> None:
        """Tell those who are to plan next that this node is ready; they need not look for it."""
        head, trainers = self.replica.head.document, self.membership.view.trainers()
        order = leaders(self.run_id, head, list(trainers))
        self.exchange.greet([node for node in order if node in trainers][:FIRST_LEADERS])

    async def _give_way(self) -> None:
        """Let a chain pass that is the heavier one, and only behind because its round ends later.

        Two halves of a swarm that find each other again would otherwise go on side by side, each of them ahead whenever
        it looks.
        """
        head, loop = self.replica.head, asyncio.get_running_loop()
        usual = head.document.train_seconds + max(head.document.reduce_seconds, default=0.0)
        deadline = loop.time() + usual + self._context.margin
        while self.replica.head.digest == head.digest and (rival := self.replica.rival()) is not None:
            if (left := deadline - loop.time()) <= 0:
                return
            who = self.membership.view.call([rival])
            self._tell(self._idle, f"{who} has the better chain; waiting for its round, at most {left:.0f} s")
            await self.board.changed(LOOK_SECONDS)
            await self._catch_up()

    def _find_plan(self) -> Signed[Plan] | None:
        return accepted_plan(self._context, self._given_up)

    def _find_commit(self) -> Signed[Commit] | None:
        return accepted_commit(self._context)

    async def _watch(self, plan: Signed[Plan], base: Commit) -> Signed[Commit] | None:
        """The commit of a round this node is not part of; None when it should look for a newer head instead."""
        async with asyncio.TaskGroup() as group:
            collector = Collector(self._context, plan.document, plan.digest, base)
            collecting = group.create_task(collector.run())
            commit = await self._patience.wait(
                self._find_commit,
                what="commit",
                whom=lambda: plan.document.roster,
                seconds=self.manifest.round.margin_seconds,
            )
            if commit is not None:
                await collector.complete(commit.document)
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
                    self._tell(
                        "finished",
                        f"the run is complete; serving the last round to {self.membership.view.call(behind)}",
                    )
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            return

    def _tell(self, state: State, reason: str) -> None:
        if self._paused and state in ("paused", "waiting", "following"):
            state, reason = "paused", PAUSED
        self.membership.note(state=state, reason=reason[:120])
        self._on_state(state, reason)
