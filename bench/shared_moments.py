"""AdamW's moments of the shared parameters, averaged over the nodes with the parameters themselves, for comparison."""

from collections.abc import Mapping

import torch

from node.simulation import Simulation
from swarm.documents import Commit, Contribution, Result
from swarm.identity import NodeId
from swarm.reduce import Reducer


class SharedMomentsSimulation(Simulation):
    """A simulation whose nodes go on with the mean of their moments; three times the bytes of shared parameters."""

    def average(self, reducer: Reducer, base: Commit, offers: Mapping[NodeId, Contribution]) -> Mapping[str, Result]:
        """See `Simulation.average`."""
        engines = [node.engine for node in self.nodes.values()]
        for name, parameter in engines[0].model.named_parameters():
            if ".experts." not in name and parameter.requires_grad:
                states = [engine.optimizer.state[engine.model.get_parameter(name)] for engine in engines]
                for moment in ("exp_avg", "exp_avg_sq"):
                    mean = torch.stack([state[moment] for state in states]).mean(dim=0)
                    for state in states:
                        state[moment].copy_(mean)
        return super().average(reducer, base, offers)
