"""What a node accepts from a leader: plans that hand out what the run says, commits of those who were in the round."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.documents import Commit, Leave, Ledger, Plan, Share, Signed, seal
from swarm.identity import Identity
from swarm.leader import leaders
from swarm.manifest import EncodingSettings
from swarm.planner import Planner, accepted_commit, accepted_plan, is_sound
from swarm.records import View
from tests import examples
from tests.examples import NODES, ROUND, RUN
from tests.nodes import Loopback, Node

VALUES = {"embed": b"four", "head": b"eight..."}
LEDGER = Ledger(cursor=40, returned=((3, 9),), reserved={NODES[1]: ((20, 30),)})
ROUND_TOKENS = 2 * ROUND.local_steps * ROUND.batch_blocks * examples.manifest().data.block_tokens
"""Of one member, with what is for training ahead."""


class Judge:
    """A node that is at the first commit; the first identity leads."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self.node = Node(identity, folder, VALUES, examples.manifest())
        self.me = self.node.me
        self.others = NODES[1:3]
        commit = examples.commit(
            round=1,
            parent=self.node.head.digest,
            leader=self.me,
            shards=examples.states(VALUES),
            ledger=LEDGER,
            tokens=1000,
            shares=dict.fromkeys([self.me, *self.others], Share(tokens=1, steps=1)),
        )
        self.node.adopt(seal(identity, commit), VALUES)

    def plan(self, leader: str = "", **fields: Any) -> Plan:
        roster = {node: examples.record() for node in [leader or self.me, self.me, *self.others]}
        head = self.node.head
        plan = examples.planned(roster, head.document, self.node.context.manifest)
        return plan.model_copy(update={"parent": head.digest, **fields})

    def accepts(self, plan: Plan) -> bool:
        return is_sound(self.node.context, examples.posted(plan))

    def commit(self, leader: str = "", **fields: Any) -> Signed[Commit]:
        document = examples.commit(
            round=2,
            parent=self.node.head.digest,
            leader=leader or self.me,
            shards=examples.states(VALUES),
            tokens=1000 + ROUND_TOKENS,
            shares={self.me: Share(tokens=ROUND_TOKENS, steps=8)},
        )
        return examples.posted(document.model_copy(update=fields))

    def accepted(self, *commits: Signed[Commit]) -> Signed[Commit] | None:
        for commit in commits:
            assert self.node.board.post(commit) == ""

        async def look() -> Signed[Commit] | None:
            return accepted_commit(self.node.context)

        return asyncio.run(look())


@pytest.fixture
def judge(identities: list[Identity], tmp_path: Path) -> Judge:
    return Judge(identities[0], tmp_path / "store")


def changed(plan: Plan, node: str, **fields: object) -> Plan:
    """The plan with something else for one member."""
    return plan.model_copy(update={"roster": {**plan.roster, node: plan.roster[node].model_copy(update=fields)}})


# plans


def test_an_honest_plan_is_sound(judge: Judge) -> None:
    assert judge.accepts(judge.plan())
    assert judge.plan().roster[NODES[1]].blocks[0] == (20, 30), "with what is reserved"


@pytest.mark.parametrize(
    "blocks",
    [
        (),
        ((20, 30),),
        ((20, 30), (3, 9), (40, 41)),
        ((3, 9), (20, 30)),
        ((0, 16),),
        ((20, 30), (1000, 1006)),
        ((20, 30), (9, 3)),
    ],
)
def test_a_plan_with_other_blocks_than_the_ledger_gives_is_refused(
    judge: Judge, blocks: tuple[tuple[int, int], ...]
) -> None:
    assert not judge.accepts(changed(judge.plan(), NODES[1], blocks=blocks))


def test_members_cannot_swap_their_blocks(judge: Judge) -> None:
    plan = judge.plan()
    first, second = judge.others
    swapped = changed(plan, first, blocks=plan.roster[second].blocks)
    assert not judge.accepts(changed(swapped, second, blocks=plan.roster[first].blocks))


@given(steps=st.integers(0, 2 * ROUND.local_steps))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_and_steps_belong_together(judge: Judge, steps: int) -> None:
    """Fewer steps without fewer blocks would keep blocks from others, and more than the run says is too much."""
    honest = judge.plan()
    assert judge.accepts(changed(honest, judge.me, steps=steps)) == (steps == ROUND.local_steps)


@pytest.mark.parametrize(
    "fields",
    [
        {"parent": examples.digest("another commit")},
        {"train_seconds": 30.1},
        {"reduce_seconds": 30.1},
        {"roster": {}},
    ],
)
def test_a_plan_that_breaks_the_runs_bounds_is_refused(judge: Judge, fields: dict[str, Any]) -> None:
    assert not judge.accepts(judge.plan(**fields))


