"""Who owns which expert: a pure function of the roster, its capacities and the leases that stand."""

import itertools
import math
from collections.abc import Collection, Mapping, Set

from swarm.ranking import ranked_by_strength, score


def fair_shares(num_experts: int, capacity: Mapping[str, int], copies: int = 1) -> dict[str, float]:
    """How many experts each node would own if ownership could be cut in fractions: in proportion to its capacity.

    Args:
        num_experts: experts of a layer.
        capacity: nodes and how many experts each can train; more than all experts counts as all of them.
        copies: owners that an expert should have.

    Returns:
        Share by node, at most its capacity; together as many as all experts need, or as all nodes can hold.
    """
    most = {node: max(0, min(places, num_experts)) for node, places in capacity.items()}
    total = sum(most.values())
    needed = min(num_experts * copies, total)
    return {node: needed * places / total if total else 0.0 for node, places in most.items()}


def settle(
    run_id: str,
    num_experts: int,
    capacity: Mapping[str, int],
    standing: Mapping[int, Collection[str]],
    copies: int = 1,
    pinned: Set[int] = frozenset(),
) -> dict[int, tuple[str, ...]]:
    """The owners of every expert that can have one.

    Leases that stand are kept, up to `copies` for an expert and the capacity of a node. Experts that lack owners go to
    nodes with room, by weighted rendezvous hashing with bounded load: every expert gets its first owner before any gets
    its second, and a second lease ends where an expert would otherwise have no owner. A node that is left with less
    than half of its fair share takes experts from those above theirs. Nothing else moves: settling what has been
    settled changes nothing.

    Args:
        run_id: salt of the ranking.
        num_experts: experts 0 to num_experts - 1.
        capacity: roster members and how many experts each can train.
        standing: for an expert, the nodes that hold a lease on it, the preferred one first.
        copies: owners that an expert should have where capacity allows; at least 1.
        pinned: experts of which owners hold what is not yet committed: every lease on them is kept that its node has
            room for, before anything else, even beyond `copies`.

    Returns:
        Owners by expert, those with a standing lease first, in their order; an expert without an entry is an orphan.
    """
    settlement = _Settlement(run_id, num_experts, capacity, standing, copies, pinned)
    settlement.keep()
    settlement.fill()
    while settlement.balance():
        settlement.fill()  # those who gave have room again, perhaps for an expert that lacks an owner
    return settlement.owners()


