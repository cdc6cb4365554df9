"""Encodings are small, say their size beforehand, and err by less than they promise; every input comes back as numbers
or is refused."""

from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from swarm import codec
from swarm.manifest import Encoding

Values = npt.NDArray[np.float32]

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
LOSSY: tuple[Encoding, ...] = ("bf16", "int8", "int4")
INTEGERS: tuple[Encoding, ...] = ("int8", "int4")
LENGTHS = {"int8": 256, "int4": 128}
LEVELS = {"int8": 127, "int4": 7}
TINY = float(np.finfo(np.float32).smallest_normal)
LARGEST = float(codec.LARGEST)

finite = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)
vectors = st.integers(1, 700).flatmap(lambda numel: arrays(np.float32, numel, elements=finite, fill=st.just(0.0)))


def wide(seed: int, numel: int = 1000) -> Values:
    """Values of many magnitudes."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(numel) * 10.0 ** generator.integers(-6, 6, numel)).astype("<f4")


def round_trip(encoding: Encoding, values: Values) -> Values:
    return codec.decode(encoding, codec.encode(encoding, values), values.size)


def bound(encoding: Encoding, values: Values) -> npt.NDArray[np.float64]:
    """How far each decoded value may be from its own."""
    if encoding == "fp32":
        return np.zeros(values.size)
    if encoding == "bf16":
        return np.abs(values, dtype=np.float64) * 2.0**-8 + 2.0**-134
    length = LENGTHS[encoding]
    blocks = np.pad(np.abs(values, dtype=np.float64), (0, -values.size % length)).reshape(-1, length)
    # half a step, and the rounding of fp32; blocks that are nearly zero become zero
    half = blocks.max(axis=1) / LEVELS[encoding] * 0.50002
    half = np.maximum(half, (half < TINY) * LEVELS[encoding] * TINY)
    return np.repeat(half, length)[: values.size]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(values=vectors)
@settings(deadline=None)
def test_what_comes_back_is_close_and_can_be_trusted(encoding: Encoding, values: Values) -> None:
    back = round_trip(encoding, values)
    assert back.dtype == np.float32
    assert np.isfinite(back).all()
    assert (np.abs(back.astype(np.float64) - values) <= bound(encoding, values)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(numel=st.integers(1, 2000))
@settings(deadline=None)
def test_size_is_known_beforehand(encoding: Encoding, numel: int) -> None:
    assert len(codec.encode(encoding, wide(0, numel))) == codec.encoded_size(encoding, numel)


@pytest.mark.parametrize(("encoding", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.256), ("int4", 0.135)])
def test_share_of_the_bytes(encoding: Encoding, share: float) -> None:
    numel = 3 * 128 * 1024
    assert codec.encoded_size(encoding, numel) <= share * 4 * numel


def test_only_fp32_carries_values() -> None:
    assert [encoding for encoding in ENCODINGS if codec.carries_values(encoding)] == ["fp32"]


def test_fp32_keeps_every_bit() -> None:
    values = wide(0)
    assert codec.encode("fp32", values) == values.tobytes()
    assert round_trip("fp32", values).tobytes() == values.tobytes()


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF, 0x00008000, 0x00018000], "<u4")
    rounded = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF80, 0x0000, 0x0002]
    assert np.frombuffer(codec.encode("bf16", bits.view("<f4")), "<u2").tolist() == rounded


def test_int8_on_the_wire() -> None:
    values = np.zeros(300, np.float32)
    values[:3] = 127, -127, 2.4
    values[256:258] = -1, 0.5
    data = codec.encode("int8", values)
    assert np.frombuffer(data[:4], "<f4") == 1
    assert np.frombuffer(data[4:260], "i1").tolist() == [127, -127, 2] + [0] * 253
    assert np.frombuffer(data[260:264], "<f4") == np.float32(1 / 127)
    assert np.frombuffer(data[264:], "i1").tolist() == [-127, 64] + [0] * 42


def test_int4_on_the_wire() -> None:
    values = np.zeros(131, np.float32)
    values[:4] = 7, -7, 0, 3.4
    values[128:] = 14, -2, -4
    data = codec.encode("int4", values)
    assert np.frombuffer(data[:4], "<f4") == 1
    assert list(data[4:68]) == [0x97, 0x30] + [0] * 62
    assert np.frombuffer(data[68:72], "<f4") == 2
    assert list(data[72:]) == [0xF7, 0x0E]


@pytest.mark.parametrize("encoding", INTEGERS)
def test_every_code_comes_back(encoding: Encoding) -> None:
    levels = LEVELS[encoding]
    codes = np.arange(-levels, levels + 1, dtype=np.float32)
    assert round_trip(encoding, codes).tolist() == codes.tolist()
    assert round_trip(encoding, codes[::-1].copy()).tolist() == codes[::-1].tolist()


@pytest.mark.parametrize("encoding", INTEGERS)
def test_a_block_knows_nothing_of_its_neighbours(encoding: Encoding) -> None:
    length = LENGTHS[encoding]
    values = wide(0, 3 * length)
    values[:length] *= np.float32(1e9)
    alone = round_trip(encoding, values[length : 2 * length].copy())
    assert round_trip(encoding, values)[length : 2 * length].tobytes() == alone.tobytes()


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("size", [0.0, -0.0, 1e-45, 1e-40, TINY, -TINY, 100 * TINY, 127 * TINY, 1e-30, 1e30, 3e38])
def test_blocks_of_one_size_survive(tmp_path: Path, encoding: Encoding, size: float) -> None:
    values = np.full(500, size, np.float32)
    back = round_trip(encoding, values)
    assert (np.abs(back.astype(np.float64) - values) <= bound(encoding, values)).all()
    path = tmp_path / "encoded"
    path.write_bytes(codec.encode(encoding, values))
    assert codec.is_finite(encoding, path)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_encoded(encoding: Encoding, bad: float) -> None:
    values = wide(0)
    values[500] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        codec.encode(encoding, values)


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_delta_that_could_overflow_is_not_encoded(encoding: Encoding) -> None:
    with pytest.raises(FloatingPointError, match="beyond 3e"):
        codec.encode(encoding, np.array([0, 3.3e38], np.float32))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_size_is_refused(encoding: Encoding) -> None:
    data = codec.encode(encoding, wide(0))
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="bytes are not 1000 values"):
            codec.decode(encoding, wrong, 1000)
