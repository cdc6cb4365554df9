"""Genesis: the weights with which a run begins, a function of its settings and its seed."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from model.settings import ModelSettings
from model.shards import Piece, Shard, layout


def initial_values(settings: ModelSettings, seed: int) -> Iterator[tuple[Shard, np.ndarray]]:
    """Yields every shard with its flat fp32 values [numel], one at a time: norms are one, matrices normal with mean 0
    and standard deviation `init_std`. The same bits for the same arguments, whatever the number of threads."""
    for shard in layout(settings):
        values = [_values(piece, settings.init_std, seed) for piece in shard.pieces]
        yield shard, torch.cat(values).numpy()


def _values(piece: Piece, std: float, seed: int) -> torch.Tensor:
    if len(piece.shape) == 1:
        return torch.ones(piece.numel)
    # Each piece has a generator of its own, so its values do not depend on what was drawn before it.
    digest = hashlib.sha256(f"{seed}/{piece.parameter}/{piece.start}:{piece.stop}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(piece.numel).normal_(0, std, generator=generator)
