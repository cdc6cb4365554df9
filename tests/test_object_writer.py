"""Receiving an object: in any order, from anybody, and only the right bytes get its name."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.store import ObjectWriter

DATA = bytes(range(100))
DIGEST = hashlib.sha256(DATA).hexdigest()


def writer_in(folder: Path, digest: str = DIGEST, size: int = len(DATA)) -> ObjectWriter:
    return ObjectWriter(folder / digest, digest, size, durable=False, place=lambda path: None)


@st.composite
def orders(draw: st.DrawFn) -> list[tuple[int, int]]:
    """The whole object in pieces, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, len(DATA) - 1), max_size=8)))
    return draw(st.permutations(list(zip([0, *cuts], [*cuts, len(DATA)], strict=True))))


@given(orders(), st.data())
def test_pieces_in_any_order_make_the_object(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("objects", numbered=True)
    with writer_in(folder) as writer:
        here: set[int] = set()
        for start, end in order:
            writer.write_at(start, DATA[start:end])
            here |= set(range(start, end))
            assert {place for first, last in writer.gaps for place in range(first, last)} == set(range(100)) - here
            assert writer.missing == 100 - len(here)
        for start, end in data.draw(st.lists(st.sampled_from(order), max_size=3)):
            writer.forget(start, end)
            assert not writer.gaps or all(a < b for a, b in writer.gaps)
        for start, end in writer.gaps.copy():
            writer.write_at(start, DATA[start:end])
        writer.finish()
    assert [path.read_bytes() for path in folder.iterdir()] == [DATA]


def test_forgotten_bytes_are_replaced_and_hashed_anew(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        writer.write(b"lies" + DATA[4:50])
        writer.forget(0, 10)
        writer.forget(5, 20)
        assert writer.gaps == [(0, 20), (50, 100)]
        writer.write_at(0, DATA[:20])
        writer.write_at(50, DATA[50:])
        writer.finish()
    assert writer.final.read_bytes() == DATA


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (9, 1), (5, 10), (15, 10), (8, 4)])
def test_bytes_that_are_here_are_not_replaced(tmp_path: Path, offset: int, size: int) -> None:
    with writer_in(tmp_path) as writer:
        writer.write_at(0, DATA[:10])
        writer.write_at(20, DATA[20:30])
        with pytest.raises(ValueError, match="here already"):
            writer.write_at(offset, b"x" * size)
        assert writer.gaps == [(10, 20), (30, 100)]


def test_bytes_beyond_the_end_are_refused(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer, pytest.raises(ValueError, match="more than 100 bytes"):
        writer.write_at(99, b"xx")


def test_an_object_with_a_gap_has_no_name(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        writer.write_at(1, DATA[1:])
        with pytest.raises(ValueError, match="some are missing"):
            writer.finish()
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_are_set_aside_and_the_next_attempt_counts(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        writer.write_at(50, DATA[50:])
        writer.write_at(0, b"x" * 50)
        with pytest.raises(ValueError, match="do not match"):
            writer.finish()
        aside = writer.set_aside()
        assert aside.read_bytes() == b"x" * 50 + DATA[50:]
        writer.open()
        assert writer.missing == 100
        writer.write(DATA)
        writer.finish()
    assert sorted(tmp_path.iterdir()) == sorted([aside, writer.final]) and writer.final.read_bytes() == DATA


def test_closing_is_safe_at_any_time(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.close()
    writer.open()
    writer.write(DATA[:5])
    writer.close()
    writer.close()
    assert not list(tmp_path.iterdir())
