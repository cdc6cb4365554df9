"""The corpus: an ordered, seeded sequence of fixed-size token blocks, the same on every node that has the text."""

import glob
import hashlib
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.errors import UserError
from model.tokenizer import BYTES
from node.builtin_text import module_texts, topic_texts
from node.tokens import BYTE_ENCODER, Encoder, Piece, Tokens
from swarm.manifest import DataSettings

HELDOUT_SHARE = 20
"""One token in so many, the last ones of every source, is held out of training."""
CHUNK_BYTES = 1 << 16
"""Size of the pieces of a text file. A tokenizer sees one piece at a time, so another size gives other tokens."""
FEISTEL_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of one text, cut into blocks of `block_tokens` inputs that overlap by the one token of the last target."""

    train: Tokens
    """uint16 or uint32 [T], what the swarm trains on."""
    heldout: Tokens
    """[V], what it is evaluated on."""
    block_tokens: int
    seed: int
    """Seed of the order in which an epoch visits its blocks."""
    tokenizer: str = BYTES

    @property
    def num_blocks(self) -> int:
        """Training blocks in one epoch."""
        return (len(self.train) - 1) // self.block_tokens

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, of the tokenizer's name and both token sequences (little endian)."""
        digest = hashlib.sha256(self.tokenizer.encode())
        for tokens in (self.train, self.heldout):
            digest.update(len(tokens).to_bytes(8, "little"))
            digest.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
        return digest.hexdigest()

    def block(self, block_id: int) -> NDArray[np.int64]:
        """Block number `block_id` of the endless sequence of epochs: int64 [block_tokens + 1]."""
        return self.blocks([block_id]).reshape(-1)

    def blocks(self, block_ids: Iterable[int]) -> NDArray[np.int64]:
        """Several blocks: int64 [B, block_tokens + 1]. Each epoch of `num_blocks` ids has an order of its own."""
        starts = []
        for block_id in block_ids:
            epoch, position = divmod(int(block_id), self.num_blocks)
            starts.append(shuffled(position, self.num_blocks, self.seed, epoch) * self.block_tokens)
        return self._windows(self.train, starts)

    def heldout_blocks(self, count: int) -> NDArray[np.int64]:
        """`count` evenly spaced windows of the held-out tokens, overlapping if they must: [count, block_tokens + 1]."""
        last_start = len(self.heldout) - self.block_tokens - 1
        return self._windows(self.heldout, [last_start * i // max(count - 1, 1) for i in range(count)])

    def _windows(self, tokens: Tokens, starts: Sequence[int]) -> NDArray[np.int64]:
        offsets = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(self.block_tokens + 1)
        return np.asarray(tokens[offsets], dtype=np.int64)


def shuffled(position: int, size: int, seed: int, epoch: int) -> int:
    """Where `position` of [0, size) goes in the permutation that `seed` and `epoch` (both below 2**64) choose.

    A balanced Feistel network over the next power of four, walked until it falls into the range again (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a bijection in constant memory, the same on every machine.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    while True:
        left, right = position >> half, position & mask
        for number in range(FEISTEL_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=bytes([number]))
            left, right = right, left ^ int.from_bytes(mixed.digest(), "little") & mask
        position = left << half | right
        if position < size:
            return position


def load_corpus(data: DataSettings, seed: int, files: Sequence[Path], encoder: Encoder = BYTE_ENCODER) -> Corpus:
    """Tokenise the run's text: CPython's own, or `files` in the order given, with the encoder of `data.tokenizer`.

    Raises UserError if the files do not fit `data.source`, cannot be read, or hold too little text for one block.
    """
    assert encoder.name == data.tokenizer
    sources: Iterable[Iterable[Piece]]
    if data.source == "builtin":
        if files:
            raise UserError("this run trains on the builtin text; leave out --data")
        sources = [_documents(topic_texts()), *(_documents([text]) for text in module_texts())]
    else:
        if not files:
            raise UserError("this run trains on text files; name at least one with --data (txt, jsonl or parquet)")
        sources = map(_read_file, files)
    train, heldout = _split(sources, encoder)
    needed = data.block_tokens + 1
    if len(train) < needed or len(heldout) < needed:
        raise UserError(
            f"the text is too short: {len(train)} training and {len(heldout)} held-out tokens, and a block needs "
            f"{needed} of each; add text or lower data.block_tokens"
        )
    return Corpus(train, heldout, data.block_tokens, seed, data.tokenizer)


def check_fingerprint(corpus: Corpus, data: DataSettings) -> None:
    """Make sure that this node has the text of the run; source `own` has none to compare with.

    Raises UserError if the fingerprints differ.
    """
    if data.source == "own" or corpus.fingerprint == data.fingerprint:
        return
    remedy = (
        f"its author has another Python than {platform.python_version()} here: use the author's version"
        if data.source == "builtin"
        else "give --data the author's files in the author's order"
    )
    if data.tokenizer != BYTES:
        remedy += f", and have the author's version of the tokenizer {data.tokenizer}"
    raise UserError(
        f"this node's text has fingerprint {corpus.fingerprint[:12]}, the run's has {data.fingerprint[:12]}; {remedy}"
    )


def _split(sources: Iterable[Iterable[Piece]], encoder: Encoder) -> tuple[Tokens, Tokens]:
    """Training and held-out tokens of all sources."""
    train, heldout = bytearray(), bytearray()
    end = np.array([encoder.end], encoder.dtype).tobytes()
    for pieces in sources:
        tokens = encoder.encode(pieces)
        cut = len(tokens) - len(tokens) // HELDOUT_SHARE
        train += tokens[:cut].data
        train += end  # the cut may fall inside a document
        heldout += tokens[cut:].data
    return np.frombuffer(train, encoder.dtype), np.frombuffer(heldout, encoder.dtype)


def _documents(texts: Iterable[str]) -> Iterator[Piece]:
    return ((text, True) for text in texts)


def _read_file(path: Path) -> Iterator[Piece]:
    """The file's documents, piece by piece."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name its files one by one")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give a file with text")
        match path.suffix.lower():
            case ".txt":
                yield from ((text, False) for text in _utf8_chunks(path))
                yield "", True
            case ".jsonl":
                for _ in _utf8_chunks(path):
                    pass  # datasets names no offset when it meets other bytes
                yield from _documents(_records(path, "json"))
            case ".parquet":
                yield from _documents(_records(path, "parquet"))
            case _:
                raise UserError(f"{path}: unknown kind of file; the known ones end in .txt, .jsonl and .parquet")
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise UserError(f"cannot read {path}: {reason}; check the path and its permissions") from error


def _utf8_chunks(path: Path) -> Iterator[str]:
    """The file in pieces of about CHUNK_BYTES that end with a line, so never inside a character."""
    with path.open("rb") as file:
        start = 0
        while chunk := b"".join(file.readlines(CHUNK_BYTES)):
            try:
                text = chunk.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is not UTF-8 at byte {start + error.start}; convert it to UTF-8") from error
            yield text
            start += len(chunk)


def _records(path: Path, kind: str) -> Iterator[str]:
    """The `text` of every record, streamed."""
    import datasets  # a second to import, and most runs read plain text

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs an error before it raises the same
    try:
        # A path is a pattern to datasets: unescaped, `a*.jsonl` would read its neighbours too.
        pattern = glob.escape(str(path.absolute()))
        stream = datasets.load_dataset(kind, data_files=pattern, split="train", streaming=True)
        number = 0
        for batch in stream.iter(batch_size=1000):
            for text in batch["text"]:
                number += 1
                if not isinstance(text, str):
                    raise UserError(f'{path}: record {number} has no string in "text"; every record needs one')
                yield text
        if number == 0:
            raise UserError(f"{path} has no records; give a file with text")
    except KeyError as error:
        raise UserError(f'{path} has no "text"; put the text of each record under that name') from error
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not valid {path.suffix[1:].lower()}, repair it: {reason}") from error
