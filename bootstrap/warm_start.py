"""A checkpoint in the place of the random first weights: it must agree with the run file, and its digest names it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.checkpoint import Checkpoint
from model.errors import UserError
from model.settings import ModelSettings
from model.shards import Shard
from swarm.documents import state_digest


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A checkpoint with which a run begins."""

    checkpoint: Checkpoint
    state: str
    """Digest of the state that its values are; see `swarm.manifest.Manifest.initial_state`."""

    def values(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """Every shard with its flat fp32 values [numel], as `model.initial.initial_values` yields them."""
        return self.checkpoint.values()


def open_warm_start(folder: Path, model: ModelSettings) -> WarmStart:
    """Check the checkpoint in `folder` against the run's model, and read it through once for its digest.

    Raises UserError when it cannot be read, is not of this model, or has values that are not finite.
    """
    checkpoint = Checkpoint.open(folder)
    check_agreement(model, checkpoint.settings, folder)
    digests = {shard.name: hashlib.sha256(values.data).hexdigest() for shard, values in checkpoint.values()}
    return WarmStart(checkpoint, state_digest(digests))


def check_agreement(model: ModelSettings, found: ModelSettings, folder: Path) -> None:
    """Raise UserError for the first key in which the run's model differs from that of the checkpoint in `folder`.

    `init_std` has no meaning for weights that are there, and sequences may be shorter than the checkpoint allows.
    """
    for key in ModelSettings.model_fields:
        ours, theirs = getattr(model, key), getattr(found, key)
        if key == "head_dim":  # what it is when it is left out counts
            ours, theirs = model.head_size, found.head_size
        if key != "init_std" and not (ours == theirs or (key == "max_length" and ours < theirs)):
            raise UserError(
                f"model.{key}: the run file has {ours!r} and the checkpoint {folder} has {theirs!r}; "
                "change the run file, or write one that fits: spes-node new PRESET --init DIR"
            )