@pytest.mark.parametrize("heldout", [(0, 65), (5, 3), (64, 65)])
def test_a_plan_that_evaluates_what_there_is_not_is_refused(judge: Judge, heldout: tuple[int, int]) -> None:
    assert not judge.accepts(changed(judge.plan(), judge.me, heldout=heldout))


def test_only_members_of_a_round_plan_it(judge: Judge) -> None:
    assert not judge.accepts(judge.plan().model_copy(update={"leader": NODES[5]}))


def test_a_plan_with_owners_or_members_that_are_not_in_it_is_refused(judge: Judge) -> None:
    """Whoever computes who averages and who relays would stumble over them."""
    stranger = NODES[5]
    honest = judge.plan()
    assert not judge.accepts(judge.plan(owners={**honest.owners, stranger: (0,)}))
    assert not judge.accepts(judge.plan(uplinks={}))


def test_of_several_plans_that_of_the_first_leader_counts(judge: Judge) -> None:
    plans = [examples.posted(judge.plan(leader)) for leader in judge.others]
    for plan in plans:
        assert judge.node.board.post(plan) == ""
    first = accepted_plan(judge.node.context)
    assert first in plans
    second = accepted_plan(judge.node.context, {first.digest} if first else ())
    assert second in plans and second != first
    assert accepted_plan(judge.node.context, [plan.digest for plan in plans]) is None


# commits


def test_the_commit_of_a_round_is_accepted(judge: Judge) -> None:
    assert judge.accepted(commit := judge.commit()) == commit


def test_a_commit_by_a_stranger_or_with_one_is_refused(judge: Judge) -> None:
    assert judge.accepted(judge.commit(leader=NODES[5])) is None
    assert judge.accepted(judge.commit(shares={NODES[5]: Share(tokens=1, steps=1)})) is None


@pytest.mark.parametrize("tokens", [999, 1001 + 10 * 32 + 3 * ROUND_TOKENS, 2**62])
def test_a_commit_with_more_tokens_than_its_round_allowed_is_refused(judge: Judge, tokens: int) -> None:
    """Else it would win against every honest chain."""
    plan = examples.posted(judge.plan())
    judge.node.board.post(plan)
    assert judge.accepted(judge.commit(plan=plan.digest, tokens=tokens)) is None
    most = judge.commit(plan=plan.digest, tokens=1000 + 10 * 32 + 3 * ROUND_TOKENS)
    assert judge.accepted(most) == most


def test_whoever_was_not_in_the_roster_is_in_no_commit_of_its_plan(judge: Judge) -> None:
    alone = examples.planned({judge.me: examples.record()}, judge.node.head.document, judge.node.context.manifest)
    plan = examples.posted(alone.model_copy(update={"parent": judge.node.head.digest}))
    assert judge.node.board.post(plan) == ""
    absent = judge.others[0]
    fields: dict[str, Any] = {"shares": {absent: Share(tokens=1, steps=1)}}
    assert judge.accepted(judge.commit(plan=plan.digest, **fields)) is None
    assert judge.accepted(commit := judge.commit(plan=examples.digest("never delivered"), **fields)) == commit


def test_of_two_commits_the_one_with_more_tokens_is_accepted(judge: Judge) -> None:
    less, more = judge.commit(tokens=1100), judge.commit(leader=judge.others[0], tokens=1200)
    assert judge.accepted(less, more) == more


# the planner


def test_a_leader_that_leaves_is_not_waited_for_nor_planned_in(loopback: Loopback, tmp_path: Path) -> None:
    """Even if it took part in the last round and comes first; nor may the others spin until its time is over."""

    async def script(nodes: list[Node]) -> None:
        head = examples.commit(
            round=1, parent=nodes[0].head.digest, leader=nodes[0].me, shards=examples.states(VALUES),
            shares={node.me: Share(tokens=1, steps=1) for node in nodes[:2]},
        )  # fmt: skip
        signed = seal(nodes[0].identity, head)
        first, second, *_ = leaders(RUN, head, [node.me for node in nodes[:2]])
        node = next(node for node in nodes if node.me == second)
        node.adopt(signed, VALUES)
        records = {who: examples.record(commit=signed.digest, round=1) for who in (first, second)}
        looks = 0

        async def refresh() -> View:
            nonlocal looks
            looks += 1
            node.membership.view = View(records)
            return node.membership.view

        node.membership.refresh = refresh  # type: ignore[method-assign]
        planning = asyncio.create_task(Planner(node.context).run())
        while not looks:
            await asyncio.sleep(0)
        leaver = next(other for other in nodes if other.me == first)
        assert node.board.post(seal(leaver.identity, Leave(run=RUN, node=first, round=1))) == ""
        async with asyncio.timeout(node.context.margin / 2):
            await planning
        (plan,) = node.board.plans[2].values()
        assert plan.document.roster.keys() == {second}
        assert looks < 10

    loopback.play(tmp_path, VALUES, EncodingSettings(), script)
