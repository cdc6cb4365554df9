"""Who fetches a result from whom, so that its maker hands it out once and strong uplinks carry it on.

The nodes stand in one order for each object, the maker first. The second one fetches from the maker; below it the order
is a tree in which every inner node serves two others. So the first half of the order serves two copies each and the
second half none. In which half a node stands follows from what its uplink has to carry for other shards, and below whom
from what has to pass between the two: connections share a line evenly, so the one with the most to carry would end long
after the others. All nodes must compute the orders from the same mappings, or a link of a tree may be missing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.ranking import strengths

CHOICES = 4
"""So many nodes, of those that have the least to send, are compared for a place in an order."""


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
    links = {node: Counter[str]() for node in busy}
    """Bytes that pass between two nodes."""
    for name, nodes in reducers.items():
        for node in nodes:  # the reducer hands its result out once, each other one its contribution
            busy[node] += sizes[name] / strength[node]
        for node in nodes[1:]:
            links[node][nodes[0]] += sizes[name]
    orders = {}
    for name in sorted(reducers, key=lambda name: (-sizes[name], name)):
        if not reducers[name]:
            continue
        order = orders[name] = [reducers[name][0]]
        left = sorted((node for node in busy if node != order[0]), key=busy.__getitem__)
        while left:
            above, place = order[len(order) // 2], len(order)
            served = sizes[name] * len(range(2 * place, min(2 * place + 2, len(busy))))
            free = left[:CHOICES]
            if served:  # what is given to one that has more to do must not make it the last one
                free = [node for node in free if busy[node] <= busy[free[0]] + served / strength[node]]
            chosen = min(free, key=links[above].__getitem__)
            left.remove(chosen)
            order.append(chosen)
            links[above][chosen] += sizes[name]
            busy[chosen] += served / strength[chosen]
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
