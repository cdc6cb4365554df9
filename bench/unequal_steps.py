"""Nodes of which one is slower than the others and so takes fewer steps, for comparison of how it should weigh."""

from collections.abc import Mapping
from typing import Any

from node.simulation import Simulation
from swarm.documents import Commit, Contribution, Result, Signed
from swarm.identity import NodeId
from swarm.records import NodeRecord
from swarm.reduce import Reducer


class UnequalSimulation(Simulation):
    """A simulation with one slow node."""

    def __init__(self, slowdown: float, by_tokens: bool, *simulation: Any) -> None:
        """Args:
        slowdown: time of the first node's step, 1 for the others'.
        by_tokens: whether a contribution weighs as much as its tokens, as in the product; else all weigh the same.
        simulation: arguments of `Simulation`.
        """
        super().__init__(*simulation)
        self._slowdown = slowdown
        self._by_tokens = by_tokens

    def average(self, reducer: Reducer, base: Commit, offers: Mapping[NodeId, Contribution]) -> Mapping[str, Result]:
        """See `Simulation.average`."""
        if not self._by_tokens:
            offers = {node: offer.model_copy(update={"tokens": 1}) for node, offer in offers.items()}
        return super().average(reducer, base, offers)

    def record(self, node: NodeId, head: Signed[Commit]) -> NodeRecord:
        slow = node == next(iter(self.nodes))
        return super().record(node, head).model_copy(update={"seconds_per_step": self._slowdown if slow else 1.0})
