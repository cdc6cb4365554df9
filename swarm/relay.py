"""Who fetches a result from whom, so that its maker hands it out once and strong uplinks carry it on.

The nodes stand in one order for each object, the maker first. The second one fetches from the maker; below it the order
is a tree in which every inner node serves two others. So the first half of the order serves two copies each and the
second half none. In which half a node stands follows from what its uplink has to carry for other shards. All nodes must
compute the orders from the same mappings, or a link of a tree may be missing.
"""

from collections.abc import Mapping, Sequence

from swarm.ranking import strengths


def relay_orders(
    reducers: Mapping[str, Sequence[str]], sizes: Mapping[str, int], uplinks: Mapping[str, float]
) -> dict[str, list[str]]:
    """The order in which the result of each shard reaches the nodes, such that all uplinks are done at the same time.

    Args:
        reducers: for each shard the nodes that may average it, the one whose turn it is first, see
            `swarm.leader.reducers`. The others send it what they contribute.
        sizes: bytes of each shard as it travels.
        uplinks: bytes/s that each node can send, for every node that is there; 0 when it is not known, see
            `swarm.ranking.strengths`.

    Returns:
        By shard, for those that somebody averages: its reducer, then the other nodes.
    """
    strength = strengths(uplinks)
    busy = dict.fromkeys(sorted(strength), 0.0)
    """Seconds that each uplink needs for what it has to send."""
    for name, nodes in reducers.items():
        for node in nodes:  # the reducer hands its result out once, each other one its contribution
            busy[node] += sizes[name] / strength[node]
    orders = {}
    for name in sorted(reducers, key=lambda name: (-sizes[name], name)):
        if not reducers[name]:
            continue
        maker = reducers[name][0]
        others = sorted((node for node in busy if node != maker), key=busy.__getitem__)
        orders[name] = [maker, *others]
        for place, node in enumerate(others, start=1):
            children = len(range(2 * place, min(2 * place + 2, len(orders[name]))))
            busy[node] += children * sizes[name] / strength[node]
    return orders


def parent(order: Sequence[str], me: str) -> str:
    """The node from which `me` fetches. Raises ValueError when `me` is not in the order, or is its root."""
    place = order.index(me)
    if place == 0:
        raise ValueError(f"{me} made the object itself")
    return order[place // 2]


def sources_for(order: Sequence[str], me: str) -> tuple[list[str], list[str]]:
    """Whom `me` asks: its parent, and in reserve the parent's ancestors up to the root, then all others.

    Those below `me` in the tree wait for it themselves and come last. Raises ValueError like `parent`.
    """
    first = parent(order, me)
    place = order.index(me)
    above, below = [place // 2], {place}
    while above[-1]:
        above.append(above[-1] // 2)
    for other in range(place + 1, len(order)):
        if other // 2 in below:
            below.add(other)
    rest = [other for other in range(len(order)) if other not in below and other not in above]
    return [first], [order[other] for other in (*above[1:], *rest, *sorted(below - {place}))]
