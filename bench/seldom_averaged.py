"""Some shards averaged less often than the rest, for comparison: in between they are carried, as those are whose
average fails, so each node goes on with its own and hands in all of it later."""

import re
from collections.abc import Mapping
from typing import Any

from node.simulation import Simulation
from swarm.documents import Commit, Contribution, Result
from swarm.identity import NodeId
from swarm.reduce import Reducer


class SeldomSimulation(Simulation):
    """A simulation that averages some shards in every k-th round only."""

    def __init__(self, shards: str, every: int, *simulation: Any) -> None:
        """Args:
        shards: a pattern of their names.
        every: rounds between two averages of them.
        simulation: arguments of `Simulation`.
        """
        super().__init__(*simulation)
        self._shards = re.compile(shards)
        self._every = every

    def average(self, reducer: Reducer, base: Commit, offers: Mapping[NodeId, Contribution]) -> Mapping[str, Result]:
        """See `Simulation.average`."""
        results = super().average(reducer, base, offers)
        if (base.round + 1) % self._every == 0:
            return results
        return {name: result for name, result in results.items() if not self._shards.fullmatch(name)}
