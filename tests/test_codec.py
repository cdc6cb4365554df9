"""What travels in a round: averages are exact, all who apply a result get the same bits, nothing is lost for ever, and
what a peer sends is looked at first."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import codec
from swarm.manifest import Encoding

Values = npt.NDArray[np.float32]

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
LOSSY: tuple[Encoding, ...] = ("bf16", "int8", "int4")
INTEGERS: tuple[Encoding, ...] = ("int8", "int4")
TINY = float(np.finfo(np.float32).smallest_normal)


def write(path: Path, values: npt.ArrayLike) -> Path:
    path.write_bytes(np.asarray(values, "<f4").tobytes())
    return path


def read(path: Path) -> Values:
    return np.fromfile(path, "<f4")


def wide(seed: int, numel: int = 1000) -> Values:
    """Values of many magnitudes."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(numel) * 10.0 ** generator.integers(-6, 6, numel)).astype("<f4")


def shards(folder: Path, count: int, numel: int = 1000) -> list[tuple[Path, Values]]:
    return [(write(folder / str(seed), wide(seed, numel)), wide(seed, numel)) for seed in range(count)]


def averaged(encoding: Encoding, contributions: list[tuple[int, Path]], numel: int = 1000) -> bytes:
    folder = contributions[0][1].parent
    base = write(folder / "base", np.zeros(numel))
    sink = io.BytesIO()
    codec.average(encoding, contributions, base, None, sink, folder / "left")
    return sink.getvalue()


def applied(encoding: Encoding, base: Path, encoded: Path) -> Values:
    sink = io.BytesIO()
    codec.apply(encoding, base, encoded, sink)
    return np.frombuffer(sink.getvalue(), "<f4")


def round_trip(encoding: Encoding, values: Values) -> Values:
    return codec.decode(encoding, codec.encode(encoding, values), values.size)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_part_of_the_change_is_taken_over_in_single_precision(
    tmp_path: Path, encoding: Encoding, rate: float
) -> None:
    base, change = write(tmp_path / "base", wide(1)), wide(2)
    encoded = tmp_path / "encoded"
    encoded.write_bytes(codec.encode(encoding, change))
    sink = io.BytesIO()
    codec.apply(encoding, base, encoded, sink, rate)
    told = codec.decode(encoding, encoded.read_bytes(), change.size)
    delta = told - wide(1) if codec.carries_values(encoding) else told
    expected = told if rate == 1 and codec.carries_values(encoding) else wide(1) + np.float32(rate) * delta
    assert sink.getvalue() == expected.astype("<f4").tobytes()
    assert codec.is_applied(encoding, rate) == (encoding != "fp32" or rate != 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_size_of_the_chunks_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Encoding
) -> None:
    snapshots = shards(tmp_path, 3)
    base = write(tmp_path / "before", wide(7) / 2)
    results = set()
    for size in (256, 512, 1 << 20):
        monkeypatch.setattr(codec, "CHUNK_VALUES", size)
        contributions = []
        for weight, (snapshot, _) in enumerate(snapshots, 1):
            encoded = tmp_path / f"encoded-{weight}"
            with encoded.open("wb") as sink:
                codec.contribute(encoding, snapshot, base, None, sink, tmp_path / f"left-{weight}")
            assert codec.is_finite(encoding, encoded)
            contributions.append((weight, encoded))
        result = tmp_path / "result"
        with result.open("wb") as sink:
            codec.average(encoding, contributions, base, None, sink, tmp_path / "left")
        files = [result, *sorted(tmp_path.glob("encoded-*")), *sorted(tmp_path.glob("left*"))]
        results.add(b"".join(path.read_bytes() for path in files) + applied(encoding, base, result).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("encoding", LOSSY)
def test_threads_do_not_matter(tmp_path: Path, encoding: Encoding) -> None:
    base = write(tmp_path / "base", wide(0, 100_000))
    encoded = tmp_path / "encoded"
    encoded.write_bytes(codec.encode(encoding, wide(1, 100_000)))
    alone = applied(encoding, base, encoded).tobytes()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: applied(encoding, base, encoded).tobytes(), range(8)))
    assert set(together) == {alone}


