"""How the values of a shard travel: the only place of this package that looks at numbers.

`fp32` carries the values themselves, so one node alone stays bit-exact. The other encodings carry a delta, the change
since the last commit, and lose some of it; what is lost goes into a residual file, which its maker adds to its next
delta of the same shard (error feedback). On the wire, little-endian:

    bf16    2 bytes for each value: the upper half of its fp32 bits, rounded to nearest, ties to even
    int8    blocks of 256 values: an fp32 scale, then a signed byte for each value
    int4    blocks of 128 values: an fp32 scale, then two values in a byte, the first in its lower half

A block's values are `code * scale` with codes in [-127, 127] or [-7, 7]; its largest value has the largest code. The
last block ends with its last value. Multiplication, addition and rounding are elementwise, in IEEE fp32, one operation
at a time: everybody who decodes the same bytes gets the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarm.manifest import Encoding
from swarm.store import map_values

CHUNK_VALUES = 1 << 16
"""Values looked at together, a multiple of every block: their temporaries fit into a core's cache."""
LARGEST = np.float32(3e38)
"""Deltas beyond this are refused, so that nothing which is decoded overflows."""
SMALLEST = np.finfo(np.float32).smallest_normal
"""Of the scales that are not zero: a smaller one would lose bits, and its inverse could overflow."""

Values = npt.NDArray[np.float32]
Encoded = bytes | npt.NDArray[np.uint8]


