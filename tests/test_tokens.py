"""Hugging Face tokenizers: the corpus they give, what tells them apart, and one clear line where they do not fit."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from model.errors import UserError
from model.tokenizer import load_tokenizer
from node import tokens as tokens_module
from node.builtin_text import topic_texts
from node.corpus import Corpus, check_fingerprint, load_corpus
from node.tokens import BYTE_ENCODER, Encoder, Piece, check_tokenizer, open_encoder
from node.trainer_main import _open_corpus
from swarm.manifest import DataSettings, Manifest

END = "<|endoftext|>"
NAME = "somebody/small"
DATA = DataSettings(source="files", tokenizer=NAME, block_tokens=8)
TEXTS = [f"document {number} says: naïve café ☕\n\n  and more." for number in range(40)]


def save_tokenizer(folder: Path, vocab_size: int, eos_token: str | None = END) -> Path:
    """Train a byte-level BPE on the embedded text and save it as people do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topic_texts()[:20], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizers") / "small", 400)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return open_encoder(NAME, 400, folder)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def whole(texts: Iterable[str]) -> list[Piece]:
    return [(text, True) for text in texts]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_round_trip_with_an_end_after_each_document(encoder: Encoder, folder: Path) -> None:
    tokens = encoder.encode(whole(TEXTS))
    assert tokens.dtype == np.uint16 and tokens.max() < encoder.vocab_size == 400
    assert len(tokens) < len("".join(TEXTS).encode())
    ends = np.flatnonzero(tokens == encoder.end)
    assert len(ends) == len(TEXTS) and ends[-1] == len(tokens) - 1
    documents = [part[part != encoder.end].tolist() for part in np.split(tokens, ends + 1)[:-1]]
    assert load_tokenizer(NAME, folder).batch_decode(documents) == TEXTS


def test_text_cannot_end_a_document(encoder: Encoder, folder: Path) -> None:
    tokens = encoder.encode(whole([f"before {END} after", ""]))
    assert np.count_nonzero(tokens == encoder.end) == 2
    assert load_tokenizer(NAME, folder).decode(tokens[:-2].tolist()) == f"before {END} after"


