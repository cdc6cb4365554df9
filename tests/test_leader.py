"""Plans as pure functions: who writes them, who does what and how much, fair and alike for everybody."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import blocks
from swarm.documents import Ledger, Plan, ShardState, Share
from swarm.leader import SLACK, claims, leaders, pinned, reducers, standing
from swarm.manifest import Manifest
from swarm.records import NodeRecord, View
from tests import examples
from tests.examples import EXPERTS, NODES, ROUND, RUN, SHARDS

ANN, BEN, CAT, DAN, EVE, FAY = NODES
STEPS, BATCH, HELDOUT = ROUND.local_steps, ROUND.batch_blocks, ROUND.heldout_blocks


def run_with(**rounds: Any) -> Manifest:
    return examples.manifest(round=ROUND.model_copy(update=rounds))


def records(nodes: list[str], **fields: Any) -> dict[str, NodeRecord]:
    return {node: examples.record(**fields) for node in nodes}


def plan_for(nodes: list[str], **head: Any) -> Plan:
    return examples.planned(records(nodes), examples.head(**head))


def shares(*nodes: str) -> dict[str, Share]:
    return dict.fromkeys(nodes, Share(tokens=1, steps=1))


# who writes


def test_those_who_took_part_lead_before_those_who_are_new() -> None:
    order = leaders(RUN, examples.head(3, shares=shares(BEN, DAN)), NODES)
    assert set(order[:2]) == {BEN, DAN} and sorted(order) == NODES
    assert order == leaders(RUN, examples.head(3, shares=shares(DAN, BEN)), NODES[::-1])


def test_nobody_leads_for_long() -> None:
    heads = [examples.head(number, shares=shares(*NODES)) for number in range(40)]
    assert {leaders(RUN, head, NODES)[0] for head in heads} == set(NODES)


def test_a_leader_who_is_gone_keeps_its_place_in_the_order() -> None:
    assert set(leaders(RUN, examples.head(1, shares=shares(ANN, BEN)), [CAT])) == {ANN, BEN, CAT}


# who averages


def reducers_of(plan: Plan, *names: str) -> list[list[str]]:
    """The orders of shards of equal size."""
    return list(reducers(plan, dict.fromkeys(names, 4000)).values())


def test_reducers_are_the_owners() -> None:
    plan = examples.planned(records(NODES[:4]), examples.head(), run_with(owners_per_expert=2))
    for order in reducers_of(plan, "embed", "head"):
        assert sorted(order) == NODES[:4]
    for expert in range(EXPERTS):
        owners = [node for node, experts in plan.owners.items() if expert in experts]
        assert len(owners) == 2
        assert reducers_of(plan, f"layer.1.expert.{expert}") == [sorted(owners)] or reducers_of(
            plan, f"layer.1.expert.{expert}"
        ) == [sorted(owners, reverse=True)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_each_node_averages_its_part_of_the_shared_bytes(sizes: list[int], nodes: int) -> None:
    plan = plan_for(NODES[:nodes])
    orders = reducers(plan, {f"layer.{index}.shared": size for index, size in enumerate(sizes)})
    load = dict.fromkeys(NODES[:nodes], 0)
    for index, size in enumerate(sizes):
        load[orders[f"layer.{index}.shared"][0]] += size
    assert max(load.values()) <= sum(sizes) / nodes + max(sizes)


@given(st.permutations(NODES), st.dictionaries(st.sampled_from(NODES), st.integers(0, 1 << 40)))
def test_everybody_finds_the_same_reducers_in_every_round(order: list[str], uplinks: dict[str, int]) -> None:
    def reducers_in(number: int, roster: list[str]) -> list[list[str]]:
        plan = examples.plan(*roster, round=number, leader=ANN, uplinks=uplinks, parent=examples.digest(str(number)))
        return reducers_of(plan, "embed", "head")

    assert reducers_in(1, NODES) == reducers_in(1, order) == reducers_in(9, order)


def test_a_reducer_that_is_gone_leaves_most_others_as_they_were() -> None:
    names = [f"layer.{layer}.shared" for layer in range(100)]
    before = [order[0] for order in reducers_of(plan_for(NODES), *names)]
    after = [order[0] for order in reducers_of(plan_for([node for node in NODES if node != EVE]), *names)]
    moved = sum(old not in (new, EVE) for old, new in zip(before, after, strict=True))
    assert EVE not in after and moved <= 20


def test_a_weak_uplink_rarely_averages_and_an_unknown_one_as_often_as_most() -> None:
    names = [f"layer.{layer}.shared" for layer in range(600)]
    uplinks = {ANN: 1 << 24, BEN: 1 << 24, CAT: 1 << 20, DAN: 0}
    first = [order[0] for order in reducers_of(examples.plan(*NODES[:4], uplinks=uplinks), *names)]
    part = {node: first.count(node) / len(names) for node in NODES[:4]}
    assert part[CAT] < 0.05
    assert all(0.25 < part[node] < 0.42 for node in (ANN, BEN, DAN)), part


@pytest.mark.parametrize("number", [1, 5])
def test_who_does_not_hold_the_base_passes_nothing_on(number: int) -> None:
    before = examples.head(number - 1, parent=examples.digest("before") if number > 1 else "")
    held = {
        ANN: examples.digest("head"),
        BEN: examples.digest("head"),
        CAT: before.parent,
        DAN: examples.digest("old"),
        EVE: "",
    }
    everybody = {node: examples.record(commit=commit, uplink=7) for node, commit in held.items()}
    plan = examples.planned({ANN: everybody[ANN]}, before, view=View(everybody))
    assert plan.uplinks == dict.fromkeys([ANN, BEN] if number == 1 else [ANN, BEN, CAT], 7)


# the blocks


@given(
    st.sets(st.sampled_from(NODES), min_size=1),
    st.integers(0, 50),
    st.lists(st.integers(0, 20), max_size=6, unique=True),
    st.booleans(),
)
def test_a_plan_hands_out_each_block_once_and_covers_the_heldout_text(
    nodes: set[str], cursor: int, cuts: list[int], overlap: bool
) -> None:
    edges = sorted(cuts)[: len(cuts) // 2 * 2]
    ledger = Ledger(cursor=20 + cursor, returned=tuple(zip(edges[::2], edges[1::2], strict=True)))
    plan = examples.planned(records(sorted(nodes)), examples.head(ledger=ledger), run_with(overlap=overlap))
    assert plan.roster.keys() == nodes
    handed = [block for member in plan.roster.values() for block in blocks.ids(member.blocks)]
    each = STEPS * BATCH * (2 if overlap else 1)
    assert len(set(handed)) == len(handed) == each * len(nodes)
    free = {*blocks.ids(ledger.returned), *range(ledger.cursor, ledger.cursor + len(handed))}
    assert set(handed) <= free
    heldout = sorted(member.heldout for member in plan.roster.values())
    assert [block for start, stop in heldout for block in range(start, stop)] == list(range(HELDOUT))


def test_what_is_reserved_for_a_member_comes_first() -> None:
    ledger = Ledger(cursor=40, reserved={ANN: ((5, 8), (1, 2)), BEN: ((20, 30),)})
    plan = plan_for([ANN, CAT], ledger=ledger)
    assert plan.roster[ANN].blocks[:2] == ((5, 8), (1, 2))
    others = blocks.ids(plan.roster[CAT].blocks) + blocks.ids(plan.roster[ANN].blocks)[4:]
    assert set(range(20, 30)) <= set(others), "what was reserved for a node that is not there goes to others"


# the steps


def steps_of(*speeds: float) -> list[int]:
    roster = {n: examples.record(seconds_per_step=speed) for n, speed in zip(NODES, speeds, strict=False)}
    plan = examples.planned(roster, examples.head(), run_with(local_steps=30))
    return [plan.roster[node].steps for node in roster]


def test_a_node_three_times_slower_gets_a_third_of_the_steps() -> None:
    assert steps_of(1.0, 1.0, 3.0) == [30, 30, 10]
    assert steps_of(0.2, 3.0, 1.0, 1.0) == [30, 10, 30, 30], "nobody gets more than the run says"
    assert steps_of(0.0, 1.0, 0.0) == [30, 30, 30], "whose speed is not known yet is asked for all"
    assert steps_of(1.0, 1.0, 1e6) == [30, 30, 1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_members_need_about_the_same_time(speeds: list[float]) -> None:
    steps = steps_of(*speeds)
    usual = sorted(speeds)[len(speeds) // 2] * 30
    for count, speed in zip(steps, speeds, strict=True):
        assert 1 <= count <= 30
        assert count == 1 or (count - 0.5) * speed <= usual * (1 + 1e-9)


def test_a_slow_node_gets_blocks_for_its_steps() -> None:
    speeds = dict(zip(NODES[:3], (1.0, 1.0, 2.0), strict=True))
    roster = {node: examples.record(seconds_per_step=speed) for node, speed in speeds.items()}
    plan = examples.planned(roster, examples.head(), run_with(overlap=False))
    handed = [(member.steps, blocks.count(member.blocks)) for member in plan.roster.values()]
    assert sorted(handed) == [(2, 4), (4, 8), (4, 8)]


# the time


def test_deadlines_follow_the_measured_speed_within_the_manifests_bounds() -> None:
    def train_seconds(*speeds: float) -> float:
        roster = {node: examples.record(seconds_per_step=s) for node, s in zip(NODES, speeds, strict=False)}
        return examples.planned(roster, examples.head()).train_seconds

    assert train_seconds(0.0, 0.0) == 30.0
    assert train_seconds(1.0, 0.0) == SLACK * 4 + 5.0
    assert train_seconds(0.5, 1.0, 60.0) == SLACK * 4 + 5.0
    assert train_seconds(100.0) == 30.0


@pytest.mark.parametrize(
    ("measured", "allowed"),
    [
        ((), 30.0),
        ((0.0,), 5.0),
        ((0.1,), 5.15),
        ((4.0,), 11.0),
        ((100.0,), 30.0),
        ((4.0, 0.2, 4.0, 90.0, 4.0), 11.0),
    ],
)
def test_time_for_averaging_follows_the_last_rounds(measured: tuple[float, ...], allowed: float) -> None:
    assert plan_for([ANN], reduce_seconds=measured).reduce_seconds == pytest.approx(allowed)


# the owners


def holding(seen: Mapping[str, NodeRecord], leases: Mapping[str, tuple[int, ...]]) -> View:
    """The same nodes with leases."""
    return View({node: record.model_copy(update={"experts": leases.get(node, ())}) for node, record in seen.items()})


def test_a_plan_does_not_depend_on_the_order_in_which_nodes_are_seen() -> None:
    seen = records(NODES)
    view = holding(seen, {BEN: (0,), CAT: (0, 1)})
    turned = {ANN: seen[ANN], **dict(reversed(seen.items()))}
    other = holding(turned, {CAT: (1, 0), BEN: (0,)})
    assert examples.planned(seen, examples.head(), view=view) == examples.planned(turned, examples.head(), view=other)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_expert_has_as_many_owners_as_the_run_says(copies: int) -> None:
    plan = examples.planned(records(NODES[:3]), examples.head(), run_with(owners_per_expert=copies))
    owned = sorted(expert for experts in plan.owners.values() for expert in experts)
    assert owned == sorted(list(range(EXPERTS)) * copies)
    assert plan.owners.keys() == plan.roster.keys()


def test_the_owner_of_the_last_round_keeps_a_contested_lease() -> None:
    before = examples.head(2, owners={CAT: (0,)})
    order = standing(before, {0: [ANN, BEN, CAT]}, RUN)[0]
    assert order[0] == CAT and sorted(order) == [ANN, BEN, CAT]


def test_a_claim_is_what_the_next_plan_confirms() -> None:
    seen, before = records(NODES[:3]), examples.head(2, owners={CAT: (0, 1)})
    view = holding(seen, {CAT: (0, 1), ANN: (2,)})
    claimed = claims(examples.manifest(), RUN, before, dict.fromkeys(seen, EXPERTS), view.holders())
    assert claimed == examples.planned(seen, before, view=view).owners


def carrying(*names: str, owners: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Fields of a second round's commit in which these shards kept their version."""
    shards = {
        name: ShardState(version=1 if name in names else 2, digest=examples.digest(name), size=400) for name in SHARDS
    }
    return {"shards": shards, "owners": owners}


def test_experts_with_a_carried_shard_are_pinned_where_somebody_has_trained_them() -> None:
    owners = {ANN: (0, 1), BEN: (2,)}
    names = ("embed", "layer.0.expert.1", "layer.1.expert.3")
    before = examples.head(2, **carrying(*names, owners=owners))
    assert pinned(before) == {1}
    assert pinned(examples.head(2, owners=owners)) == frozenset()


def test_a_pinned_expert_stays_with_the_owner_that_holds_its_delta() -> None:
    """Its delta is in that node's weights only; other experts move to the newcomers, this one does not."""
    owners = {ANN: (0, 1, 2, 3)}
    seen = records(NODES[:4])
    view = holding(seen, {ANN: owners[ANN]})
    for expert in range(EXPERTS):
        before = examples.head(2, **carrying(f"layer.1.expert.{expert}", owners=owners))
        plan = examples.planned(seen, before, view=view)
        assert expert in plan.owners[ANN] and len(plan.owners[ANN]) < EXPERTS
