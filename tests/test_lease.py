"""Who owns which expert: everything is owned that can be, loads are fair, and hardly anything ever moves."""

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from swarm.lease import fair_shares, settle

RUN = "run"
NODES = "abcdefgh"

Owners = Mapping[int, tuple[str, ...]]

experts = st.integers(1, 24)
copies = st.integers(1, 4)
capacities = st.dictionaries(st.sampled_from(NODES), st.integers(0, 30), max_size=len(NODES))
ample = st.sets(st.sampled_from(NODES), min_size=1).map(lambda nodes: dict.fromkeys(nodes, 24))
leases = st.dictionaries(st.integers(0, 30), st.lists(st.sampled_from(NODES), max_size=5))
"""Standing leases, also of nodes that are gone, on experts that are not there, twice, and more than fit."""
pins = st.frozensets(st.integers(0, 30))
changes = st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 30)), max_size=8)
"""Nodes that come, return with another capacity, or go (capacity 0), one after another."""


def pairs(owners: Owners) -> set[tuple[int, str]]:
    return {(expert, node) for expert, nodes in owners.items() for node in nodes}


def load(owners: Owners, node: str) -> int:
    return sum(node in nodes for nodes in owners.values())


def room(num_experts: int, capacity: Mapping[str, int]) -> int:
    return sum(min(most, num_experts) for most in capacity.values())


def starved(owners: Owners, num_experts: int, capacity: Mapping[str, int], copies: int) -> set[str]:
    """Nodes with less than half of their fair share."""
    fair = fair_shares(num_experts, capacity, copies)
    return {node for node in capacity if 2 * load(owners, node) < fair[node]}


# what there is at the end


@given(experts, capacities, leases, copies)
def test_every_expert_has_an_owner_when_capacity_allows(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int
) -> None:
    owners = settle(RUN, num_experts, capacity, standing, copies)
    assert len(owners) == min(num_experts, room(num_experts, capacity))
    assert owners.keys() <= set(range(num_experts))


@given(experts, capacities, leases, copies, pins)
def test_no_node_holds_more_than_it_can_and_no_expert_has_more_owners_than_it_should(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int, pinned: frozenset[int]
) -> None:
    owners = settle(RUN, num_experts, capacity, standing, copies, pinned)
    assert all(load(owners, node) <= capacity[node] for node in capacity)
    assert all(nodes and len(set(nodes)) == len(nodes) and set(nodes) <= capacity.keys() for nodes in owners.values())
    assert all(len(nodes) <= copies for expert, nodes in owners.items() if expert not in pinned)


@given(experts, capacities, copies)
def test_a_new_swarm_uses_all_capacity_that_its_copies_need(
    num_experts: int, capacity: dict[str, int], copies: int
) -> None:
    owners = settle(RUN, num_experts, capacity, {}, copies)
    assert len(pairs(owners)) == min(num_experts * copies, room(num_experts, capacity))
    counts = [len(owners.get(expert, ())) for expert in range(num_experts)]
    assert max(counts) - min(counts) <= 1, "an expert got an owner before another had as many"


@given(experts, capacities, copies)
def test_loads_of_a_new_swarm_are_bounded_by_the_fair_shares(
    num_experts: int, capacity: dict[str, int], copies: int
) -> None:
    owners = settle(RUN, num_experts, capacity, {}, copies)
    for node, share in fair_shares(num_experts, capacity, copies).items():
        assert load(owners, node) <= math.ceil(share)
        if copies == 1:
            assert load(owners, node) >= math.floor(share)


@given(experts, capacities, copies)
def test_fair_shares_fit_and_sum_up(num_experts: int, capacity: dict[str, int], copies: int) -> None:
    fair = fair_shares(num_experts, capacity, copies)
    assert math.isclose(sum(fair.values()), min(num_experts * copies, room(num_experts, capacity)))
    assert all(0 <= share <= min(capacity[node], num_experts) for node, share in fair.items())


@given(experts, capacities, leases)
def test_nobody_is_left_with_less_than_half_its_share_while_another_can_give(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]]
) -> None:
    owners = settle(RUN, num_experts, capacity, standing)
    fair = fair_shares(num_experts, capacity)
    if starved(owners, num_experts, capacity, 1):
        for node in capacity:
            had = load(owners, node)
            assert had <= fair[node] or 2 * (had - 1) < fair[node]


