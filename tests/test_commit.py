"""Commits as pure functions: which results and whose claims are in them, and the same arithmetic for everybody."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import blocks
from swarm.documents import Commit, Contribution, Encoded, Ledger, Plan, ShardState, Share
from swarm.leader import REMEMBERED, is_plausible, make_commit, reducers, resolve
from tests import examples
from tests.examples import NODES, ROUND, SHARDS, digest

ANN, BEN, CAT, DAN, EVE, FAY = NODES
MANIFEST = examples.manifest()
HEAD = digest("head")
PLAN = digest("plan")
STEP_TOKENS = ROUND.batch_blocks * MANIFEST.data.block_tokens
BLOCKS_EACH = 2 * ROUND.local_steps * ROUND.batch_blocks
"""With what is for training ahead."""


def plan_for(nodes: list[str], before: Commit | None = None) -> Plan:
    return examples.planned({node: examples.record() for node in nodes}, before or examples.head())


def orders_in(plan: Plan) -> dict[str, list[str]]:
    return reducers(plan, {name: shard.size for name, shard in examples.head().shards.items()})


def owned(plan: Plan, node: str) -> dict[str, Encoded]:
    """What a node offers of all shards that it trains."""
    names = [name for name, order in orders_in(plan).items() if node in order]
    return {name: Encoded(digest=digest(f"{name} of {node}"), size=100) for name in names}


def contribution(plan: Plan, node: str, **fields: object) -> Contribution:
    return examples.contribution(node, **{"shards": owned(plan, node), **fields})


def commit_of(plan: Plan, contributions: dict[str, Contribution], before: Commit | None = None) -> Commit:
    """The commit when every shard is averaged over those of its owners that contributed."""
    results = {}
    for name, order in orders_in(plan).items():
        contributors = [node for node in sorted(order) if node in contributions]
        if contributors:
            results[name] = (contributors[0], examples.result(f"new {name}", *contributors))
    return make_commit(plan, PLAN, plan.leader, before or examples.head(), results, contributions, 1.5)


# which result


def test_results_are_taken_from_the_first_reducer_whose_values_are_here() -> None:
    plan = plan_for(NODES[:3])
    order = orders_in(plan)
    first, second, third = order["embed"]
    everybody = {
        node: examples.reduction(node, results=dict.fromkeys(["embed", "unknown"], examples.result(f"by {node}", node)))
        for node in NODES
    }
    assert resolve(order, everybody, lambda *_: True)["embed"][0] == first
    assert resolve(order, everybody, lambda _, result: result.values != digest(f"by {first}"))["embed"][0] == second
    assert resolve(order, {third: everybody[third]}, lambda *_: True).keys() == {"embed"}
    assert resolve(order, {FAY: everybody[FAY]}, lambda *_: True) == {}, "it owns nothing"
    assert resolve(order, everybody, lambda *_: False) == {}


def test_what_is_held_is_asked_for_each_shard() -> None:
    """Values of the right digest are no result of a shard of another size."""
    order = {"embed": [ANN], "head": [ANN]}
    announced = {ANN: examples.reduction(ANN, results=dict.fromkeys(order, examples.result("same", ANN)))}
    assert resolve(order, announced, lambda name, _: name == "head").keys() == {"head"}


def test_a_shard_without_a_result_keeps_its_version() -> None:
    plan, before = plan_for([ANN]), examples.head()
    result = examples.result("new embed", ANN)
    commit = make_commit(plan, PLAN, ANN, before, {"embed": (ANN, result)}, {ANN: contribution(plan, ANN)}, 1.5)
    assert commit.shards["embed"] == ShardState(version=1, digest=digest("new embed"), size=400)
    assert all(commit.shards[name] == before.shards[name] for name in SHARDS if name != "embed")
    assert set(commit.carried) == set(SHARDS) - {"embed"} == set(commit.shards) - set(commit.updates)
    assert (commit.updates["embed"].encoded, commit.updates["embed"].reducer) == (result.encoded, ANN)
    assert (commit.round, commit.parent, commit.plan, commit.reduce_seconds) == (1, HEAD, PLAN, (1.5,))
    assert commit.counts(ANN, "embed") and not commit.counts(ANN, "head")


# whose share


def test_tokens_add_up_and_losses_are_weighted_by_them() -> None:
    plan = plan_for([ANN, BEN, CAT])
    heldout = {"heldout_tokens": 10}
    choices = ((1, 2, 3, 14), (5, 5, 5, 5))
    offered = {
        ANN: contribution(
            plan, ANN, tokens=300, loss=2.0, heldout_nats=30.0, train_seconds=3.0, busy=0.5, choices=choices, **heldout
        ),
        BEN: contribution(
            plan, BEN, tokens=100, loss=4.0, heldout_nats=50.0, train_seconds=1.0, busy=1.0, choices=choices, **heldout
        ),
    }
    commit = commit_of(plan, offered)
    assert commit.tokens == 1400
    assert (commit.loss, commit.heldout_loss) == (2.5, 4.0)
    assert commit.choices == ((2, 4, 6, 28), (10, 10, 10, 10))
    assert commit.shares == {ANN: Share(tokens=300, steps=4), BEN: Share(tokens=100, steps=4)}
    assert commit.missing == (CAT,)
    assert (commit.train_seconds, commit.busy) == (3.0, 0.75)


def test_utilisation_is_the_mean_of_those_who_know_it() -> None:
    plan = plan_for([ANN, BEN])
    offered = {ANN: contribution(plan, ANN, busy=0.0), BEN: contribution(plan, BEN, busy=0.5)}
    assert commit_of(plan, offered).busy == 0.5
    assert commit_of(plan, {ANN: offered[ANN]}).busy == 0.0


def test_a_contribution_that_no_result_contains_does_not_count() -> None:
    plan = plan_for([ANN, BEN])
    offered = {node: contribution(plan, node) for node in (ANN, BEN)}
    results = {"embed": (ANN, examples.result("new", ANN))}
    commit = make_commit(plan, PLAN, ANN, examples.head(), results, offered, 0.0)
    assert commit.shares.keys() == {ANN} and commit.missing == (BEN,) and commit.tokens == 1100
    assert commit.ledger.reserved[BEN] == plan.roster[BEN].blocks, "its work stays with it, and so do its blocks"
    assert not commit.counts(BEN, "embed")


def test_whoever_is_left_out_of_one_shard_is_named_there() -> None:
    plan = plan_for([ANN, BEN, CAT])
    offered = {node: contribution(plan, node) for node in (ANN, BEN)}
    results = {"embed": (ANN, examples.result("embed", ANN, BEN)), "head": (BEN, examples.result("head", BEN))}
    commit = make_commit(plan, PLAN, ANN, examples.head(), results, offered, 0.0)
    assert commit.updates["embed"].without == ()
    assert commit.updates["head"].without == (ANN,)
    assert commit.counts(ANN, "embed") and not commit.counts(ANN, "head")
    assert not commit.counts(CAT, "embed"), "it has offered nothing"


def test_a_contributor_that_offered_nothing_has_no_share() -> None:
    """A reducer cannot make up contributors."""
    plan = plan_for([ANN, BEN])
    results = {"embed": (ANN, examples.result("new", ANN, BEN, FAY))}
    commit = make_commit(plan, PLAN, ANN, examples.head(), results, {ANN: contribution(plan, ANN)}, 0.0)
    assert commit.shares.keys() == {ANN} and commit.missing == (BEN,)


def test_a_round_in_which_everybody_failed_changes_nothing_but_its_number() -> None:
    plan, before = plan_for([ANN, BEN]), examples.head()
    commit = make_commit(plan, PLAN, ANN, before, {}, {}, 0.0)
    assert commit.shards == before.shards and commit.state == before.state
    assert (commit.tokens, commit.loss, commit.heldout_loss) == (1000, 7.0, None)
    assert commit.missing == (ANN, BEN) and commit.shares == {}
    assert commit.ledger.cursor == 2 * BLOCKS_EACH
    assert commit.ledger.reserved == {node: member.blocks for node, member in plan.roster.items()}


def test_the_time_of_a_few_rounds_is_remembered() -> None:
    commit = examples.head()
    for seconds in range(REMEMBERED + 3):
        plan = plan_for([ANN], commit)
        commit = make_commit(plan, PLAN, ANN, commit, {}, {}, float(seconds))
    assert commit.reduce_seconds == tuple(float(seconds) for seconds in range(3, REMEMBERED + 3))


def test_a_commit_is_finite_whatever_the_tokens() -> None:
    plan = plan_for([ANN])
    commit = commit_of(plan, {ANN: contribution(plan, ANN, tokens=0)})
    assert math.isfinite(commit.loss)


# the ledger


@given(
    st.lists(st.dictionaries(st.sampled_from(NODES), st.none() | st.integers(0, BLOCKS_EACH), min_size=1), max_size=8)
)
def test_no_block_is_lost_or_used_twice_over_many_rounds(history: list[dict[str, int | None]]) -> None:
    """Every round has another roster; a member uses some of its blocks, or fails (None)."""
    before, used = examples.head(), list[int]()
    for members in history:
        plan = plan_for(sorted(members), before)
        offered = {n: contribution(plan, n, used_blocks=count) for n, count in members.items() if count is not None}
        for node, offer in offered.items():
            used += blocks.ids(plan.roster[node].blocks)[: offer.used_blocks]
        before = commit_of(plan, offered, before)
        reserved = [block for ranges in before.ledger.reserved.values() for block in blocks.ids(ranges)]
        assert sorted(used + reserved + blocks.ids(before.ledger.returned)) == list(range(before.ledger.cursor))


def test_what_a_member_did_not_use_comes_first_in_its_next_plan() -> None:
    plan = plan_for([ANN, BEN])
    commit = commit_of(plan, {node: contribution(plan, node, used_blocks=8) for node in (ANN, BEN)})
    after = plan_for([ANN, BEN], commit)
    for node in (ANN, BEN):
        trained_ahead = blocks.ids(plan.roster[node].blocks)[8:]
        assert blocks.ids(after.roster[node].blocks)[: len(trained_ahead)] == trained_ahead


def test_a_node_that_claims_more_blocks_than_it_got_uses_only_its_own() -> None:
    plan = plan_for([ANN, BEN])
    greedy = {ANN: contribution(plan, ANN, used_blocks=2**62), BEN: contribution(plan, BEN, used_blocks=0)}
    assert commit_of(plan, greedy).ledger == Ledger(cursor=2 * BLOCKS_EACH, reserved={BEN: plan.roster[BEN].blocks})


# what is believed


def honest(plan: Plan, node: str, steps: int = ROUND.local_steps) -> Contribution:
    return contribution(
        plan,
        node,
        steps=steps,
        used_blocks=steps * ROUND.batch_blocks,
        tokens=steps * STEP_TOKENS,
        heldout_nats=50.0,
        heldout_tokens=10,
        choices=((5, 5, 5, 5), (0, 0, 0, 20)),
    )


@pytest.mark.parametrize("steps", [0, 1, ROUND.local_steps, 2 * ROUND.local_steps])
def test_an_honest_contribution_is_believed(steps: int) -> None:
    """With what was trained ahead it may hold twice the steps of a round."""
    plan = plan_for([ANN, BEN])
    assert all(is_plausible(honest(plan, node, steps), plan, examples.head(), MANIFEST) for node in plan.roster)


@pytest.mark.parametrize(
    "claim",
    [
        {"tokens": 2**63 - 1},
        {"tokens": 0},
        {"steps": 5},
        {"used_blocks": 7},
        {"used_blocks": BLOCKS_EACH + 2, "steps": BLOCKS_EACH // 2 + 1, "tokens": (BLOCKS_EACH + 2) * 32},
        {"heldout_tokens": 10**9},
        {"loss": 1e12},
        {"heldout_nats": 1e12},
        {"choices": ((5, 5, 5, 5),)},
        {"choices": ((5, 5, 10), (5, 5, 10))},
        {"choices": ((5, 5, 5, 5), (0, 0, 0, 21))},
        {"shards": {"unheard.of": Encoded(digest=digest("x"), size=100)}},
    ],
)
def test_a_contribution_that_claims_too_much_is_not_believed(claim: dict[str, object]) -> None:
    plan = plan_for([ANN, BEN])
    boasting = honest(plan, ANN).model_copy(update=claim)
    assert not is_plausible(boasting, plan, examples.head(), MANIFEST)


def test_a_contribution_to_an_expert_of_another_node_is_not_believed() -> None:
    plan = plan_for([ANN, BEN])
    (expert, *_) = plan.owners[BEN]
    stolen = {f"layer.0.expert.{expert}": Encoded(digest=digest("x"), size=100)}
    thief = honest(plan, ANN).model_copy(update={"shards": stolen})
    assert not is_plausible(thief, plan, examples.head(), MANIFEST)
