"""Plans and commits as pure functions: fair, complete, and the same arithmetic for everybody."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.settings import LossSettings, ModelSettings, OptimizerSettings
from swarm import blocks
from swarm.documents import Commit, Contribution, Ledger, Plan, Reduction, Result, ShardState, Share
from swarm.leader import SLACK, is_plausible, leaders, make_commit, make_plan, reducers, resolve, standing
from swarm.manifest import DataSettings, Manifest, RoundSettings
from swarm.membership import NodeRecord

RUN = "ab" * 32
HEAD = "cd" * 32
NODES = ["Qm" + letter * 44 for letter in "ABCDEF"]
ANN, BEN, CAT, DAN, EVE, FAY = NODES
EXPERTS = 4
SHARDS = ["embed", *(f"layer.{layer}.expert.{e}" for layer in range(2) for e in range(EXPERTS)), "head"]


def digest(text: str) -> str:
    return text.encode().hex()[:64].ljust(64, "0")


MANIFEST = Manifest(
    name="run",
    author=ANN,
    seed=1,
    model=ModelSettings(
        vocab_size=259,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        expert_size=16,
        num_experts=EXPERTS,
        experts_per_token=2,
        max_length=32,
    ),
    loss=LossSettings(),
    optimizer=OptimizerSettings(learning_rate=1e-3),
    data=DataSettings(block_tokens=32),
    round=RoundSettings(total=3, local_steps=4, batch_blocks=2, train_seconds=30.0, margin_seconds=5.0),
)
BLOCKS_EACH = 8


def record(capacity: int = EXPERTS, seconds_per_step: float = 0.0) -> NodeRecord:
    return NodeRecord(
        run=RUN,
        version="1",
        name="node",
        role="trainer",
        state="waiting",
        reason="",
        addresses=(),
        round=0,
        commit=HEAD,
        digest=HEAD,
        tokens=0,
        capacity=capacity,
        device="cpu",
        seconds_per_step=seconds_per_step,
        trained_tokens=0,
        sent=0,
        received=0,
    )


def head(
    number: int = 0,
    *,
    owners: dict[str, tuple[int, ...]] | None = None,
    shares: tuple[str, ...] = (),
    ledger: Ledger | None = None,
    reduce_seconds: float = 0.0,
) -> Commit:
    return Commit(
        run=RUN,
        round=number,
        parent="",
        leader=ANN,
        shards={name: ShardState(version=number, digest=digest(f"old {name}"), size=400) for name in SHARDS},
        holders={},
        owners=owners or {},
        shares={node: Share(tokens=1, steps=1) for node in shares},
        missing=(),
        tokens=1000,
        ledger=ledger or Ledger(),
        loss=7.0,
        heldout_loss=None,
        train_seconds=0.0,
        reduce_seconds=reduce_seconds,
    )


def plan_for(nodes: list[str], before: Commit | None = None) -> Plan:
    before = before or head()
    return make_plan(MANIFEST, RUN, nodes[0], before, HEAD, {node: record() for node in nodes}, {})


def contribution(
    plan: Plan, node: str, *, tokens: int = 100, used: int = BLOCKS_EACH, loss: float = 5.0, nats: float = 0.0
) -> Contribution:
    return Contribution(
        run=RUN,
        round=plan.round,
        plan=HEAD,
        node=node,
        tokens=tokens,
        steps=4,
        used_blocks=used,
        loss=loss,
        heldout_nats=nats,
        heldout_tokens=10 if nats else 0,
        train_seconds=tokens / 100,
        shards={},
    )


def commit_of(plan: Plan, contributions: dict[str, Contribution], before: Commit | None = None) -> Commit:
    """The commit when every shard is averaged over those of its owners that contributed."""
    results = {}
    for name in SHARDS:
        contributors = tuple(node for node in sorted(reducers(plan, name)) if node in contributions)
        if contributors:
            results[name] = (contributors[0], Result(digest=digest(f"new {name}"), contributors=contributors))
    return make_commit(plan, HEAD, plan.leader, before or head(), results, contributions, 1.5)


# who writes


def test_those_who_took_part_lead_before_those_who_are_new() -> None:
    order = leaders(RUN, head(3, shares=(BEN, DAN)), NODES)
    assert set(order[:2]) == {BEN, DAN} and sorted(order) == NODES
    assert order == leaders(RUN, head(3, shares=(DAN, BEN)), NODES[::-1])


def test_nobody_leads_for_long() -> None:
    assert {leaders(RUN, head(number, shares=tuple(NODES)), NODES)[0] for number in range(40)} == set(NODES)


def test_a_leader_who_is_gone_keeps_its_place_in_the_order() -> None:
    assert set(leaders(RUN, head(1, shares=(ANN, BEN)), [CAT])) == {ANN, BEN, CAT}


def test_reducers_are_the_owners() -> None:
    plan = plan_for(NODES[:4])
    for name in ("embed", "head"):
        assert sorted(reducers(plan, name)) == NODES[:4]
    for expert in range(EXPERTS):
        owners = [node for node, experts in plan.owners.items() if expert in experts]
        assert reducers(plan, f"layer.1.expert.{expert}") == owners


def test_work_of_reducing_is_spread() -> None:
    plan = plan_for(NODES[:3])
    assert {reducers(plan, f"layer.{layer}.shared")[0] for layer in range(40)} == set(NODES[:3])


# the plan


@given(
    st.sets(st.sampled_from(NODES), min_size=1),
    st.integers(0, 50),
    st.lists(st.integers(0, 20), max_size=6, unique=True),
)
def test_a_plan_hands_out_each_block_once_and_covers_the_heldout_text(
    nodes: set[str], cursor: int, cuts: list[int]
) -> None:
    edges = sorted(cuts)[: len(cuts) // 2 * 2]
    ledger = Ledger(cursor=20 + cursor, returned=tuple(zip(edges[::2], edges[1::2], strict=True)))
    plan = plan_for(sorted(nodes), head(ledger=ledger))
    assert plan.roster.keys() == nodes
    handed = [block for member in plan.roster.values() for block in blocks.ids(member.blocks)]
    assert len(set(handed)) == len(handed) == BLOCKS_EACH * len(nodes)
    free = {*blocks.ids(ledger.returned), *range(ledger.cursor, ledger.cursor + len(handed))}
    assert set(handed) <= free
    heldout = sorted(member.heldout for member in plan.roster.values())
    assert [block for start, stop in heldout for block in range(start, stop)] == list(range(64))


def test_a_plan_does_not_depend_on_the_order_in_which_nodes_are_seen() -> None:
    records = {node: record() for node in NODES}
    holders = {0: [BEN, CAT], 1: [CAT]}
    turned = dict(reversed(records.items()))
    first = make_plan(MANIFEST, RUN, ANN, head(), HEAD, records, holders)
    second = make_plan(MANIFEST, RUN, ANN, head(), HEAD, turned, {1: [CAT], 0: [CAT, BEN]})
    assert first == second


def test_every_expert_has_one_owner_in_the_plan() -> None:
    plan = plan_for(NODES[:3])
    assert sorted(expert for experts in plan.owners.values() for expert in experts) == list(range(EXPERTS))
    assert plan.owners.keys() == plan.roster.keys()


def test_the_owner_of_the_last_round_keeps_a_contested_lease() -> None:
    before = head(2, owners={CAT: (0,)})
    assert standing(before, {0: [ANN, BEN, CAT]}, RUN)[0][0] == CAT
    assert sorted(standing(before, {0: [ANN, BEN, CAT]}, RUN)[0]) == [ANN, BEN, CAT]


def test_deadlines_follow_the_measured_speed_within_the_manifests_bounds() -> None:
    def train_seconds(*speeds: float) -> float:
        roster = {node: record(seconds_per_step=speed) for node, speed in zip(NODES, speeds, strict=False)}
        return make_plan(MANIFEST, RUN, ANN, head(), HEAD, roster, {}).train_seconds

    assert train_seconds(0.0, 0.0) == 30.0
    assert train_seconds(1.0, 0.0) == SLACK * 4 + 5.0
    assert train_seconds(0.5, 1.0, 60.0) == SLACK * 4 + 5.0
    assert train_seconds(100.0) == 30.0


@pytest.mark.parametrize(("measured", "allowed"), [(0.0, 30.0), (0.1, 5.0), (4.0, 12.0), (100.0, 30.0)])
def test_time_for_reducing_follows_the_last_round(measured: float, allowed: float) -> None:
    assert plan_for([ANN], head(reduce_seconds=measured)).reduce_seconds == allowed


# the commit


def test_results_are_taken_from_the_first_reducer_whose_bytes_are_here() -> None:
    plan, before = plan_for(NODES[:3]), head()
    first, second, third = reducers(plan, "embed")

    def reduction(node: str) -> Reduction:
        result = Result(digest=digest(f"by {node}"), contributors=(node,))
        return Reduction(run=RUN, round=1, plan=HEAD, node=node, results={"embed": result, "unknown": result})

    everybody = {node: reduction(node) for node in NODES}
    assert resolve(plan, before, everybody, lambda _: True)["embed"][0] == first
    assert resolve(plan, before, everybody, lambda d: d != digest(f"by {first}"))["embed"][0] == second
    assert resolve(plan, before, {third: everybody[third]}, lambda _: True).keys() == {"embed"}
    assert resolve(plan, before, {FAY: everybody[FAY]}, lambda _: True) == {}, "it owns nothing"
    assert resolve(plan, before, everybody, lambda _: False) == {}


def test_a_shard_without_a_result_keeps_its_version() -> None:
    plan, before = plan_for([ANN]), head()
    result = Result(digest=digest("new embed"), contributors=(ANN,))
    commit = make_commit(plan, HEAD, ANN, before, {"embed": (ANN, result)}, {ANN: contribution(plan, ANN)}, 1.5)
    assert commit.shards["embed"] == ShardState(version=1, digest=digest("new embed"), size=400)
    assert all(commit.shards[name] == before.shards[name] for name in SHARDS if name != "embed")
    assert commit.holders == {"embed": ANN}
    assert (commit.round, commit.parent, commit.reduce_seconds) == (1, HEAD, 1.5)


def test_tokens_add_up_and_losses_are_weighted_by_them() -> None:
    plan = plan_for([ANN, BEN, CAT])
    commit = commit_of(
        plan,
        {
            ANN: contribution(plan, ANN, tokens=300, loss=2.0, nats=30.0),
            BEN: contribution(plan, BEN, tokens=100, loss=4.0, nats=50.0),
        },
    )
    assert commit.tokens == 1400
    assert commit.loss == 2.5
    assert commit.heldout_loss == 4.0
    assert commit.shares == {ANN: Share(tokens=300, steps=4), BEN: Share(tokens=100, steps=4)}
    assert commit.missing == (CAT,)
    assert commit.train_seconds == 3.0


def test_a_contribution_that_no_result_contains_does_not_count() -> None:
    plan = plan_for([ANN, BEN])
    result = Result(digest=digest("new"), contributors=(ANN,))
    offered = {node: contribution(plan, node) for node in (ANN, BEN)}
    commit = make_commit(plan, HEAD, ANN, head(), {"embed": (ANN, result)}, offered, 0.0)
    assert commit.shares.keys() == {ANN} and commit.missing == (BEN,) and commit.tokens == 1100
    assert commit.ledger.returned == plan.roster[BEN].blocks


def test_a_round_in_which_everybody_failed_changes_nothing_but_its_number() -> None:
    plan, before = plan_for([ANN, BEN]), head()
    commit = make_commit(plan, HEAD, ANN, before, {}, {}, 0.0)
    assert commit.shards == before.shards and commit.state == before.state
    assert (commit.tokens, commit.loss, commit.heldout_loss) == (1000, 7.0, None)
    assert commit.missing == (ANN, BEN) and commit.shares == {}
    assert commit.ledger == Ledger(cursor=16, returned=((0, 16),))


@given(
    st.lists(st.dictionaries(st.sampled_from(NODES), st.none() | st.integers(0, BLOCKS_EACH), min_size=1), max_size=8)
)
def test_no_block_is_lost_or_used_twice_over_many_rounds(history: list[dict[str, int | None]]) -> None:
    """Every round has another roster; a member uses some of its blocks, or fails (None)."""
    before, used = head(), list[int]()
    for members in history:
        plan = plan_for(sorted(members), before)
        offered = {n: contribution(plan, n, used=count) for n, count in members.items() if count is not None}
        for node, offer in offered.items():
            used += blocks.ids(plan.roster[node].blocks)[: offer.used_blocks]
        before = commit_of(plan, offered, before)
        assert sorted(used + blocks.ids(before.ledger.returned)) == list(range(before.ledger.cursor))


def test_a_node_that_claims_more_blocks_than_it_got_uses_only_its_own() -> None:
    plan = plan_for([ANN, BEN])
    greedy = {ANN: contribution(plan, ANN, used=2**62), BEN: contribution(plan, BEN, used=0)}
    assert commit_of(plan, greedy).ledger.returned == plan.roster[BEN].blocks


def test_a_commit_is_finite_whatever_the_tokens() -> None:
    plan = plan_for([ANN])
    commit = commit_of(plan, {ANN: contribution(plan, ANN, tokens=0)})
    assert math.isfinite(commit.loss)


# what is believed


def honest(plan: Plan, node: str) -> Contribution:
    return contribution(plan, node, tokens=BLOCKS_EACH * MANIFEST.data.block_tokens, nats=50.0)


def test_an_honest_contribution_is_believed() -> None:
    plan = plan_for([ANN, BEN])
    assert all(is_plausible(honest(plan, node), plan, head(), MANIFEST.data.block_tokens) for node in plan.roster)


@pytest.mark.parametrize(
    "claim",
    [
        {"tokens": 2**63 - 1},
        {"tokens": 0},
        {"steps": 5},
        {"used_blocks": BLOCKS_EACH + 1, "tokens": (BLOCKS_EACH + 1) * 32},
        {"heldout_tokens": 10**9},
        {"loss": 1e12},
        {"heldout_nats": 1e12},
        {"shards": {"unheard.of": digest("x")}},
    ],
)
def test_a_contribution_that_claims_too_much_is_not_believed(claim: dict[str, object]) -> None:
    plan = plan_for([ANN, BEN])
    boasting = honest(plan, ANN).model_copy(update=claim)
    assert not is_plausible(boasting, plan, head(), MANIFEST.data.block_tokens)


def test_a_contribution_to_an_expert_of_another_node_is_not_believed() -> None:
    plan = plan_for([ANN, BEN])
    (expert, *_) = plan.owners[BEN]
    thief = honest(plan, ANN).model_copy(update={"shards": {f"layer.0.expert.{expert}": digest("x")}})
    assert not is_plausible(thief, plan, head(), MANIFEST.data.block_tokens)