@pytest.mark.parametrize("encoding", LOSSY)
def test_new_values_are_the_sum_rounded_once(tmp_path: Path, encoding: Encoding) -> None:
    delta = codec.encode(encoding, wide(1))
    encoded = tmp_path / "encoded"
    encoded.write_bytes(delta)
    expected = (wide(0).astype(np.float64) + codec.decode(encoding, delta, 1000)).astype("<f4")
    assert applied(encoding, write(tmp_path / "base", wide(0)), encoded).tobytes() == expected.tobytes()


def test_fp32_travels_as_it_is(tmp_path: Path) -> None:
    ((snapshot, values),) = shards(tmp_path, 1)
    base = write(tmp_path / "base", wide(9))
    sink = io.BytesIO()
    codec.contribute("fp32", snapshot, base, None, sink, tmp_path / "left")
    assert sink.getvalue() == values.tobytes()
    assert not (tmp_path / "left").exists()
    assert applied("fp32", base, snapshot).tobytes() == values.tobytes()


@pytest.mark.parametrize("encoding", LOSSY)
def test_delta_is_what_was_trained_and_what_was_left(tmp_path: Path, encoding: Encoding) -> None:
    base, trained, left = wide(0), wide(1), wide(2) / np.float32(100)
    sink = io.BytesIO()
    codec.contribute(
        encoding,
        write(tmp_path / "snapshot", trained),
        write(tmp_path / "base", base),
        write(tmp_path / "residual", left),
        sink,
        tmp_path / "new",
    )
    delta = trained - base + left
    assert sink.getvalue() == codec.encode(encoding, delta)
    assert (read(tmp_path / "new") == delta - round_trip(encoding, delta)).all()


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_residual_may_be_replaced_by_the_next(tmp_path: Path, encoding: Encoding) -> None:
    base, snapshot = write(tmp_path / "base", wide(0)), write(tmp_path / "snapshot", wide(1))
    residual, copy = write(tmp_path / "residual", wide(2)), write(tmp_path / "copy", wide(2))
    codec.contribute(encoding, snapshot, base, copy, io.BytesIO(), tmp_path / "new")
    codec.contribute(encoding, snapshot, base, residual, io.BytesIO(), residual)
    assert residual.read_bytes() == (tmp_path / "new").read_bytes()


@pytest.mark.parametrize("encoding", LOSSY)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_over_many_rounds_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, encoding: Encoding, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("rounds")
    numel, rounds = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 20))
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    base = write(folder / "base", np.zeros(numel))
    true, sent = np.zeros(numel), np.zeros(numel)
    residual = None
    for number in range(rounds):
        delta = (generator.standard_normal(numel) * 10.0 ** generator.integers(-3, 3, numel)).astype("<f4")
        sink = io.BytesIO()
        new = folder / f"left-{number}"
        codec.contribute(encoding, write(folder / "snapshot", delta), base, residual, sink, new)
        true += delta
        sent += codec.decode(encoding, sink.getvalue(), numel)
        residual = new
        # what is missing is what the residual holds: it does not grow with the rounds
        rounding = 1e-6 * rounds * 4000
        assert np.abs(true - sent - read(new)).max() <= rounding
        assert np.abs(read(new)).max() <= np.abs(sent).max() + np.abs(delta).max()


@pytest.mark.parametrize("encoding", INTEGERS)
def test_without_feedback_small_changes_would_never_arrive(tmp_path: Path, encoding: Encoding) -> None:
    delta = np.full(256, 1e-3, np.float32)
    delta[::128] = 1  # beside which the others are nothing
    snapshot, base = write(tmp_path / "snapshot", delta), write(tmp_path / "base", np.zeros(256))
    assert round_trip(encoding, delta)[1] == 0
    sent = np.zeros(256)
    residual = None
    for number in range(600):
        sink = io.BytesIO()
        new = tmp_path / f"left-{number % 2}"
        codec.contribute(encoding, snapshot, base, residual, sink, new)
        sent += codec.decode(encoding, sink.getvalue(), 256)
        residual = new
    assert sent[1] == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 4], [1, 10**9, 0, 7, 2]])
