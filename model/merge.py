"""The merging warm-up: each expert is drawn towards those that resemble it. SPES, arXiv 2602.11543, Eq. 5 and 6."""

import warnings
from collections.abc import Sequence

import torch


def select_donors(gate: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts of one layer that each of them is drawn to: those with the most similar gate projection (Eq. 5).

    Similarity is the cosine between the flattened matrices; of equal ones the lower id comes first. Besides the gate
    one normalised copy of it is held.

    Args:
        gate: input projections of all experts of the layer, [E, F, D].
        top_k: donors K of each expert; with a warning all E - 1 others where there are fewer.

    Returns:
        Ids, int64 [E, K], the most similar one first.

    Raises ValueError when K is less than 1.
    """
    experts = gate.shape[0]
    if top_k < 1:
        raise ValueError(f"top_k {top_k}: an expert is merged with at least one other")
    if top_k > experts - 1:
        warnings.warn(f"top_k {top_k} is cut: there are {experts - 1} other experts", stacklevel=2)
        top_k = experts - 1
    flat = torch.nn.functional.normalize(gate.reshape(experts, -1).float(), dim=1)
    similarity = flat @ flat.T
    similarity.fill_diagonal_(-torch.inf)
    order = similarity.sort(dim=1, descending=True, stable=True).indices
    return order[:, :top_k].contiguous()


def merge_experts(weights: torch.Tensor, donors: torch.Tensor | Sequence[Sequence[int]], alpha: float) -> torch.Tensor:
    """Draw every expert towards its donors, all at once: phi_j + alpha * mean over k of (phi_k - phi_j) (Eq. 6).

    Elementwise operations in a fixed order: the bits are the same on every machine, and for every part of the weights
    that is merged by itself.

    Args:
        weights: of all experts of a layer, one matrix or several in one, [E, ...].
        donors: ids, [E, K], from `select_donors`.
        alpha: strength, 0 (nothing happens) to 1 (the mean of the donors).

    Returns:
        The merged weights, a new tensor of the same shape and dtype.

    Raises ValueError for another alpha, or donors of other experts.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha {alpha} is not between 0 and 1")
    rows = [[int(donor) for donor in row] for row in donors]
    if len(rows) != weights.shape[0] or not all(0 <= donor < len(rows) for row in rows for donor in row):
        raise ValueError(f"donors of {len(rows)} experts for {weights.shape[0]}")
    merged = torch.empty_like(weights)
    distance = torch.empty_like(weights[:1]).squeeze(0)
    for expert, row in enumerate(rows):
        own, result = weights[expert], merged[expert].zero_()
        for donor in row:
            result += torch.sub(weights[donor], own, out=distance)
        # two operations, not one with a factor: that one rounds once or twice, as the processor likes
        result *= alpha / max(len(row), 1)
        result += own
    return merged
