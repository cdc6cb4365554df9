"""What becomes of the optimiser's moments of an expert that is merged with others, for comparison."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model.moments import Moments
from node.simulation import Simulation
from swarm.documents import Commit, Merge
from swarm.shard_names import expert_of

Change = Callable[[Moments, float], Moments]
"""Moments and the strength of a merge: what the moments become."""


def reset(moments: Moments, alpha: float) -> Moments:
    """Begin anew, with the correction of the first steps, too."""
    return Moments(exp_avg=moments.exp_avg * 0, exp_avg_sq=moments.exp_avg_sq * 0, step=0)


def scale(moments: Moments, alpha: float) -> Moments:
    """Of the direction, so much is left as of the expert itself."""
    return replace(moments, exp_avg=moments.exp_avg * (1 - alpha))


class MomentsSimulation(Simulation):
    """A simulation that changes the moments of all experts at each merge; the product keeps them."""

    def __init__(self, change: Change, *simulation: Any) -> None:
        """Args:
        change: of the moments.
        simulation: arguments of `Simulation`.
        """
        super().__init__(*simulation)
        self._change = change

    def merge(self, head: Commit) -> tuple[Merge | None, Commit]:
        """See `Simulation.merge`."""
        merge, base = super().merge(head)
        if merge is not None:
            for engine in (node.engine for node in self.nodes.values()):
                for name in engine.trained_shards():
                    if expert_of(name) is not None and (moments := engine.moments(name)) is not None:
                        engine.load_moments(name, self._change(moments, merge.alpha))
        return merge, base