def test_average_is_the_float64_mean(tmp_path: Path, weights: list[int]) -> None:
    written = shards(tmp_path, len(weights))
    result = averaged("fp32", [(weight, path) for weight, (path, _) in zip(weights, written, strict=True)])
    total = float(sum(weights))
    expected = sum(
        weight / total * values.astype(np.float64) for weight, (_, values) in zip(weights, written, strict=True)
    )
    assert result == np.asarray(expected).astype("<f4").tobytes()


@pytest.mark.parametrize("encoding", LOSSY)
def test_average_is_the_mean_of_what_was_decoded(tmp_path: Path, encoding: Encoding) -> None:
    weights, paths, decoded = [3, 0, 4], [], []
    for number in range(3):
        data = codec.encode(encoding, wide(number))
        paths.append(tmp_path / f"encoded-{number}")
        paths[-1].write_bytes(data)
        decoded.append(codec.decode(encoding, data, 1000).astype(np.float64))
    mean = (3 / 7 * decoded[0] + 0.0 * decoded[1] + 4 / 7 * decoded[2]).astype("<f4")
    left = wide(5) / np.float32(100)
    sink = io.BytesIO()
    codec.average(
        encoding,
        list(zip(weights, paths, strict=True)),
        write(tmp_path / "base", wide(6)),
        write(tmp_path / "residual", left),
        sink,
        tmp_path / "new",
    )
    assert sink.getvalue() == codec.encode(encoding, mean + left)
    assert (read(tmp_path / "new") == (mean + left) - round_trip(encoding, mean + left)).all()


def test_one_contributor_keeps_its_bits(tmp_path: Path) -> None:
    ((path, values),) = shards(tmp_path, 1)
    assert averaged("fp32", [(12345, path)]) == values.tobytes()


def test_equal_contributions_average_to_themselves(tmp_path: Path) -> None:
    ((path, values),) = shards(tmp_path, 1)
    assert averaged("fp32", [(1, path), (2, path), (4, path)]) == values.tobytes()


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("weights", [[5], [1, 2, 4]])
def test_contributions_that_agree_are_encoded_again_as_they_were(
    tmp_path: Path, encoding: Encoding, weights: list[int]
) -> None:
    data = codec.encode(encoding, wide(0))
    path = tmp_path / "encoded"
    path.write_bytes(data)
    values = codec.decode(encoding, data, 1000)
    result = codec.decode(encoding, averaged(encoding, [(weight, path) for weight in weights]), 1000)
    # the scale may be its neighbour in fp32; the codes are the same
    np.testing.assert_allclose(result, values, rtol=1.3e-7, atol=0)
    np.testing.assert_array_equal(read(tmp_path / "left"), values - result)


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 499, 999])
def test_one_value_that_is_no_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Encoding, bad: float, place: int
) -> None:
    monkeypatch.setattr(codec, "CHUNK_VALUES", 300)
    data = bytearray(codec.encode(encoding, wide(0)))
    path = tmp_path / "encoded"
    path.write_bytes(data)
    assert codec.is_finite(encoding, path)
    width = len(data) // 1000
    data[place * width : (place + 1) * width] = np.float32(bad).tobytes()[-width:]
    path.write_bytes(data)
    assert not codec.is_finite(encoding, path)


@pytest.mark.parametrize("encoding", INTEGERS)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-45, TINY / 2, 3.4e38, 5e37])
@pytest.mark.parametrize("block", [0, 1, -1])
def test_a_scale_that_no_encoder_writes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Encoding, scale: float, block: int
) -> None:
    monkeypatch.setattr(codec, "CHUNK_VALUES", 256)
    data = bytearray(codec.encode(encoding, wide(0)))
    path = tmp_path / "encoded"
    path.write_bytes(data)
    assert codec.is_finite(encoding, path)
    start = range(0, len(data), 260 if encoding == "int8" else 68)[block]
    data[start : start + 4] = np.float32(scale).tobytes()
    path.write_bytes(data)
    assert not codec.is_finite(encoding, path)


