"""The corpus: the order of its blocks, its split, its fingerprint, its sources and what it says of bad files."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import UserError
from node.builtin_text import module_texts, topic_texts
from node.corpus import Corpus, check_fingerprint, load_corpus, shuffled
from swarm.manifest import DataSettings

FILES = DataSettings(source="files", block_tokens=8)
LINES = [f"line {number}: naïve café ☕\n" for number in range(40)]
uint64 = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def builtin() -> Corpus:
    return load_corpus(DataSettings(block_tokens=128), seed=3, files=[])


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def numbered(num_tokens: int, block_tokens: int, seed: int = 0) -> Corpus:
    return Corpus(np.arange(num_tokens, dtype=np.uint16), np.arange(500, dtype=np.uint16), block_tokens, seed)


def decoded(tokens: np.ndarray) -> str:
    return bytes((tokens[tokens > 2] - 3).tolist()).decode()


@settings(deadline=None)
@given(size=st.integers(1, 700), seed=uint64, epoch=uint64)
def test_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(position, size, seed, epoch) for position in range(size)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 2**48), seed=uint64, epoch=uint64, data=st.data())
def test_order_of_a_huge_epoch_has_no_repeats(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    places = {shuffled(position, size, seed, epoch) for position in positions}
    assert len(places) == len(positions)
    assert all(0 <= place < size for place in places)


def test_order_depends_on_seed_and_epoch_and_mixes() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [shuffled(position, 1000, seed, epoch) for position in range(1000)]

    first = np.array(order(0, 0))
    for other in (order(1, 0), order(0, 1), list(range(1000))):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15
    assert np.mean(np.diff(first) == 1) < 0.02


def test_order_is_the_same_on_every_machine() -> None:
    assert [shuffled(position, 10, 7, 2) for position in range(10)] == [2, 0, 5, 8, 7, 6, 9, 4, 1, 3]


def test_epoch_trains_every_token_once() -> None:
    corpus = numbered(1003, block_tokens=10, seed=5)
    assert corpus.num_blocks == 100
    for epoch in range(3):
        blocks = corpus.blocks(range(epoch * 100, epoch * 100 + 100))
        assert blocks.shape == (100, 11) and blocks.dtype == np.int64
        assert sorted(blocks[:, :-1].ravel()) == list(range(1000))
        assert (blocks[:, 1:] == blocks[:, :-1] + 1).all()


def test_block_is_a_row_of_blocks() -> None:
    corpus = numbered(1003, block_tokens=10)
    assert (corpus.block(777) == corpus.blocks([1, 777])[1]).all()


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_heldout_blocks_span_the_heldout_tokens(count: int) -> None:
    blocks = numbered(1000, block_tokens=10).heldout_blocks(count)
    assert blocks.shape == (count, 11)
    starts = blocks[:, 0]
    assert starts[:1].tolist() == [0][:count]
    if count > 1:
        assert blocks[-1, -1] == 499
        assert np.ptp(np.diff(starts)) <= 1


def test_builtin_text_is_large_and_deterministic(builtin: Corpus) -> None:
    again = load_corpus(DataSettings(block_tokens=32), seed=9, files=[])
    assert again.fingerprint == builtin.fingerprint
    assert builtin.num_blocks > 10_000
    assert len(builtin.heldout) / (len(builtin.train) + len(builtin.heldout)) == pytest.approx(0.05, abs=0.001)
    assert max(builtin.train.max(), builtin.heldout.max()) < 259


def test_builtin_text_is_documentation() -> None:
    assert any("The `if` statement" in text or 'The "if" statement' in text for text in topic_texts())
    assert any("Return a shallow copy" in text or "Shallow copy operation" in text for text in module_texts())


def test_text_splits_into_training_and_heldout(text_file: Path) -> None:
    corpus = load_corpus(FILES, seed=0, files=[text_file])
    tokens = len("".join(LINES).encode()) + 1
    assert len(corpus.heldout) == tokens // 20
    assert corpus.train[-1] == corpus.heldout[-1] == 1
    assert decoded(corpus.train) + decoded(corpus.heldout) == "".join(LINES)


def test_each_file_is_split_by_itself(text_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("x" * 1000)
    corpus = load_corpus(FILES, seed=0, files=[text_file, other])
    assert decoded(corpus.heldout).endswith("".join(LINES)[-30:] + "x" * 49)
    assert decoded(corpus.train).startswith("line 0") and decoded(corpus.train).endswith("x" * 951)


def test_jsonl_and_parquet_give_the_same_tokens(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "odd [1]*.jsonl", tmp_path / "lines.parquet"
    jsonl.write_text("".join(json.dumps({"id": i, "text": line}) + "\n" for i, line in enumerate(LINES)))
    datasets.Dataset.from_dict({"id": list(range(len(LINES))), "text": LINES}).to_parquet(parquet)
    from_jsonl, from_parquet = (load_corpus(FILES, seed=0, files=[path]) for path in (jsonl, parquet))
    assert from_jsonl.fingerprint == from_parquet.fingerprint
    both = np.concatenate([from_jsonl.train[:-1], from_jsonl.heldout])
    assert np.count_nonzero(both == 1) == len(LINES)
    assert decoded(both) == "".join(LINES)


def test_fingerprint_tells_texts_and_splits_apart() -> None:
    train, heldout = np.arange(40, dtype=np.uint16), np.arange(20, dtype=np.uint16)
    moved = Corpus(np.concatenate([train, heldout[:10]]), heldout[10:], 8, 0)
    corpora = [Corpus(train, heldout, 8, 0), Corpus(train[::-1].copy(), heldout, 8, 0), moved]
    assert len({corpus.fingerprint for corpus in corpora}) == 3


@pytest.mark.parametrize(
    ("source", "remedy"), [("builtin", "use the author's version"), ("files", "give --data the author's files")]
)
def test_other_text_than_the_authors_is_refused(text_file: Path, source: str, remedy: str) -> None:
    corpus = load_corpus(FILES, seed=0, files=[text_file])
    run = FILES.model_copy(update={"source": source, "fingerprint": "0123456789ab" + "f" * 52})
    with pytest.raises(UserError, match=rf"{corpus.fingerprint[:12]}.*0123456789ab; .*{remedy}"):
        check_fingerprint(corpus, run)
    check_fingerprint(corpus, run.model_copy(update={"fingerprint": corpus.fingerprint}))
    check_fingerprint(corpus, run.model_copy(update={"source": "own", "fingerprint": ""}))


def test_sources_and_files_must_fit(text_file: Path) -> None:
    with pytest.raises(UserError, match="builtin text; leave out --data"):
        load_corpus(DataSettings(block_tokens=8), seed=0, files=[text_file])
    for source in ("files", "own"):
        with pytest.raises(UserError, match="name at least one with --data"):
            load_corpus(FILES.model_copy(update={"source": source}), seed=0, files=[])


def write_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "write", "complaint"),
    [
        ("gone.txt", lambda path: None, "No such file"),
        ("folder", Path.mkdir, "is a folder"),
        ("empty.txt", write_bytes(b""), "is empty"),
        ("latin.txt", write_bytes(b"ok\n" * 400_000 + b"caf\xe9"), "not UTF-8 at byte 1200003"),
        ("latin.jsonl", write_bytes(b'{"text": "caf\xe9"}\n'), "not UTF-8 at byte 13"),
        ("cut.txt", write_bytes("☕".encode()[:-1]), "not UTF-8 at byte 0"),
        ("text.docx", write_bytes(b"text"), "unknown kind of file"),
        ("short.txt", write_bytes(b"a few words, but not the tokens of a held-out block"), "too short"),
        ("other.jsonl", write_bytes(b'{"body": "x"}\n'), 'has no "text"'),
        ("null.jsonl", write_bytes(b'{"text": "x"}\n{"text": null}\n'), "record 2"),
        ("number.jsonl", write_bytes(b'{"text": 1}\n'), "record 1"),
        ("blank.jsonl", write_bytes(b"\n\n"), "no records"),
        ("broken.jsonl", write_bytes(b'{"text": "x"}\n{"text": \n'), "not valid jsonl"),
        ("broken.parquet", write_bytes(b"PAR1"), "not valid parquet"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, name: str, write: Callable[[Path], object], complaint: str
) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(UserError, match=complaint) as refusal:
        load_corpus(FILES, seed=0, files=[path])
    assert "\n" not in str(refusal.value)