# what moves


@given(experts, capacities, leases, copies, pins)
def test_settling_what_is_settled_changes_nothing(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int, pinned: frozenset[int]
) -> None:
    owners = settle(RUN, num_experts, capacity, standing, copies, pinned)
    assert settle(RUN, num_experts, capacity, owners, copies, pinned) == owners


@given(experts, copies, st.sets(st.sampled_from(NODES), min_size=2).map(sorted), st.data())
def test_a_leaver_moves_only_its_own_experts(
    num_experts: int, copies: int, nodes: list[str], data: st.DataObject
) -> None:
    capacity = {node: data.draw(st.integers(num_experts, 30)) for node in nodes}
    owners = settle(RUN, num_experts, capacity, {}, copies)
    for leaver in data.draw(st.permutations(nodes))[1:]:
        del capacity[leaver]
        after = settle(RUN, num_experts, capacity, owners, copies)
        assert {(expert, node) for expert, node in pairs(owners) if node != leaver} <= pairs(after)
        owners = after


@given(experts, copies, ample, st.integers(1, 30))
def test_a_joiner_takes_no_more_than_its_share_and_nobody_else_gains(
    num_experts: int, copies: int, capacity: dict[str, int], most: int
) -> None:
    before = settle(RUN, num_experts, capacity, {}, copies)
    capacity = {**capacity, "joiner": most}
    after = settle(RUN, num_experts, capacity, before, copies)
    assert {node for _, node in pairs(after) - pairs(before)} <= {"joiner"}
    share = fair_shares(num_experts, capacity, copies)["joiner"]
    assert len(pairs(before) - pairs(after)) <= max(1, math.floor(share))


@given(experts, copies, changes)
def test_leases_end_only_for_coverage_or_for_a_starved_node(
    num_experts: int, copies: int, changes: list[tuple[str, int]]
) -> None:
    capacity, owners = dict[str, int](), dict[int, tuple[str, ...]]()
    for node, most in changes:
        capacity[node] = most
        after = settle(RUN, num_experts, capacity, owners, copies)
        stay = {
            expert: tuple(holder for holder in nodes if holder != node or load(owners, node) <= most)
            for expert, nodes in owners.items()
        }
        lost = pairs(stay) - pairs(after)
        fair = fair_shares(num_experts, capacity, copies)
        wanting = starved(stay, num_experts, capacity, copies)
        orphans = num_experts - sum(map(bool, stay.values()))
        assert len(lost) <= orphans + sum(max(1, math.floor(fair[one])) for one in wanting)
        owners = after


@given(experts, capacities, leases, copies)
def test_an_expert_loses_its_last_owner_only_to_a_successor(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int
) -> None:
    owners = settle(RUN, num_experts, capacity, standing, copies)
    for expert in range(num_experts):
        if any(capacity.get(node, 0) for node in standing.get(expert, ())):
            assert owners.get(expert) or all(
                load(owners, node) == min(capacity[node], num_experts) for node in capacity
            )


def test_a_full_node_keeps_the_expert_that_nobody_else_holds() -> None:
    capacity = {"a": 1, "b": 1, "c": 8}
    assert settle(RUN, 3, capacity, {0: ["a", "b"], 1: ["a"], 2: ["c"]}) == {0: ("b",), 1: ("a",), 2: ("c",)}


def test_a_second_lease_ends_where_an_expert_has_no_owner() -> None:
    owners = settle(RUN, 3, {"a": 2, "b": 2}, {0: ["a", "b"], 1: ["b", "a"]}, copies=2)
    assert sorted(map(len, owners.values())) == [1, 1, 2]


def test_a_node_that_gives_to_a_starved_one_takes_what_still_lacks_an_owner() -> None:
    capacity = {"a": 2, "b": 3, "c": 2}
    owners = settle(RUN, 3, capacity, {0: ["c", "a"], 2: ["c", "a"]}, copies=2)
    assert set(map(len, owners.values())) == {2}
    assert len(owners) == 3


def test_a_small_imbalance_moves_nothing() -> None:
    capacity = {"a": 8, "b": 8}
    standing = {expert: ["a" if expert < 6 else "b"] for expert in range(8)}
    assert settle(RUN, 8, capacity, standing) == {expert: tuple(nodes) for expert, nodes in standing.items()}