def test_batches_make_no_difference(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = encoder.encode(whole(TEXTS)).tolist()
    for size in (1, 100):
        monkeypatch.setattr(tokens_module, "BATCH_CHARACTERS", size)
        assert encoder.encode(iter(whole(TEXTS))).tolist() == expected


def test_long_documents_are_cut_and_end_once(encoder: Encoder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "MAX_PIECE", 7)
    tokens = encoder.encode([(TEXTS[0], False), (TEXTS[1], True)])
    assert np.flatnonzero(tokens == encoder.end).tolist() == [len(tokens) - 1]
    assert load_tokenizer(NAME, folder).decode(tokens[:-1].tolist()) == TEXTS[0] + TEXTS[1]


def test_the_end_of_every_file_is_held_out(encoder: Encoder, folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(NAME, folder)
    files = [tmp_path / "a.txt", write_jsonl(tmp_path / "b.jsonl", TEXTS)]
    files[0].write_text("".join(TEXTS))
    corpus = load_corpus(DATA, seed=0, files=files, encoder=encoder)
    train, heldout = [], []
    for source in (encoder.encode(whole(["".join(TEXTS)])), encoder.encode(whole(TEXTS))):
        cut = len(source) - len(source) // 20
        train += [*source[:cut].tolist(), encoder.end]
        heldout += source[cut:].tolist()
    assert corpus.train.tolist() == train and corpus.heldout.tolist() == heldout
    assert tokenizer.decode(corpus.heldout.tolist()).endswith(f"and more.{END}")
    assert corpus.block(0).dtype == np.int64 and corpus.block(0).max() < 400


def test_fingerprints(encoder: Encoder, folder: Path, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / "text.jsonl", TEXTS)]
    again = open_encoder(NAME, 400, folder)
    other = open_encoder(NAME, 400, save_tokenizer(tmp_path / "other", 300))

    def corpus(by: Encoder) -> Corpus:
        return load_corpus(DATA, seed=0, files=files, encoder=by)

    assert corpus(encoder).fingerprint == corpus(again).fingerprint and encoder.digest == again.digest
    assert corpus(encoder).fingerprint != corpus(other).fingerprint and encoder.digest != other.digest
    run = DATA.model_copy(update={"fingerprint": corpus(other).fingerprint})
    with pytest.raises(UserError, match=f"author's version of the tokenizer {NAME}"):
        check_fingerprint(corpus(encoder), run)


def test_fingerprint_of_bytes_is_what_it_always_was(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {number}: naïve café ☕\n" for number in range(40)), encoding="utf-8")
    corpus = load_corpus(DataSettings(source="files", block_tokens=8), seed=0, files=[path])
    assert corpus.fingerprint == "cb8b284bf1ae98d0cc85860df5ab6d7e50cf609d284fd6f6dcb400a20cae6547"


def test_big_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(NAME, save_tokenizer(tmp_path / "big", 300))
    tokenizer.add_tokens([f"word{number}" for number in range(70_000)])
    tokenizer.save_pretrained(tmp_path / "bigger")
    encoder = open_encoder(NAME, 70_300, tmp_path / "bigger")
    tokens = encoder.encode(whole(["word0 word69999"]))
    assert tokens.dtype == np.uint32 and tokens.max() == encoder.vocab_size - 1 > 1 << 16
    corpus = Corpus(np.tile(tokens, 20), tokens, 2, 0, NAME)
    assert corpus.blocks(range(3)).max() == encoder.vocab_size - 1 and len(corpus.fingerprint) == 64


def test_ids_must_fit_the_model(folder: Path) -> None:
    with pytest.raises(UserError, match=r"model.vocab_size 399 is too small for the 400 ids of .* raise it to 400"):
        open_encoder(NAME, 399, folder)
    with pytest.raises(UserError, match=r"model.vocab_size 258 is too small for the 259 ids of the tokenizer bytes"):
        open_encoder("bytes", 258)
    assert open_encoder("bytes", 259) is BYTE_ENCODER


def test_tokenizers_need_an_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no eos_token"):
        open_encoder(NAME, 400, save_tokenizer(tmp_path / "endless", 300, eos_token=None))


def test_bytes_are_byt5() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé", add_special_tokens=False) == BYTE_ENCODER.encode([("aé", False)]).tolist()
    assert (len(tokenizer), tokenizer.eos_token_id) == (BYTE_ENCODER.vocab_size, BYTE_ENCODER.end)


def test_folders_without_a_usable_tokenizer(tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for place, complaint in ((tmp_path / "gone", "is no folder"), (broken, "has no tokenizer.json")):
        with pytest.raises(UserError, match=complaint):
            load_tokenizer(NAME, place)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer can be loaded") as refusal:
        load_tokenizer(NAME, broken)
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="leave out --tokenizer"):
        open_encoder("bytes", 259, folder)


@pytest.mark.usefixtures("offline")
def test_a_name_without_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"cannot be reached; run hf download nobody/nothing .* --tokenizer DIR"
    ) as refusal:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(refusal.value)
    monkeypatch.chdir(folder.parent)
    assert open_encoder(folder.name, 400).end == 0


@pytest.mark.parametrize("name", ["", "/etc", "../up", "a/../b", "a b", "a//b", "x" * 129, "https://a"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        DataSettings(tokenizer=name, block_tokens=8)


def test_nodes_that_bring_their_text_have_the_runs_tokenizer(
    small_manifest: Manifest, encoder: Encoder, folder: Path, tmp_path: Path
) -> None:
    other = save_tokenizer(tmp_path / "other", 390)
    text = write_jsonl(tmp_path / "text.jsonl", TEXTS * 10)
    run = small_manifest.model_copy(
        update={
            "data": DataSettings(source="own", tokenizer=NAME, block_tokens=8, fingerprint=encoder.digest),
            "model": small_manifest.model.model_copy(update={"vocab_size": 400}),
        }
    )
    assert _open_corpus(run, [text], folder).num_blocks > 0
    with pytest.raises(UserError, match=f"the run's {NAME} has {encoder.digest[:12]}; .*--tokenizer DIR"):
        _open_corpus(run, [text], other)
    with pytest.raises(UserError):
        check_tokenizer(BYTE_ENCODER, encoder.digest)