@pytest.mark.parametrize(("encoding", "byte"), [("int8", 0x80), ("int4", 0x08), ("int4", 0x80)])
@pytest.mark.parametrize("place", [4, 300, -1])
def test_a_code_that_no_encoder_writes_is_found(tmp_path: Path, encoding: Encoding, byte: int, place: int) -> None:
    data = bytearray(codec.encode(encoding, wide(0)))
    data[place] = byte
    path = tmp_path / "encoded"
    path.write_bytes(data)
    assert not codec.is_finite(encoding, path)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_bytes_that_pass_decode_to_numbers(
    tmp_path_factory: pytest.TempPathFactory, encoding: Encoding, data: st.DataObject
) -> None:
    numel = data.draw(st.integers(1, 300))
    size = codec.encoded_size(encoding, numel)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    path = tmp_path_factory.mktemp("raw") / "encoded"
    path.write_bytes(raw)
    if codec.is_finite(encoding, path):
        assert np.isfinite(codec.decode(encoding, raw, numel)).all()


@pytest.mark.parametrize("encoding", LOSSY)
def test_an_overflow_is_told_to_whoever_applies(tmp_path: Path, encoding: Encoding) -> None:
    base = write(tmp_path / "base", np.full(300, 3e38))
    encoded = tmp_path / "encoded"
    encoded.write_bytes(codec.encode(encoding, np.full(300, 2e38, np.float32)))
    assert codec.is_finite(encoding, encoded)
    with pytest.raises(FloatingPointError, match="not finite"):
        applied(encoding, base, encoded)


def test_values_that_are_not_finite_are_not_applied(tmp_path: Path) -> None:
    base, encoded = write(tmp_path / "base", [0, 0]), write(tmp_path / "encoded", [1, np.nan])
    with pytest.raises(FloatingPointError, match="not finite"):
        applied("fp32", base, encoded)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_snapshot_that_is_not_finite_is_not_contributed(tmp_path: Path, encoding: Encoding) -> None:
    base, snapshot = write(tmp_path / "base", [0, 0]), write(tmp_path / "snapshot", [1, np.nan])
    with pytest.raises(FloatingPointError, match="not finite"):
        codec.contribute(encoding, snapshot, base, None, io.BytesIO(), tmp_path / "left")


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_change_that_overflows_is_not_contributed(tmp_path: Path, encoding: Encoding) -> None:
    base, snapshot = write(tmp_path / "base", [-3e38, 0]), write(tmp_path / "snapshot", [3e38, 0])
    with pytest.raises(FloatingPointError, match="beyond"):
        codec.contribute(encoding, snapshot, base, None, io.BytesIO(), tmp_path / "left")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_of_another_size_are_refused(tmp_path: Path, encoding: Encoding) -> None:
    base = write(tmp_path / "base", wide(0))
    encoded = tmp_path / "encoded"
    encoded.write_bytes(codec.encode(encoding, wide(0, 1001)))
    with pytest.raises(ValueError, match="bytes are not 1000 values"):
        applied(encoding, base, encoded)
    with pytest.raises(ValueError, match="bytes are not 1000 values"):
        codec.average(encoding, [(1, encoded)], base, None, io.BytesIO(), tmp_path / "left")


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_damaged_residual_is_refused(tmp_path: Path, encoding: Encoding) -> None:
    base, short = write(tmp_path / "base", wide(0)), write(tmp_path / "residual", wide(0, 999))
    with pytest.raises(ValueError, match="residual holds 999 values, not 1000"):
        codec.contribute(encoding, base, base, short, io.BytesIO(), tmp_path / "left")