def test_a_fifth_node_joining_four_with_two_experts_each_gets_one() -> None:
    capacity = dict.fromkeys("abcd", 8)
    owners = settle(RUN, 8, capacity, {})
    assert {load(owners, node) for node in capacity} == {2}
    after = settle(RUN, 8, {**capacity, "e": 8}, owners)
    assert [node for _, node in pairs(after) - pairs(owners)] == ["e"]


def test_a_larger_node_gets_more() -> None:
    owners = settle(RUN, 16, {"a": 4, "b": 12}, {})
    assert (load(owners, "a"), load(owners, "b")) == (4, 12)
    owners = settle(RUN, 16, {"a": 8, "b": 16}, {}, copies=1)
    assert load(owners, "a") in (5, 6)


# pinned experts


@given(experts, capacities, leases, copies, pins)
def test_a_pinned_expert_stays_with_all_its_owners(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int, pinned: frozenset[int]
) -> None:
    owners = settle(RUN, num_experts, capacity, standing, copies, pinned)
    for expert in pinned & set(range(num_experts)):
        for node in set(standing.get(expert, ())) & capacity.keys():
            held = {other for other, nodes in owners.items() if node in nodes}
            assert expert in held or (held <= pinned and len(held) == min(capacity[node], num_experts))


@given(experts, ample, leases, copies, pins)
def test_pins_leave_no_expert_without_owner_where_nodes_have_room_for_all(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int, pinned: frozenset[int]
) -> None:
    assert len(settle(RUN, num_experts, capacity, standing, copies, pinned)) == num_experts


def test_a_pinned_expert_does_not_move_to_a_joiner() -> None:
    standing = {expert: ["a"] for expert in range(4)}
    capacity = {"a": 4, "b": 4}
    owners = settle(RUN, 4, capacity, standing, pinned=frozenset({0, 1, 2}))
    assert owners == {0: ("a",), 1: ("a",), 2: ("a",), 3: ("b",)}


# several nodes at once


@given(experts, capacities, leases, copies, pins)
def test_every_node_computes_the_same_owners(
    num_experts: int, capacity: dict[str, int], standing: dict[int, list[str]], copies: int, pinned: frozenset[int]
) -> None:
    turned = dict(reversed(capacity.items()))
    again = settle(RUN, num_experts, turned, dict(reversed(standing.items())), copies, frozenset(sorted(pinned)[::-1]))
    assert again == settle(RUN, num_experts, capacity, standing, copies, pinned)


@given(experts, capacities, copies, st.integers(1, 30), st.integers(1, 30))
def test_two_claimers_that_do_not_see_each_other_leave_no_expert_without_owner(
    num_experts: int, capacity: dict[str, int], copies: int, first: int, second: int
) -> None:
    before = settle(RUN, num_experts, capacity, {}, copies)
    claims = [
        settle(RUN, num_experts, {**capacity, node: most}, before, copies)
        for node, most in (("first", first), ("second", second))
    ]
    standing = {
        expert: [
            *before.get(expert, ()),
            *(node for node, seen in zip(("first", "second"), claims, strict=True) if node in seen.get(expert, ())),
        ]
        for expert in range(num_experts)
    }
    capacity = {**capacity, "first": first, "second": second}
    owners = settle(RUN, num_experts, capacity, standing, copies)
    assert len(owners) == min(num_experts, room(num_experts, capacity))
    assert settle(RUN, num_experts, capacity, owners, copies) == owners


def test_the_best_standing_owner_comes_first() -> None:
    capacity = {"a": 2, "b": 2}
    assert settle(RUN, 2, capacity, {0: ["b", "a"], 1: ["a", "b"]}) == {0: ("b",), 1: ("a",)}
    assert settle(RUN, 2, capacity, {0: ["b", "a"], 1: ["a"]}, copies=2) == {0: ("b", "a"), 1: ("a", "b")}


def test_the_runs_name_decides_between_equals() -> None:
    owners = {tuple(settle(run, 8, dict.fromkeys("abcd", 8), {}).items()) for run in ("one", "two", "three")}
    assert len(owners) == 3


def test_nobody_is_there() -> None:
    assert settle(RUN, 4, {}, {0: ["a"]}, copies=2, pinned=frozenset({0})) == {}
    assert settle(RUN, 4, {"a": 0}, {0: ["a"]}, copies=2, pinned=frozenset({0})) == {}
