"""How busy the experts of a simulated run are."""

from dataclasses import dataclass

import numpy as np

from node.corpus import Corpus
from node.expert_load import dead, shares
from node.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the tokens' choices, on held-out text, after the last local steps and before they are averaged."""

    dead: float
    """Experts of all layers, mean over the nodes' models."""
    most: float
    """Share of the busiest expert of any layer, mean over the nodes."""
    own: float
    """Share that goes to a node's own experts, mean over nodes and layers."""


def measure(simulation: Simulation, corpus: Corpus, blocks: int) -> Load:
    """The load in the models that the nodes of a simulation have now."""
    tokens = corpus.heldout_blocks(blocks)
    unused, most, own = [], [], []
    for node in simulation.nodes.values():
        choices = node.engine.evaluate(tokens).choices.tolist()
        load = np.array(shares(choices))
        unused.append(len(dead(choices)))
        most.append(load.max())
        own.append(load[:, list(node.leases)].sum(axis=1).mean())
    return Load(dead=float(np.mean(unused)), most=float(np.mean(most)), own=float(np.mean(own)))
