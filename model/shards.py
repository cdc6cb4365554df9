"""Shards, the units of synchronisation: which rows of which parameters each of them holds, in canonical order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from model.architecture import build_on_meta
from model.settings import ModelSettings

DTYPE = np.dtype("<f4")
"""Values of a shard: little-endian fp32."""

PARTS = 64
"""The shared parameters are cut into about so many shards,"""
LEAST_NUMEL, MOST_NUMEL = 2**15, 2**23
"""but not into smaller and not into larger ones, in values."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start:stop` (along dimension 0) of one parameter of the transformers model; for an expert, its row of the
    fused tensor."""

    parameter: str
    start: int
    stop: int
    shape: tuple[int, ...]
    """Shape of these rows: `(stop - start, ...)`."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """One unit of synchronisation. Its values are its pieces, flattened and concatenated."""

    name: str
    expert: int | None
    """The expert whose owners train this shard; None for a shared shard, which every node trains."""
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Views of the flat `values` [numel], one in the shape of each piece."""
        bounds = accumulate((piece.numel for piece in self.pieces), initial=0)
        return [
            values[start:stop].reshape(piece.shape)
            for piece, (start, stop) in zip(self.pieces, pairwise(bounds), strict=True)
        ]


def layout(settings: ModelSettings, max_numel: int | None = None) -> tuple[Shard, ...]:
    """All shards in canonical order: `embed`, then `layer.{i}.shared` and `layer.{i}.expert.{e}` of each layer, then
    `head` (final norm and output matrix). Every element of the model is in exactly one shard.

    A shared shard of more than `max_numel` values is cut between rows into `{name}.0`, `{name}.1` and so on, so that
    many nodes can share the work of averaging; None cuts the shared parameters into some PARTS.
    """
    model = build_on_meta(settings)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if max_numel is None:
        shared = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp.experts." not in name)
        max_numel = min(max(shared // PARTS, LEAST_NUMEL), MOST_NUMEL)
    embedding = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    embed = [name for name, parameter in model.named_parameters() if id(parameter) in embedding]

    shards = [*_shared("embed", embed, shapes, max_numel)]
    for layer in range(settings.num_layers):
        names = [name for name in shapes if name.startswith(f"model.layers.{layer}.")]
        experts = [name for name in names if ".mlp.experts." in name]
        shards += _shared(f"layer.{layer}.shared", [name for name in names if name not in experts], shapes, max_numel)
        for expert in range(settings.num_experts):
            pieces = (Piece(name, expert, expert + 1, (1, *shapes[name][1:])) for name in experts)
            shards.append(Shard(f"layer.{layer}.expert.{expert}", expert, tuple(pieces)))
    head = [name for name in shapes if name not in embed and ".layers." not in name]
    shards += _shared("head", head, shapes, max_numel)
    return tuple(shards)


def _shared(name: str, parameters: list[str], shapes: dict[str, tuple[int, ...]], max_numel: int) -> Iterator[Shard]:
    """The shard `name`, or its parts when it is too big: each takes as many whole rows as fit, at least one."""
    if sum(math.prod(shapes[parameter]) for parameter in parameters) <= max_numel:
        yield Shard(name, None, tuple(Piece(p, 0, shapes[p][0], shapes[p]) for p in parameters))
        return
    part, pieces, room = 0, list[Piece](), max_numel
    for parameter in parameters:
        rows, *row_shape = shapes[parameter]
        row_numel = math.prod(row_shape)
        start = 0
        while start < rows:
            if pieces and room < row_numel:
                yield Shard(f"{name}.{part}", None, tuple(pieces))
                part, pieces, room = part + 1, [], max_numel
            stop = min(rows, start + max(1, room // row_numel))
            pieces.append(Piece(parameter, start, stop, (stop - start, *row_shape)))
            room -= pieces[-1].numel
            start = stop
    yield Shard(f"{name}.{part}", None, tuple(pieces))
