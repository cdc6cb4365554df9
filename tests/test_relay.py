"""Who fetches from whom: everybody is reached, the maker hands out once, and weak uplinks carry little."""

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.relay import parent, relay_orders, sources_for

swarms = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=6), st.floats(0, 1e9) | st.just(0.0), min_size=2, max_size=80
)


def depth(order: list[str], node: str) -> int:
    return 0 if node == order[0] else 1 + depth(order, parent(order, node))


def one_order(root: str, nodes: Mapping[str, float]) -> list[str]:
    """The way of a single object."""
    return relay_orders({"object": [root]}, {"object": 1}, nodes)["object"]


@given(swarms, st.data())
def test_every_node_is_reached_soon_and_the_maker_hands_out_once(nodes: dict[str, float], data: st.DataObject) -> None:
    order = one_order(data.draw(st.sampled_from(sorted(nodes))), nodes)
    children = Counter(parent(order, node) for node in order[1:])
    assert children[order[0]] == 1 and max(children.values()) <= 2
    assert max(depth(order, node) for node in order) <= 1 + math.floor(math.log2(len(order) - 1))


@given(swarms, st.data())
def test_everybody_else_is_a_source_and_those_below_come_last(nodes: dict[str, float], data: st.DataObject) -> None:
    order = one_order(data.draw(st.sampled_from(sorted(nodes))), nodes)
    me = data.draw(st.sampled_from(order[1:]))
    sources, reserve = sources_for(order, me)
    assert sources == [parent(order, me)]
    assert sorted([*sources, *reserve]) == sorted(set(order) - {me})
    above = [*sources, *reserve][: depth(order, me)]
    assert above[-1] == order[0] and all(parent(order, a) == b for a, b in zip([me, *above], above, strict=False))

    def is_below(node: str) -> bool:
        return node != order[0] and (parent(order, node) == me or is_below(parent(order, node)))

    flags = [is_below(node) for node in reserve]
    assert flags == sorted(flags)


def test_the_maker_has_no_source() -> None:
    for ask in (parent, sources_for):
        with pytest.raises(ValueError, match="a made the object itself"):
            ask(["a", "b"], "a")
        with pytest.raises(ValueError):
            ask(["a", "b"], "stranger")


def test_other_objects_take_other_ways() -> None:
    nodes = {f"node {number}": 1.0 for number in range(16)}
    names = [f"object {number}" for number in range(60)]
    orders = relay_orders({key: ["node 0"] for key in names}, dict.fromkeys(names, 1), nodes)
    assert len({parent(order, "node 5") for order in orders.values()}) > 8


# all results of a round


def carried(
    reducers: Mapping[str, list[str]], sizes: Mapping[str, int], uplinks: Mapping[str, float]
) -> Counter[tuple[str, str]]:
    """Bytes from each node to each other one when every contribution and every result has gone its way."""
    links: Counter[tuple[str, str]] = Counter()
    for name, order in relay_orders(reducers, sizes, uplinks).items():
        for node in reducers[name][1:]:
            links[node, order[0]] += sizes[name]
        for node in order[1:]:
            links[parent(order, node), node] += sizes[name]
    return links


def busy(reducers: Mapping[str, list[str]], sizes: Mapping[str, int], uplinks: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each uplink is busy with that."""
    links = carried(reducers, sizes, uplinks)
    return {node: sum(b for (sender, _), b in links.items() if sender == node) / rate for node, rate in uplinks.items()}


def round_of(count: int) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Reducers and sizes: 64 shared shards that all nodes contribute to, and 8 of its own for each node."""
    nodes = [f"node {number}" for number in range(count)]
    shared = {f"shared {number}": [*nodes[number % count :], *nodes[: number % count]] for number in range(64)}
    own = {f"expert {number} of {node}": [node] for node in nodes for number in range(8)}
    return shared | own, dict.fromkeys(shared, 50_000) | dict.fromkeys(own, 400_000)


@given(swarms, st.data())
def test_each_order_is_one_of_all_nodes_from_the_reducer_on(nodes: dict[str, float], data: st.DataObject) -> None:
    owners = st.lists(st.sampled_from(sorted(nodes)), unique=True, max_size=4)
    reducers = data.draw(st.dictionaries(st.text("xyz", min_size=1), owners, max_size=12))
    sizes = {name: data.draw(st.integers(1, 10**9)) for name in reducers}
    orders = relay_orders(reducers, sizes, nodes)
    assert orders.keys() == {name for name in reducers if reducers[name]}
    for name, order in orders.items():
        assert order[0] == reducers[name][0] and sorted(order) == sorted(nodes)
    assert orders == relay_orders(reducers, sizes, dict(reversed(nodes.items()))), "everybody computes the same"


@pytest.mark.parametrize("count", [2, 3, 4, 8, 31])
def test_equal_uplinks_are_done_at_the_same_time(count: int) -> None:
    reducers, sizes = round_of(count)
    seconds = busy(reducers, sizes, dict.fromkeys(reducers["shared 0"], 2.5e6))
    assert max(seconds.values()) < 1.06 * sum(seconds.values()) / count


@pytest.mark.parametrize(("count", "most"), [(2, 1.01), (3, 1.05), (4, 1.1), (6, 1.2), (8, 1.35)])
def test_equal_links_are_done_at_about_the_same_time(count: int, most: float) -> None:
    reducers, sizes = round_of(count)
    links = carried(reducers, sizes, dict.fromkeys(reducers["shared 0"], 2.5e6))
    assert max(links.values()) < most * sum(links.values()) / (count * (count - 1))


def test_a_weak_uplink_sends_only_what_nobody_else_can() -> None:
    reducers, sizes = round_of(8)
    uplinks = dict.fromkeys(sorted(reducers["shared 0"]), 2.5e6) | {"node 3": 0.25e6}
    seconds = busy(reducers, sizes, uplinks)
    alone = sum(sizes[name] for name, nodes in reducers.items() if "node 3" in nodes)
    assert seconds["node 3"] == pytest.approx(alone / uplinks["node 3"])
    others = [seconds[node] for node in uplinks if node != "node 3"]
    assert max(others) < 1.06 * sum(others) / 7


def test_one_that_is_known_to_be_weak_is_so_even_if_the_others_are_too_quick_to_tell() -> None:
    reducers, sizes = round_of(8)
    uplinks = dict.fromkeys(sorted(reducers["shared 0"]), 0.0) | {"node 3": 0.1e6}
    alone = sum(sizes[name] for name, nodes in reducers.items() if "node 3" in nodes)
    seconds = busy(reducers, sizes, {**dict.fromkeys(uplinks, 1.25e6), "node 3": 0.1e6})
    assert seconds["node 3"] == pytest.approx(alone / 0.1e6)
    orders = relay_orders(reducers, sizes, uplinks)
    assert orders == relay_orders(reducers, sizes, {**dict.fromkeys(uplinks, 1.25e6), "node 3": 0.1e6})


def test_a_strong_uplink_relays_for_the_others() -> None:
    reducers, sizes = round_of(8)
    uplinks = dict.fromkeys(sorted(reducers["shared 0"]), 2.5e6) | {"node 3": 0.0, "node 5": 12.5e6}
    seconds = busy(reducers, sizes, {**uplinks, "node 3": 2.5e6})
    alike = busy(reducers, sizes, dict.fromkeys(uplinks, 2.5e6))
    assert max(seconds.values()) < 0.9 * max(alike.values())
    assert seconds["node 3"] == pytest.approx(seconds["node 0"], rel=0.06), "what is not known counts as the median"
