"""Whole rounds of several participants in one process: what a commit contains, and that nothing trained gets lost."""

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from bench.marking_trainer import moments_of
from bench.participants import TINY, Node, Swarm
from swarm import blocks, codec, exchange, meter
from swarm.documents import Commit, Document, Plan, Reduction, Signed
from swarm.manifest import Encoding, EncodingSettings
from swarm.ranking import ranked
from swarm.replica import Replica
from swarm.shard_names import expert_of, trained
from swarm.store import KEPT_COMMITS
from swarm.trainer import Task, Work
from tests.accounts import LEFT_TO_THE_COLLECTOR, Accounts, require_every_block_once, require_marks, require_means, used

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    *LEFT_TO_THE_COLLECTOR,
]


def owner_of(commit: Commit, expert: int) -> str:
    """The one node that trains an expert."""
    (owner,) = [node for node, experts in commit.owners.items() if expert in experts]
    return owner


def require_experts_kept(accounts: Accounts, chain: list[Signed[Commit]], nodes: list[Node]) -> None:
    """The shards of experts that never changed hands contain what their owner has trained, all of it, once."""
    settled = [commit for commit in chain if commit.document.owners]
    for name in chain[0].document.shards:
        if (expert := expert_of(name)) is None:
            continue
        (owner,) = {owner_of(commit.document, expert) for commit in settled}
        node = next(node for node in nodes if node.id == owner)
        counted = [block for commit in settled for block in used(commit.document, node)]
        require_marks(accounts.gain(name, chain[-1], chain[0]), counted)


def require_no_wait(nodes: Sequence[Node], before: Sequence[int], usual: float) -> None:
    """No round since each node had so many took much longer than usual, though the margin is 8 s."""
    for node, count in zip(nodes, before, strict=True):
        assert max(node.seconds[count:]) < usual + 3.0, "nobody waits for who has left, or paused"


