"""How the values of a shard travel: the only place of this package that looks at numbers.

`fp32` carries the values themselves, so one node alone stays bit-exact. Lossy encodings of the change since the last
commit belong here too, beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from swarm.store import map_values

CHUNK_VALUES = 1 << 20
"""Values averaged at a time: a few megabytes, whatever the size of the shard."""


class Sink(Protocol):
    """Takes the bytes of a result."""

    def write(self, chunk: bytes, /) -> object:
        """Take the next bytes."""


def is_finite(path: Path) -> bool:
    """Whether every value in a contribution is a number."""
    values = map_values(path)
    return all(
        bool(np.isfinite(values[start : start + CHUNK_VALUES]).all()) for start in range(0, values.size, CHUNK_VALUES)
    )


def average(contributions: Sequence[tuple[int, Path]], sink: Sink) -> None:
    """Write the weighted mean of fp32 contributions, as fp32.

    Sums in float64 in the given order, one multiplication and one addition at a time, so everybody who averages the
    same contributions gets the same bits.

    Args:
        contributions: weight (tokens) and file of each; all of the same size, at least one weight above zero.
        sink: receives the bytes.
    """
    total = float(sum(weight for weight, _ in contributions))
    values = [(float(weight) / total, map_values(path)) for weight, path in contributions]
    for start in range(0, values[0][1].size, CHUNK_VALUES):
        chunks = [(weight, array[start : start + CHUNK_VALUES].astype(np.float64)) for weight, array in values]
        result = chunks[0][0] * chunks[0][1]
        for weight, chunk in chunks[1:]:
            chunk *= weight
            result += chunk
        sink.write(result.astype("<f4").tobytes())
