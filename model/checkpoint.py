"""Hugging Face checkpoints as a beginning: read shard by shard, never the whole model."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.architecture import FAMILIES
from model.checkpoint_config import checkpoint_settings, tied_embeddings
from model.settings import ModelSettings
from model.shards import DTYPE, Shard, layout
from model.stored_names import EMBEDDING, HEAD, expert_names, stored_name, stored_shapes
from model.weight_files import WeightFiles

__all__ = ["Checkpoint", "checkpoint_settings", "tied_name"]


class Checkpoint:
    """The weights of a checkpoint folder of one of our families, in our shards."""

    def __init__(self, folder: Path, settings: ModelSettings, files: WeightFiles, place: Callable[[str], str]) -> None:
        self.folder = folder
        self.settings = settings
        self.shards = layout(settings)
        self._shards = {shard.name: shard for shard in self.shards}
        self._files = files
        self._place = place

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads `config.json` and the headers of the weight files, and checks that they fit; no tensor is loaded.

        Raises UserError for what our settings cannot express, and for files and tensors that are missing, damaged, too
        many or of another shape.
        """
        settings = checkpoint_settings(folder)
        files = WeightFiles.open(folder)
        place = partial(tied_name, files) if tied_embeddings(folder) else str
        # Before anything is made for each expert: a broken config may promise millions.
        files.check(stored_shapes(settings), place)
        return cls(folder, settings, files, place)

    def values(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """Yields every shard with its flat fp32 values [numel], one at a time, in the order of `layout`.

        Raises UserError when a tensor has values that are not finite.
        """
        for shard in self.shards:
            yield shard, self.read(shard.name)

    def read(self, name: str) -> np.ndarray:
        """The flat fp32 values [numel] of one shard. Raises UserError when a value is not finite."""
        shard = self._shards[name]
        values = np.empty(shard.numel, DTYPE)
        position = 0
        for rows in self._rows(shard):
            # Exact: fp32 holds every bf16 and fp16 number.
            values[position : position + rows.numel()] = rows.to(torch.float32).flatten().numpy()
            position += rows.numel()
        return values

    def _rows(self, shard: Shard) -> Iterator[Tensor]:
        """The stored rows of a shard, in the order of its values."""
        family = FAMILIES[self.settings.family]
        if shard.expert is not None:
            layer = int(shard.pieces[0].parameter.split(".")[2])
            # An expert's pieces are gate and up in one, then down.
            yield from map(self._files.read, expert_names(family, layer, shard.expert))
            return
        for piece in shard.pieces:
            yield self._files.read(self._place(stored_name(family, piece.parameter)), piece.start, piece.stop)


def tied_name(files: WeightFiles, name: str) -> str:
    """Where the tensor `name` of a model with tied embeddings is: embedding and head are each other's stand-ins.

    Some checkpoints store both. transformers then ties them only if they are equal, so each is read as it is.
    """
    other = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name, name)
    return name if name in files.tensors or other not in files.tensors else other