@pytest.mark.parametrize(
    ("shared", "experts"), [("fp32", "int4"), ("bf16", "fp32"), ("int8", "bf16"), ("int4", "int8")]
)
def test_all_hold_the_same_bits_and_frozen_experts_keep_theirs(
    tmp_path: Path, shared: Encoding, experts: Encoding
) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings = EncodingSettings(shared=shared, experts=experts)
        async with Swarm(tmp_path, encoding=settings, on_commit=accounts.note, start_nodes=3) as swarm:
            nodes = [swarm.add(capacity=1, step_seconds=0.02) for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(5)
            chain = accounts.chain(swarm)
            require_every_block_once(chain, nodes)
            assert len(accounts.commits) == len({commit.document.round for commit in accounts.commits.values()})

            covered = chain[-1].document.experts_covered
            assert len(covered) == 3
            for commit in chain:
                assert all(set(held) <= covered for held in commit.document.owners.values())
            for name, shard in chain[-1].document.shards.items():
                if (expert := expert_of(name)) is not None and expert not in covered:
                    assert shard == chain[0].document.shards[name] and shard.version == 0
                elif expert is not None:
                    node = next(n for n in nodes if n.id == owner_of(chain[-1].document, expert))
                    counted = [block for commit in chain for block in used(commit.document, node)]
                    require_marks(accounts.gain(name, chain[-1], chain[0]), counted, within=0.4)
                else:
                    assert np.count_nonzero(np.rint(accounts.gain(name, chain[1], chain[0]) * 3)) > 0
                    assert codec.encoded_size(shared, shard.size // 4) == chain[-1].document.updates[name].encoded.size

    uvloop.run(scenario())


def test_a_slow_node_does_its_part_weighs_less_and_holds_nobody_up(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 2, "local_steps": 9, "overlap": False}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            fast = [swarm.add(step_seconds=0.1) for _ in range(2)]
            slow = swarm.add(step_seconds=0.3, newcomer=True)
            await swarm.start(*fast)
            await swarm.rounds(4)
            await swarm.start(slow)
            await swarm.until(lambda: slow.trainer.works, "the first work of the newcomer")
            await swarm.rounds(2)
            at = fast[0].round
            await swarm.rounds(4)
            chain = accounts.chain(swarm)
            for commit in chain[at + 1 :]:
                assert [commit.document.shares[node.id].steps for node in (*fast, slow)] == [9, 9, 3]
            require_every_block_once(chain, swarm.nodes)
            require_means(accounts, chain, swarm.nodes)

    uvloop.run(scenario())


def test_a_slow_uplink_is_not_asked_to_relay_and_nothing_of_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "KNOWN_BYTES", 1 << 11)  # of these shards no megabyte is ever sent
    monkeypatch.setattr(meter, "BUFFERED_BYTES", 1 << 9)
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 512)
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 4, "local_steps": 2, "margin_seconds": 3.0}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(capacity=1) for _ in range(4)]
            weak = nodes[-1]
            plans: list[Plan] = []

            starved = list[int]()

            def look(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if isinstance(signed.document, Plan):
                    plans.append(signed.document)
                    if starved == [0] and signed.signer != weak.id:
                        weak.throttle(100.0)  # nothing of it arrives in this round
                        starved[0] = signed.document.round
                return (signed,)

            for node in nodes:
                node.tamper = look
            await swarm.start(*nodes)
            weak.throttle(10_000.0)
            await swarm.until(lambda: plans and plans[-1].uplinks[weak.id], "a measurement of the weak uplink", 80)
            known = weak.round
            await swarm.rounds(4)
            told = plans[-1].uplinks  # 0 of a node that is too quick to tell from what it has sent
            assert all(8 * told[weak.id] <= rate for node, rate in told.items() if node != weak.id and rate)
            for commit in accounts.chain(swarm)[known + 2 :]:
                reducers = [u.reducer for n, u in commit.document.updates.items() if expert_of(n) is None]
                assert weak.id not in reducers

            starved.append(0)
            await swarm.until(lambda: starved[0] and min(node.round for node in nodes) >= starved[0], "a starved round")
            at = starved[0]
            weak.serve = None
            mine = [n for n in weak.head.shards if expert_of(n) in accounts.chain(swarm)[at].document.owners[weak.id]]
            assert mine and not set(mine) & set(accounts.chain(swarm)[at].document.updates)
            assert weak.id in weak.head.owners, "it takes part again at once"
            await swarm.rounds(2)
            chain = accounts.chain(swarm)
            require_every_block_once(chain, nodes)
            require_experts_kept(accounts, chain, nodes)

    uvloop.run(scenario())


@pytest.mark.parametrize("kind", ["reduction", "contribution"])
def test_what_a_round_does_not_take_is_in_the_next_one(tmp_path: Path, kind: str) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "train_seconds": 2.0, "margin_seconds": 4.0}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(capacity=2) for _ in range(3)]
            chosen = asyncio.get_running_loop().create_future()
            written = set[str]()
            """Commits of round 2: two of them at once would split the swarm."""

            def choose(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if isinstance(signed.document, Plan) and signed.document.round == 2 and not chosen.done():
                    # not the leader: it would count what only itself knows
                    chosen.set_result(next(node for node in nodes if node.id != signed.signer))
                if isinstance(signed.document, Commit) and signed.document.round == 2:
                    written.add(signed.digest)
                mine = chosen.done() and signed.signer == chosen.result().id
                about = getattr(signed.document, "round", None), signed.document.kind
                return () if mine and about == (2, kind) else (signed,)

            for node in nodes:
                node.tamper = choose
            await swarm.start(*nodes)
            late = await chosen
            given = late.participant.document
            # nor does it come when it is asked for
            late.participant.document = lambda what, number: (
                None if (number, what) == (2, kind) else given(what, number)
            )
            await swarm.until(lambda: all(node.round >= 4 for node in nodes), "round 4")
            assert len(written) == 1
            chain = accounts.chain(swarm)
            second, third = chain[2].document, chain[3].document
            mine = [n for n in trained(second.shards, second.owners[late.id]) if expert_of(n) is not None]
            assert mine and not set(mine) & set(second.updates), "nothing of its experts came"
            assert set(mine) <= set(third.updates)
            if kind == "contribution":
                assert late.id in second.missing
                missed = late.trainer.works[2][1]
                assert used(third, late)[: len(missed)] == missed, "what was late comes first"
            require_every_block_once(chain, nodes)
            require_experts_kept(accounts, chain, nodes)

    uvloop.run(scenario())


def test_a_reducer_killed_before_it_announces_costs_its_own_share_alone(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=3, overlap=False) as swarm:
            nodes = [swarm.add() for _ in range(3)]
            fallen = list[int]()
            await swarm.start(*nodes)
            await swarm.rounds(1)
            shared = [u.reducer for n, u in nodes[0].head.updates.items() if expert_of(n) is None]
            victim = next(node for node in nodes if node.id in shared)

            def fall(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if isinstance(signed.document, Reduction):
                    fallen.append(signed.document.round)
                return () if fallen else (signed,)

            victim.tamper = fall
            await swarm.until(lambda: fallen, "the first results of the reducer")
            await swarm.end(victim)
            others = swarm.running
            await swarm.rounds(2)
            chain = accounts.chain(swarm)
            last = chain[fallen[0]].document
            assert all(used(last, node) for node in others)
            assert {u.reducer for n, u in last.updates.items() if expert_of(n) is None} <= {n.id for n in others}
            survivors = [c for c in chain if c.document.round >= last.round - 1]
            require_means(accounts, survivors, nodes)
            require_every_block_once(chain, nodes)
            assert chain[-1].document.experts_covered == frozenset(range(4))

    uvloop.run(scenario())


def test_a_leader_that_comes_late_has_its_time_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Swarm(tmp_path, start_nodes=2, margin_seconds=3.0) as swarm:
            early, leader = swarm.add(), swarm.add()
            if ranked([early.id, leader.id], swarm.manifest.digest, 1)[0] == early.id:
                early, leader = leader, early
            planned = asyncio.Event()
            hung = asyncio.Event()

            def note(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if signed.document.kind == "plan":
                    planned.set()
                return (signed,)

            def hang(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                leader.participant.board.plans.clear()
                hung.set()
                return ()

            early.tamper, leader.tamper = note, hang
            loop = asyncio.get_running_loop()
            await swarm.start(early)
            began = loop.time()
            await swarm.until(lambda: loop.time() > began + 3.5, "more than the margin")
            await swarm.start(leader)
            await asyncio.wait_for(hung.wait(), 20.0)
            await leader.hang()
            began = loop.time()
            await asyncio.wait_for(planned.wait(), 20.0)
            assert loop.time() - began > 1.0, "it waited for nodes, not for the leader"

    uvloop.run(scenario())


@pytest.mark.parametrize("to", ["everybody", "the third"])
def test_of_two_plans_that_of_the_first_leader_counts_even_if_it_comes_late(tmp_path: Path, to: str) -> None:
    """Who does not get it at all is given it by those who do."""

    async def scenario() -> None:
        async with Swarm(tmp_path, start_nodes=3, margin_seconds=2.0) as swarm:
            nodes = [swarm.add(step_seconds=0.3) for _ in range(3)]
            order = ranked([node.id for node in nodes], swarm.manifest.digest, 1)
            leader = next(node for node in nodes if node.id == order[0])
            planned = {node.id: asyncio.Event() for node in nodes}

            async def deliver_late(signed: Signed[Document]) -> None:
                await planned[order[1]].wait()
                leader.tamper = None
                del leader.participant.__dict__["document"]
                leader.participant.exchange.post(order if to == "everybody" else order[2:], signed)

            late = list[asyncio.Task[None]]()

            def note(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if signed.document.kind == "plan":
                    planned[signed.signer].set()
                return (signed,)

            def hold(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if signed.document.kind != "plan":
                    return ()
                # it does not tell about it when it is asked, either
                leader.participant.__dict__["document"] = lambda kind, number, author: None
                late.append(asyncio.create_task(deliver_late(signed)))
                return ()

            for node in nodes:
                node.tamper = hold if node is leader else note
            await swarm.start(*nodes)
            await swarm.until(planned[order[1]].is_set, "the plan of the second in order")
            took = await swarm.until(lambda: all(node.round for node in nodes), "round 1")
            assert nodes[0].commits[0].document.plan == nodes[1].commits[0].document.plan
            assert took < 15.0, "the deadlines of two halves would take more than 40 s"
            await late[0]

    uvloop.run(scenario())


def test_one_of_two_that_was_lost_and_comes_back_is_planned_in_again(tmp_path: Path) -> None:
    """The other one goes on alone and does not wait for it; its record shows that it follows."""

    async def scenario() -> None:
        async with Swarm(tmp_path, start_nodes=2) as swarm:
            nodes = [swarm.add(step_seconds=0.4) for _ in range(2)]
            await swarm.start(*nodes)
            await swarm.until(lambda: all(node.round >= 2 for node in nodes), "round 2")
            steady, gone = nodes
            await swarm.end(gone)
            await swarm.until(lambda: steady.head.shares.keys() == {steady.id}, "a round without it")
            steady.participant.board.lose(gone.id)  # as it does itself where it asks it for something
            await swarm.restart(gone)
            back = steady.round
            await swarm.until(lambda: steady.head.shares.keys() == {steady.id, gone.id}, "a round with it")
            assert steady.round <= back + 6, "the imports are done: its state, the round in progress, the next"

    uvloop.run(scenario())


def test_short_rounds_do_not_run_away_from_a_node_that_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it fetches a state the others would commit three more, for ever."""

    async def scenario() -> None:
        async with Swarm(tmp_path, start_nodes=3, local_steps=1) as swarm:
            nodes = [swarm.add(step_seconds=0.02) for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(1)
            gone = nodes[-1]
            await swarm.end(gone)
            away = max(node.round for node in swarm.running)
            await swarm.until(lambda: nodes[0].round >= away + 4, "rounds without it")
            adopt = Replica.adopt

            async def slowly(replica: Replica, commit: Signed[Commit], sources: Sequence[str]) -> None:
                if replica.store.folder == gone.folder:
                    await asyncio.sleep(1.5)
                await adopt(replica, commit, sources)

            monkeypatch.setattr(Replica, "adopt", slowly)
            await swarm.restart(gone)
            await swarm.until(lambda: nodes[0].round > away + 4 and gone.id in nodes[0].head.shares, "a round with it")

    uvloop.run(scenario())


def test_a_newcomer_whose_download_takes_many_rounds_arrives(tmp_path: Path) -> None:
    """Nobody keeps a state for so long: what it has of one is carried on to the next, which is smaller."""

    async def scenario() -> None:
        settings = EncodingSettings(shared="int4", experts="int4")
        model = TINY.model_copy(update={"hidden_size": 32, "num_layers": 4})
        async with Swarm(tmp_path, encoding=settings, start_nodes=2, model=model) as swarm:
            nodes = [swarm.add(step_seconds=0.5) for _ in range(2)]
            newcomer = swarm.add(newcomer=True)
            await swarm.start(*nodes)
            await swarm.rounds(1)
            size = sum(shard.size for shard in nodes[0].head.shards.values())
            line = asyncio.Lock()
            for node in nodes:
                node.throttle(size / 10, line=line, to=newcomer.id)
            began = nodes[0].round
            await swarm.start(newcomer)
            await swarm.until(lambda: "% is here" in newcomer.reason, "a word of how far it is")
            await swarm.until(lambda: newcomer.commits, "the newcomer's first state", 90)
            assert newcomer.round > began + KEPT_COMMITS, "the state that it began with is gone everywhere"
            assert newcomer.participant.exchange.received < 2.5 * size
            for node in nodes:
                node.serve = None
            await swarm.until(lambda: newcomer.id in nodes[0].head.shares, "a round with it")

    uvloop.run(scenario())


def test_experts_with_two_owners_are_averaged_and_outlive_them(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 4, "owners_per_expert": 2, "overlap": False}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(step_seconds=0.4 + 0.1 * number) for number in range(4)]
            await swarm.start(*nodes)
            await swarm.rounds(3)
            for left in (2, 2, 1):
                expected = [left] * 4
                commit = nodes[0].head
                assert [sum(e in held for held in commit.owners.values()) for e in range(4)] == expected
                if left > 1:
                    await swarm.end(swarm.running[-1], "leave")
                    if len(swarm.running) == 2:
                        await swarm.end(swarm.running[-1], "leave")
                    await swarm.rounds(2)
            assert nodes[0].head.experts_covered == frozenset(range(4))
            newcomers = [swarm.add(newcomer=True) for _ in range(2)]
            await asyncio.gather(*[swarm.start(node) for node in newcomers])
            await swarm.until(
                lambda: all(n.id in nodes[0].head.shares for n in newcomers), "shares of both newcomers", 60.0
            )
            await swarm.rounds(2)
            at = nodes[0].round
            await swarm.rounds(3)
            chain = accounts.chain(swarm)
            owners = [commit.document.owners for commit in chain[at:]]
            assert all(held == owners[0] for held in owners), "nobody's experts move any more"
            assert all(sum(e in held for held in owners[0].values()) == 2 for e in range(4))
            assert all(owners[0][node.id] for node in newcomers)
            require_means(accounts, chain, nodes + newcomers)
            require_every_block_once(chain, nodes + newcomers)

    uvloop.run(scenario())


def test_a_node_that_leaves_hands_over_its_experts_with_their_moments(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=3, margin_seconds=8.0) as swarm:
            nodes = [swarm.add() for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(4)
            usual = statistics.median(nodes[0].seconds[1:])
            leaver = max(nodes, key=lambda node: len(node.head.owners[node.id]))
            left = leaver.head.owners[leaver.id]
            mine = [name for name in leaver.head.shards if expert_of(name) in left]
            assert mine
            await swarm.end(leaver, "leave")
            at = [len(node.seconds) for node in swarm.running]
            await swarm.rounds(3)
            require_no_wait(swarm.running, at, usual)
            head = swarm.running[0].head
            assert head.experts_covered == frozenset(range(4)) and leaver.id not in head.owners
            for name in mine:
                heir = next(node for node in swarm.running if expert_of(name) in head.owners[node.id])
                assert heir.trainer.inherited.get(name) == moments_of(leaver.id, name)
            require_every_block_once(accounts.chain(swarm), nodes)

    uvloop.run(scenario())


def test_who_is_alone_tries_a_round_again_that_has_led_to_nothing(tmp_path: Path) -> None:
    """The plan that it makes then is the same one."""
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=1) as swarm:
            node = swarm.add()
            train, tries = node.trainer.train, list[int]()

            async def in_vain_twice(task: Task) -> Work:
                tries.append(task.round)
                return (
                    replace(await train(task), tokens=0, steps=0, used_blocks=0, shards={})
                    if len(tries) < 3
                    else await train(task)
                )

            node.trainer.train = in_vain_twice  # type: ignore[method-assign]
            await swarm.start(node)
            await swarm.rounds(2)
            assert tries[:3] == [1, 1, 1]
            require_every_block_once(accounts.chain(swarm), [node])

    uvloop.run(scenario())


def test_a_paused_node_hands_over_follows_and_trains_again_when_it_is_told_to(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=3, margin_seconds=8.0) as swarm:
            nodes = [swarm.add() for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(3)
            usual = statistics.median(nodes[0].seconds[1:])
            one = max(nodes, key=lambda node: len(node.head.owners[node.id]))
            others = [node for node in nodes if node is not one]
            one.participant.pause()
            await swarm.until(lambda: one.participant.is_paused, "the round ends and the node pauses")
            held = {expert for experts in others[0].head.owners.values() for expert in experts}
            at, paused_at = [len(node.seconds) for node in others], one.round
            await swarm.rounds(3)
            require_no_wait(others, at, usual)
            head = others[0].head
            assert one.id not in head.owners and head.experts_covered == held == frozenset(range(4))
            await swarm.until(lambda: one.round >= paused_at + 3, "the paused node follows")
            record = one.participant.membership.record
            assert (record.role, record.state, record.experts) == ("seed", "paused", ())
            one.participant.resume()
            await swarm.until(lambda: one.id in others[0].head.shares, "it trains again")
            assert one.head.owners[one.id]
            await swarm.rounds(2)
            require_every_block_once(accounts.chain(swarm), nodes)

    uvloop.run(scenario())


def test_a_whole_swarm_goes_on_from_its_disks(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=2) as swarm:
            nodes = [swarm.add() for _ in range(2)]
            await swarm.start(*nodes)
            await swarm.rounds(3)
            await asyncio.gather(*[swarm.end(node, "kill") for node in nodes])
            for node in nodes:
                await swarm.restart(node)
            await swarm.rounds(3)
            chain = accounts.chain(swarm)
            require_every_block_once(chain, nodes)
            assert blocks.count(chain[-1].document.ledger.returned) <= 2 * 8

    uvloop.run(scenario())
