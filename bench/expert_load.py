"""How busy the experts of a simulated run are."""

from dataclasses import dataclass

import numpy as np
import torch

from model.engine import Engine
from node.corpus import Corpus
from node.expert_load import DEAD
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
    model = simulation.manifest.document.model
    dead, most, own = [], [], []
    for node in simulation.nodes.values():
        shares = _shares(node.engine, tokens, model.num_experts, model.experts_per_token)
        dead.append(int((shares < DEAD / model.num_experts).sum()))
        most.append(float(shares.max()))
        own.append(float(shares[:, list(node.leases)].sum(axis=1).mean()))
    return Load(dead=float(np.mean(dead)), most=float(np.mean(most)), own=float(np.mean(own)))


@torch.no_grad()
def _shares(engine: Engine, tokens: np.ndarray, experts: int, top_k: int) -> np.ndarray:
    """Share of each expert in the choices of each layer, [L, E]."""
    _, logits = engine.hidden_states(torch.as_tensor(tokens))
    chosen = logits.topk(top_k, dim=-1).indices
    counts = torch.stack([torch.bincount(layer.flatten(), minlength=experts) for layer in chosen])
    return (counts / counts.sum(dim=1, keepdim=True)).numpy()