class _Settlement:
    """Leases on their way from those that stand to those that will."""

    def __init__(
        self,
        run_id: str,
        num_experts: int,
        capacity: Mapping[str, int],
        standing: Mapping[int, Collection[str]],
        copies: int,
        pinned: Set[int],
    ) -> None:
        self._run_id = run_id
        self._experts = range(num_experts)
        self._copies = copies
        self._pinned = pinned
        self._capacity = {node: min(capacity[node], num_experts) for node in sorted(capacity) if capacity[node] > 0}
        self._fair = fair_shares(num_experts, self._capacity, copies)
        self._bound = {node: math.ceil(share) for node, share in self._fair.items()}
        self._claims = {
            expert: [node for node in dict.fromkeys(standing.get(expert, ())) if node in self._capacity]
            for expert in self._experts
        }
        self._owners = {expert: set[str]() for expert in self._experts}
        self._held = {node: set[int]() for node in self._capacity}
        self._orders: dict[int, list[str]] = {}

    def owners(self) -> dict[int, tuple[str, ...]]:
        """Owners by expert, in the order of `settle`."""
        found = {}
        for expert, owners in self._owners.items():
            ordered = [node for node in self._claims[expert] if node in owners]
            if len(ordered) < len(owners):
                ordered += [node for node in self._order(expert) if node in owners and node not in ordered]
            if ordered:
                found[expert] = tuple(ordered)
        return found

    # the three acts

    def keep(self) -> None:
        """Keep leases that stand: those that are pinned, then one of every expert, then further ones."""
        pinned = sorted(self._pinned & self._claims.keys())
        nodes = len(self._capacity)
        for level in range(1, nodes + 1):
            self._keep_level(pinned, level)
        for expert in self._experts:
            if not self._owners[expert]:
                self._keep_one(expert, set())
        for level in range(2, min(self._copies, nodes) + 1):
            self._keep_level(self._experts, level)

    def fill(self) -> None:
        """Find owners for experts that lack them: the first for all, then the second, and so on."""
        for level in range(1, min(self._copies, len(self._capacity)) + 1):
            for expert in self._experts:
                if len(self._owners[expert]) < level:
                    self._place(expert)

    def balance(self) -> bool:
        """Bring each node with less than half of its fair share up to it, from those above theirs; True if any moved.

        Nobody gives who would then be left with less than half itself, so nothing can move to and fro.
        """
        starved = [node for node in self._capacity if 2 * self._load(node) < self._fair[node]]
        moved = False
        for node in sorted(starved, key=lambda node: self._load(node) / self._fair[node]):
            while self._load(node) < max(1, math.floor(self._fair[node])) and self._draw(node):
                moved = True
        return moved

    # keeping

    def _keep_level(self, experts: Collection[int], level: int) -> None:
        """Keep leases on each of the experts until it has `level` owners, the preferred ones first."""
        for expert in experts:
            for node in self._claims[expert]:
                if len(self._owners[expert]) >= level:
                    break
                if node not in self._owners[expert] and self._has_room(node):
                    self._give(expert, node)

    def _keep_one(self, expert: int, tried: set[str]) -> bool:
        """Keep one lease on the expert; a full holder hands another expert on to somebody with a lease on that.

        This is a maximum matching by augmenting paths: as few experts as possible lose their last owner.
        """
        for node in self._claims[expert]:
            if self._has_room(node):
                self._give(expert, node)
                return True
        for node in self._claims[expert]:
            if node in tried:
                continue
            tried.add(node)
            for other in sorted(self._held[node] - self._pinned):
                if self._keep_one(other, tried):
                    self._take(other, node)
                    self._give(expert, node)
                    return True
        return False

    # filling

    def _place(self, expert: int) -> None:
        """Find the expert one more owner if any can be: within the fair bounds, else wherever there is room."""
        for limit in (self._bound, self._capacity):
            open_nodes = [node for node in self._order(expert) if self._load(node) < limit[node]]
            candidates = [node for node in open_nodes if node not in self._owners[expert]]
            if candidates:
                # those below their share first: then fewer standing leases have to move, or none
                self._give(expert, min(candidates, key=self._saturation))
                return
            if self._exchange(expert, open_nodes):
                return
        if not self._owners[expert]:
            self._displace(expert)

    def _saturation(self, node: str) -> tuple[bool, bool]:
        """Whether one more expert exceeds the node's fair share, and whether it has half of it."""
        return self._load(node) + 1 > self._fair[node], 2 * self._load(node) >= self._fair[node]

    def _exchange(self, expert: int, open_nodes: Collection[str]) -> bool:
        """Place an expert that all who have room own already: another node takes it and hands on one that is new."""
        givers = [node for node in self._order(expert) if node not in self._owners[expert]]
        for node, giver in itertools.product(open_nodes, givers):
            for other in sorted(self._held[giver] - self._held[node] - self._pinned):
                if giver not in self._claims[other]:  # a lease that stands does not move for a further copy
                    self._take(other, giver)
                    self._give(other, node)
                    self._give(expert, giver)
                    return True
        return False

    def _displace(self, expert: int) -> None:
        """Place an orphan where nobody has room: it takes the place of an expert that has several owners."""
        for node in self._order(expert):
            spare = [other for other in self._held[node] - self._pinned if len(self._owners[other]) > 1]
            if spare:
                self._take(max(spare, key=lambda other: (len(self._owners[other]), other)), node)
                self._give(expert, node)
                return

    # balancing

    def _draw(self, node: str) -> bool:
        """Move one expert to the node, from the one that is furthest above its fair share and has a suitable one."""
        above = [
            giver
            for giver, share in self._fair.items()
            if self._load(giver) > share and 2 * (self._load(giver) - 1) >= share
        ]
        for giver in sorted(above, key=lambda giver: -self._load(giver) / self._fair[giver]):
            movable = sorted(self._held[giver] - self._held[node] - self._pinned)
            if movable:
                # one that does not stand, then one that keeps another owner, then the one that ranks the node highest
                expert = max(
                    movable,
                    key=lambda expert: (
                        giver not in self._claims[expert],
                        len(self._owners[expert]),
                        score(node, self._run_id, expert),
                    ),
                )
                self._take(expert, giver)
                self._give(expert, node)
                return True
        return False

    # leases

    def _give(self, expert: int, node: str) -> None:
        self._owners[expert].add(node)
        self._held[node].add(expert)

    def _take(self, expert: int, node: str) -> None:
        self._owners[expert].remove(node)
        self._held[node].remove(expert)

    def _load(self, node: str) -> int:
        return len(self._held[node])

    def _has_room(self, node: str) -> bool:
        return self._load(node) < self._capacity[node]

    def _order(self, expert: int) -> list[str]:
        """The nodes in the expert's order: a node comes first as often as its capacity has a part in the whole."""
        if expert not in self._orders:
            self._orders[expert] = ranked_by_strength(self._capacity, self._run_id, expert)
        return self._orders[expert]
