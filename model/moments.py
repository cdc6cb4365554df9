"""AdamW's moments of one shard as they go from one owner of an expert to the next, and the file they travel in."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from model.shards import DTYPE

_STEP = struct.Struct("<Q")
MAX_STEP = 2**24
"""torch counts steps in fp32, which is exact up to here; the bias they correct is long gone by then."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Running means of the gradient and of its square, flat fp32 [numel] in the order of the shard's values.

    In a file: `exp_avg`, `exp_avg_sq`, both little-endian fp32, then `step` as little-endian uint64.
    """

    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    step: int
    """Optimiser steps behind them."""

    def write(self, folder: Path) -> str:
        """Write the file into `folder`, named by its SHA-256; returns that. Raises OSError."""
        means = (np.ascontiguousarray(mean, DTYPE).data for mean in (self.exp_avg, self.exp_avg_sq))
        parts: tuple[bytes | memoryview, ...] = (*means, _STEP.pack(self.step))
        digest = hashlib.sha256()
        temporary = folder / ".moments.part"
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
        temporary.rename(folder / digest.hexdigest())
        return digest.hexdigest()

    @classmethod
    def read(cls, path: Path, numel: int) -> Self:
        """The moments of a shard of `numel` values, mapped from their file.

        Raises ValueError for what no AdamW has written, and OSError.
        """
        size = 2 * numel * DTYPE.itemsize
        if path.stat().st_size != size + _STEP.size:
            raise ValueError(f"{path.stat().st_size} bytes where {size + _STEP.size} are expected")
        exp_avg, exp_avg_sq = np.memmap(path, DTYPE, mode="r", shape=(2, numel))
        with open(path, "rb") as file:
            file.seek(size)
            (step,) = _STEP.unpack(file.read())
        if not 1 <= step <= MAX_STEP:
            raise ValueError(f"step {step} is out of range")
        # min and max pass NaN on, and need no array of their own
        if not (np.isfinite([exp_avg.min(), exp_avg.max(), exp_avg_sq.max()]).all() and exp_avg_sq.min() >= 0):
            raise ValueError("a moment is not finite, or the mean of squares is negative")
        return cls(exp_avg, exp_avg_sq, step)
