"""Who owns which expert: a pure function of the roster, its capacities and the leases that stand."""

from collections.abc import Collection, Mapping

from swarm.ranking import ranked, score


def fair_limit(num_experts: int, capacity: Mapping[str, int]) -> int:
    """The smallest load L such that nodes with at most min(capacity, L) experts each can hold them all.

    When all capacities together are too small it is the largest capacity: everybody is full, some experts stay orphans.
    """
    for limit in range(1, num_experts + 1):
        if sum(min(free, limit) for free in capacity.values()) >= num_experts:
            return limit
    return max(capacity.values(), default=0)


def settle(
    run_id: str, num_experts: int, capacity: Mapping[str, int], standing: Mapping[int, Collection[str]]
) -> dict[int, str]:
    """The owner of every expert that can have one.

    Leases that stand are kept. Orphans go to the best ranked node with room (rendezvous hashing with bounded load), and
    a node that is still below its share takes experts from the fullest. Nothing else moves.

    Args:
        run_id: salt of the ranking.
        num_experts: experts 0 to num_experts - 1.
        capacity: roster members and how many experts each can train.
        standing: for an expert, the nodes that hold a lease on it, the preferred one first.

    Returns:
        Owner by expert; an expert without an entry is an orphan.
    """
    owner: dict[int, str] = {}
    load = dict.fromkeys(capacity, 0)

    def give(expert: int, node: str) -> None:
        if expert in owner:
            load[owner[expert]] -= 1
        owner[expert] = node
        load[node] += 1

    def room(limit: int) -> list[str]:
        return [node for node in capacity if load[node] < min(capacity[node], limit)]

    for expert in range(num_experts):
        for node in standing.get(expert, ()):
            if load.get(node, 0) < capacity.get(node, 0):
                give(expert, node)
                break

    share = num_experts // len(capacity) if capacity else 0
    limit = fair_limit(num_experts, capacity)
    for expert in range(num_experts):
        # orphans fill up those below their share first: then fewer standing leases have to move, or none
        if expert not in owner and (candidates := room(share) or room(limit)):
            give(expert, ranked(candidates, run_id, expert)[0])

    for node in ranked(capacity, run_id):
        while load[node] < min(share, capacity[node]):
            fullest = max(load, key=lambda other: (load[other], other))
            movable = [expert for expert, holder in owner.items() if holder == fullest]
            give(max(movable, key=lambda expert: score(node, run_id, expert)), node)
    return owner
