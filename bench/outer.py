"""Outer optimisers, for comparison: what the average of a round changes is taken for a gradient, with momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from node.simulation import Simulation
from swarm.documents import Commit, Contribution, Encoded, Result
from swarm.identity import NodeId
from swarm.reduce import Reducer
from swarm.shard_names import expert_of
from swarm.store import map_values


@dataclass(frozen=True, slots=True)
class Nesterov:
    """SGD with Nesterov momentum on the change of a round (arXiv 2311.08105)."""

    learning_rate: float
    momentum: float
    experts: bool = True
    """Whether experts take it, too, which have one owner and are not averaged; else only what is shared."""


class OuterSimulation(Simulation):
    """A simulation whose averages go through an outer optimiser; fp32 only."""

    def __init__(self, outer: Nesterov, *simulation: Any) -> None:
        """Args:
        outer: the optimiser.
        simulation: arguments of `Simulation`.
        """
        super().__init__(*simulation)
        self._outer = outer
        self._momentum: dict[str, np.ndarray] = {}

    def average(self, reducer: Reducer, base: Commit, offers: Mapping[NodeId, Contribution]) -> Mapping[str, Result]:
        """See `Simulation.average`."""
        return {
            name: self._step(name, base, result) if self._outer.experts or expert_of(name) is None else result
            for name, result in super().average(reducer, base, offers).items()
        }

    def _step(self, name: str, base: Commit, result: Result) -> Result:
        old = map_values(self.store.locate(base.shards[name].digest))
        gradient = old - map_values(self.store.locate(result.values))
        momentum = self._outer.momentum * self._momentum.get(name, 0.0) + gradient
        self._momentum[name] = momentum
        values = old - self._outer.learning_rate * (gradient + self._outer.momentum * momentum)
        digest = self.store.put(values.astype("<f4").tobytes())
        return result.model_copy(update={"encoded": Encoded(digest=digest, size=values.nbytes), "values": digest})