class Sink(Protocol):
    """Takes the bytes of a contribution or of a result."""

    def write(self, chunk: bytes, /) -> object:
        """Take the next bytes."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Values in blocks of `length`, each with a scale and integer codes in [-levels, levels]."""

    length: int
    levels: int

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.levels < 8

    @property
    def record(self) -> np.dtype[np.void]:
        """One block on the wire."""
        codes = ("u1", self.length // 2) if self.packed else ("i1", self.length)
        return np.dtype([("scale", "<f4"), ("codes", *codes)])

    def size(self, numel: int) -> int:
        """Bytes of `numel` values."""
        return 4 * -(-numel // self.length) + (-(-numel // 2) if self.packed else numel)

    def encode(self, values: Values) -> bytes:
        blocks = _padded(values, self.length).reshape(-1, self.length)
        scaled = np.abs(blocks)
        peaks = scaled.max(axis=1)
        _require_finite(peaks)
        scales = peaks / np.float32(self.levels)
        scales[scales < SMALLEST] = 0
        # dividing by zero where there is no scale would give NaN; zero gives codes of zero
        inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        np.multiply(blocks, inverses[:, None], out=scaled)
        codes = np.rint(scaled, out=scaled).astype("i1")
        records = np.empty(len(blocks), self.record)
        records["scale"] = scales
        records["codes"] = _pack(codes) if self.packed else codes
        return records.tobytes()[: self.size(values.size)]

    def decode(self, data: Encoded, numel: int) -> Values:
        records = self._records(data)
        codes = _unpack(records["codes"]) if self.packed else records["codes"]
        values = codes.astype("<f4")
        values *= records["scale"][:, None]
        return values.reshape(-1)[:numel]

    def is_canonical(self, data: Encoded) -> bool:
        """Whether every scale is one that `encode` writes, and no code is outside [-levels, levels]."""
        records = self._records(data)
        scales = records["scale"]
        codes = _unpack(records["codes"]) if self.packed else records["codes"]
        largest = LARGEST / np.float32(self.levels)
        usable = (scales.view("<u4") == 0) | ((scales >= SMALLEST) & (scales <= largest))
        return bool(usable.all()) and int(codes.min()) >= -self.levels

    def _records(self, data: Encoded) -> npt.NDArray[np.void]:
        return _padded(np.frombuffer(data, "u1"), self.record.itemsize).view(self.record)


_BLOCKS = {"int8": _Blocks(256, 127), "int4": _Blocks(128, 7)}


def carries_values(encoding: Encoding) -> bool:
    """Whether the values themselves travel: there are no deltas and no residuals."""
    return encoding == "fp32"


def encoded_size(encoding: Encoding, numel: int) -> int:
    """Bytes of `numel` values."""
    if encoding in _BLOCKS:
        return _BLOCKS[encoding].size(numel)
    return numel * (4 if encoding == "fp32" else 2)


def encode(encoding: Encoding, values: Values) -> bytes:
    """The bytes of `values`, fp32 [numel].

    Raises FloatingPointError when one of them is not a number, or, unless the values themselves travel, is beyond
    LARGEST.
    """
    if encoding == "fp32":
        if not np.isfinite(values).all():
            raise FloatingPointError("values that are not finite cannot be encoded")
        return values.astype("<f4", copy=False).tobytes()
    if encoding == "bf16":
        _require_finite(np.abs(values))
        bits = values.astype("<f4").view("<u4")
        bits += 0x7FFF + (bits >> 16 & 1)  # half of what is cut off, and to even where that is exactly a half
        return (bits >> 16).astype("<u2").tobytes()
    return _BLOCKS[encoding].encode(values.astype("<f4", copy=False))


def decode(encoding: Encoding, data: Encoded, numel: int) -> Values:
    """The values in the bytes `data`, fp32 [numel]; they may share memory. Raises ValueError for another size."""
    if len(data) != encoded_size(encoding, numel):
        raise ValueError(f"{len(data)} bytes are not {numel} values in {encoding}")
    if encoding == "fp32":
        return np.frombuffer(data, "<f4")
    if encoding == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return _BLOCKS[encoding].decode(data, numel)


def is_finite(encoding: Encoding, path: Path) -> bool:
    """Whether every value in an encoded file of the right size is a number.

    Stricter than that for int8 and int4: scales must be zero or in [SMALLEST, LARGEST / levels], and the lowest code,
    -128 or -8, does not exist. So whatever is decoded is zero or between 1e-38 and LARGEST.
    """
    data = _map_bytes(path)
    if encoding in _BLOCKS:
        blocks = _BLOCKS[encoding]
        return all(blocks.is_canonical(chunk) for chunk in _pieces(data, encoded_size(encoding, CHUNK_VALUES)))
    width = encoded_size(encoding, 1)
    return all(
        bool(np.isfinite(decode(encoding, chunk, chunk.size // width)).all())
        for chunk in _pieces(data, width * CHUNK_VALUES)
    )


def contribute(
    encoding: Encoding, snapshot: Path, base: Path, residual: Path | None, sink: Sink, new_residual: Path
) -> None:
    """Encode what a node trained of one shard.

    Args:
        encoding: with `fp32` the snapshot's own bytes are written, and the arguments below are not looked at.
        snapshot: fp32 values after the training.
        base: fp32 values of the last commit.
        residual: fp32 file with what this node's earlier contributions left out; None for nothing.
        sink: receives encode(snapshot - base + residual).
        new_residual: is written anew with what this contribution leaves out, fp32; keep `residual` until it counts.

    Raises:
        ValueError: the files have not the same number of values.
        FloatingPointError: the snapshot, or the change, is not finite or too large; what was written is of no use.
    """
    trained = map_values(snapshot)
    if carries_values(encoding):
        for chunk in _pieces(trained, CHUNK_VALUES):
            sink.write(encode(encoding, chunk))
        return
    before = _map_sized(base, trained.size)
    deltas = (_subtract(trained[span], before[span]) for span in _spans(trained.size))
    left = _map_sized(residual, trained.size) if residual is not None else None
    _encode_with_feedback(encoding, deltas, left, sink, new_residual)


def average(
    encoding: Encoding,
    contributions: Sequence[tuple[int, Path]],
    base: Path,
    residual: Path | None,
    sink: Sink,
    new_residual: Path,
) -> None:
    """Encode the weighted mean of encoded contributions to one shard.

    Sums in float64 in the given order, one multiplication and one addition at a time, so everybody who averages the
    same contributions gets the same bits; with residuals of their own, reducers differ.

    Args:
        encoding: of the contributions and of the result; with `fp32` there are no residuals.
        contributions: weight (tokens) and file of each, at least one weight above zero.
        base: fp32 values of the last commit; says how many they are.
        residual: fp32 file with what earlier averages of this node left out; None for nothing.
        sink: receives encode(mean + residual), or, with `fp32`, the mean.
        new_residual: is written anew with what this average leaves out, fp32; keep `residual` until it counts.

    Raises:
        ValueError: a contribution or the residual has not the shard's size.
        FloatingPointError: the mean is not finite or too large; what was written is of no use.
    """
    numel = map_values(base).size
    total = float(sum(weight for weight, _ in contributions))
    weights = [float(weight) / total for weight, _ in contributions]
    decoded = [_decoded(encoding, path, numel) for _, path in contributions]
    means = (_weighted_sum(weights, chunks) for chunks in zip(*decoded, strict=True))
    if carries_values(encoding):
        for mean in means:
            sink.write(encode(encoding, mean))
    else:
        left = _map_sized(residual, numel) if residual is not None else None
        _encode_with_feedback(encoding, means, left, sink, new_residual)


def is_applied(encoding: Encoding, rate: float) -> bool:
    """Whether the new values are made from the old ones and a result, and are not the result itself."""
    return rate != 1 or not carries_values(encoding)


def apply(encoding: Encoding, base: Path, encoded: Path, sink: Sink, rate: float = 1.0) -> None:
    """Write the values of a shard after a result, fp32: the same bits on every machine.

    Args:
        encoding: of the result.
        base: fp32 values of the last commit.
        encoded: the result: a delta that is added to them, or, with `fp32`, the new values.
        sink: receives the new values.
        rate: part of the change that is taken over: base + rate * (value - base), one fp32 operation after the other.

    Raises:
        ValueError: `encoded` has not the shard's size.
        FloatingPointError: a new value is not finite, as when base and delta overflow; what was written is of no use.
    """
    before = map_values(base)
    for span, values in zip(_spans(before.size), _decoded(encoding, encoded, before.size), strict=True):
        if is_applied(encoding, rate):
            with np.errstate(over="ignore", invalid="ignore"):
                change = _subtract(values, before[span]) if carries_values(encoding) else values
                if rate != 1:
                    change *= np.float32(rate)
                change += before[span]
            values = change
        sink.write(encode("fp32", values))


def _encode_with_feedback(
    encoding: Encoding, deltas: Iterable[Values], residual: Values | None, sink: Sink, new_residual: Path
) -> None:
    """Write the bytes of a delta plus the residual, and what they leave out.

    Args:
        encoding: one with residuals.
        deltas: consecutive chunks, which are overwritten.
        residual: fp32 of all chunks together; None for nothing.
        sink: receives the bytes.
        new_residual: receives what was left out.
    """
    # a new file: to cut off one that is still mapped would end the process
    new_residual.unlink(missing_ok=True)
    start = 0
    with open(new_residual, "wb") as rest:
        for delta in deltas:
            if residual is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    delta += residual[start : start + delta.size]
            data = encode(encoding, delta)
            sink.write(data)
            delta -= decode(encoding, data, delta.size)
            rest.write(delta.astype("<f4", copy=False).data)
            start += delta.size


def _subtract(values: Values, base: Values) -> Values:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.subtract(values, base).view(np.ndarray)


def _weighted_sum(weights: Sequence[float], chunks: Sequence[Values]) -> Values:
    result = chunks[0].astype(np.float64)
    result *= weights[0]
    for weight, chunk in zip(weights[1:], chunks[1:], strict=True):
        result += weight * chunk.astype(np.float64)
    with np.errstate(over="ignore"):
        return result.astype("<f4")


def _decoded(encoding: Encoding, path: Path, numel: int) -> Iterator[Values]:
    """The values of an encoded file, chunk by chunk. Raises ValueError when it has not the size of `numel` values."""
    if path.stat().st_size != encoded_size(encoding, numel):
        raise ValueError(f"{path.stat().st_size} bytes are not {numel} values in {encoding}")
    pieces = _pieces(_map_bytes(path), encoded_size(encoding, CHUNK_VALUES))
    for span, piece in zip(_spans(numel), pieces, strict=True):
        yield decode(encoding, piece, span.stop - span.start)


def _spans(numel: int) -> Iterator[slice]:
    for start in range(0, numel, CHUNK_VALUES):
        yield slice(start, min(start + CHUNK_VALUES, numel))


def _pieces(array: np.ndarray, length: int) -> Iterator[np.ndarray]:
    for start in range(0, array.size, length):
        yield array[start : start + length]


def _map_sized(path: Path, numel: int) -> Values:
    values = map_values(path)
    if values.size != numel:
        raise ValueError(f"{path.name} holds {values.size} values, not {numel}")
    return values


def _map_bytes(path: Path) -> np.ndarray:
    return np.memmap(path, dtype="u1", mode="r").view(np.ndarray)


def _padded(array: np.ndarray, multiple: int) -> np.ndarray:
    """The flat `array`, with zeros behind it up to a multiple of `multiple` elements."""
    short = -array.size % multiple
    return np.concatenate([array, np.zeros(short, array.dtype)]) if short else array


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two codes in a byte, the first in its lower half: int8 [N, L] to uint8 [N, L / 2]."""
    pairs = codes.view("<u2")
    return (pairs & 0x0F | pairs >> 4 & 0xF0).astype("u1")


def _unpack(packed: np.ndarray) -> np.ndarray:
    """The codes in uint8 [N, L / 2], int8 [N, L]."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view("i1")
    # extends the sign of four bits: 8 to 15 stand for -8 to -1
    codes ^= 8
    codes -= 8
    return codes


def _require_finite(magnitudes: Values) -> None:
    # written so that NaN fails
    if not magnitudes.max(initial=0) <= LARGEST:
        raise FloatingPointError(f"a change that is not finite, or beyond {LARGEST:.0e}, cannot be encoded")
