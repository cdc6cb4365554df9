"""Averages are exact: the float64 mean, rounded once, the same bits whatever the size of the chunks."""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from swarm import codec

Values = npt.NDArray[np.float32]


def shards(folder: Path, count: int, numel: int = 1000) -> list[tuple[Path, Values]]:
    generator = np.random.default_rng(count)
    written = []
    for index in range(count):
        values = (generator.standard_normal(numel) * 10.0 ** generator.integers(-6, 6, numel)).astype("<f4")
        path = folder / str(index)
        path.write_bytes(values.tobytes())
        written.append((path, values))
    return written


def averaged(contributions: list[tuple[int, Path]]) -> bytes:
    sink = io.BytesIO()
    codec.average(contributions, sink)
    return sink.getvalue()


@pytest.mark.parametrize("weights", [[1, 1], [3, 1, 4], [1, 10**9, 0, 7, 2]])
def test_average_is_the_float64_mean(tmp_path: Path, weights: list[int]) -> None:
    written = shards(tmp_path, len(weights))
    result = averaged([(weight, path) for weight, (path, _) in zip(weights, written, strict=True)])
    total = float(sum(weights))
    expected = sum(
        weight / total * values.astype(np.float64) for weight, (_, values) in zip(weights, written, strict=True)
    )
    assert result == np.asarray(expected).astype("<f4").tobytes()


def test_one_contributor_keeps_its_bits(tmp_path: Path) -> None:
    ((path, values),) = shards(tmp_path, 1)
    assert averaged([(12345, path)]) == values.tobytes()


def test_equal_contributions_average_to_themselves(tmp_path: Path) -> None:
    ((path, values),) = shards(tmp_path, 1)
    assert averaged([(1, path), (2, path), (4, path)]) == values.tobytes()


def test_size_of_the_chunks_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contributions = [(index + 1, path) for index, (path, _) in enumerate(shards(tmp_path, 3))]
    results = set()
    for size in (1, 7, 999, 1000, 1 << 20):
        monkeypatch.setattr(codec, "CHUNK_VALUES", size)
        results.add(averaged(contributions))
    assert len(results) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 499, 999])
def test_one_value_that_is_no_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, place: int
) -> None:
    monkeypatch.setattr(codec, "CHUNK_VALUES", 300)
    ((path, values),) = shards(tmp_path, 1)
    assert codec.is_finite(path)
    values[place] = bad
    path.write_bytes(values.tobytes())
    assert not codec.is_finite(path)
