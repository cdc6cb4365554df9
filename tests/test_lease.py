"""Who owns which expert: everything is owned that can be, loads are fair, and hardly anything ever moves."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from swarm.lease import fair_limit, settle

RUN = "run"
NODES = "abcdefgh"

experts = st.integers(1, 24)
capacities = st.dictionaries(st.sampled_from(NODES), st.integers(0, 24), max_size=len(NODES))
ample = st.sets(st.sampled_from(NODES), min_size=1).map(lambda nodes: dict.fromkeys(nodes, 24))
leases = st.dictionaries(st.integers(0, 23), st.lists(st.sampled_from(NODES), unique=True, max_size=3))


def loads(owner: Mapping[int, str], capacity: Mapping[str, int]) -> dict[str, int]:
    return {node: list(owner.values()).count(node) for node in capacity}


def held(owner: Mapping[int, str]) -> dict[int, list[str]]:
    return {expert: [node] for expert, node in owner.items()}


@given(experts, capacities, leases)
def test_every_expert_is_owned_when_capacity_allows_and_nobody_is_overloaded(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    owner = settle(RUN, num_experts, capacity, standing)
    assert len(owner) == min(num_experts, sum(capacity.values()))
    assert owner.keys() <= set(range(num_experts))
    assert all(load <= capacity[node] for node, load in loads(owner, capacity).items())


@given(experts, capacities, leases)
def test_nobody_with_room_stays_below_its_share(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    load = loads(settle(RUN, num_experts, capacity, standing), capacity)
    if sum(capacity.values()) >= num_experts:
        share = num_experts // len(capacity)
        assert all(load[node] >= min(share, capacity[node]) for node in capacity)


@given(experts, capacities)
def test_nobody_starts_above_the_fair_limit(num_experts: int, capacity: dict[str, int]) -> None:
    limit = fair_limit(num_experts, capacity)
    assert all(load <= limit for load in loads(settle(RUN, num_experts, capacity, {}), capacity).values())


@given(experts, ample)
def test_loads_of_new_roomy_nodes_differ_by_at_most_one(num_experts: int, capacity: dict[str, int]) -> None:
    load = loads(settle(RUN, num_experts, capacity, {}), capacity).values()
    assert max(load) - min(load) <= 1


@given(experts, ample, leases)
def test_loads_of_roomy_nodes_differ_by_at_most_the_remainder_whatever_they_held(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    load = loads(settle(RUN, num_experts, capacity, standing), capacity).values()
    assert max(load) - min(load) <= max(1, num_experts % len(capacity))


@given(experts, capacities, leases)
def test_nothing_moves_when_nothing_changes(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    owner = settle(RUN, num_experts, capacity, standing)
    assert settle(RUN, num_experts, capacity, held(owner)) == owner


@given(experts, ample, st.data())
def test_a_leaver_moves_only_its_own_experts(num_experts: int, capacity: dict[str, int], data: st.DataObject) -> None:
    owner = settle(RUN, num_experts, capacity, {})
    for leaver in data.draw(st.permutations(sorted(capacity)))[1:]:
        del capacity[leaver]
        after = settle(RUN, num_experts, capacity, held(owner))
        assert all(after[expert] == node for expert, node in owner.items() if node != leaver)
        owner = after


@given(experts, capacities, capacities)
def test_no_more_leases_move_than_the_shares_require(
    num_experts: int, before: dict[str, int], change: dict[str, int]
) -> None:
    owner = settle(RUN, num_experts, before, {})
    capacity = {**before, **{node: most for node, most in change.items() if node not in before}}
    kept = {expert: node for expert, node in owner.items() if node in capacity}
    after = settle(RUN, num_experts, capacity, held(kept))
    moved = sum(after[expert] != node for expert, node in kept.items())
    share = num_experts // len(capacity) if capacity else 0
    lacking = sum(max(0, min(share, capacity[node]) - load) for node, load in loads(kept, capacity).items())
    assert moved <= max(0, lacking - (num_experts - len(kept)))


def test_a_fifth_node_joining_four_with_two_experts_each_gets_one() -> None:
    capacity = dict.fromkeys("abcd", 8)
    owner = settle(RUN, 8, capacity, {})
    assert set(loads(owner, capacity).values()) == {2}
    after = settle(RUN, 8, {**capacity, "e": 8}, held(owner))
    assert [node for expert, node in after.items() if node != owner[expert]] == ["e"]


@given(experts, capacities, leases)
def test_every_node_computes_the_same_owners(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    turned = settle(RUN, num_experts, dict(reversed(capacity.items())), dict(reversed(standing.items())))
    assert turned == settle(RUN, num_experts, capacity, standing)


def test_the_preferred_holder_keeps_a_contested_lease() -> None:
    assert settle(RUN, 2, {"a": 2, "b": 2}, {0: ["b", "a"], 1: ["a", "b"]}) == {0: "b", 1: "a"}


def test_the_runs_name_decides_between_equals() -> None:
    owners = {tuple(settle(run, 8, dict.fromkeys("abcd", 8), {}).items()) for run in ("one", "two", "three")}
    assert len(owners) == 3
