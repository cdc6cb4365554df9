"""From text to tokens: bytes, or a Hugging Face tokenizer."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model.errors import UserError
from model.tokenizer import BYTES, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.unsignedinteger[Any]]
"""uint16 or uint32."""
Piece = tuple[str, bool]
"""Some text of a document, and whether the document ends with it."""

BYTE_OFFSET = 3
"""Token id of byte 0: ids 0 to 2 are padding, end of document and unknown, as in ByT5 (arXiv 2105.13626)."""
MAX_UINT16_VOCABULARY = 1 << 16
BATCH_CHARACTERS = 1 << 20
"""Text that is tokenised at a time, so that ids are Python objects for no more than that."""
MAX_PIECE = 1 << 20
"""Characters after which a piece is cut wherever that falls: tokenizers want many times the memory of a text."""
PROBE = "It's 3.14159 °C \n\n\tdef f(x):  return x['naïve'] # 東京 ☕🚀"
"""What is tokenised to tell tokenizers apart: words, digits, code, white space and other scripts."""


class Encoder(Protocol):
    """Tokenises; two nodes whose encoders have the same name and digest make the same tokens of the same text."""

    name: str
    """As the run has it."""
    end: int
    """Token id that ends a document."""
    dtype: np.dtype[np.unsignedinteger[Any]]
    """Of the tokens: uint16 where all ids fit, else uint32."""
    vocab_size: int
    """One more than the highest id."""
    digest: str
    """SHA-256 that tells the tokenizer from others, hexadecimal; empty for bytes, of which there is one."""

    def encode(self, pieces: Iterable[Piece]) -> Tokens:
        """The tokens of the pieces one after the other, with `end` after each document: `dtype` [T]."""


class ByteEncoder:
    """UTF-8 bytes shifted by BYTE_OFFSET."""

    name = BYTES
    end = 1
    dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(np.uint16)
    vocab_size = 256 + BYTE_OFFSET
    digest = ""

    def encode(self, pieces: Iterable[Piece]) -> Tokens:
        """See Encoder."""
        separator = b"\xff"  # stands for the end until the text is whole: the byte is in no UTF-8 text
        text = bytearray()
        for piece, ends in pieces:
            text += piece.encode() + (separator if ends else b"")
        tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        tokens += BYTE_OFFSET
        tokens[tokens == separator[0] + BYTE_OFFSET] = self.end
        return tokens


class TokenizerEncoder:
    """A fast Hugging Face tokenizer. What looks like one of its special tokens in a text stays text, so that documents
    end only where they end."""

    def __init__(self, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises UserError when the tokenizer has no token for the end of a document."""
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer {name} has no eos_token to end documents with; choose one that has")
        self.name = name
        self.end: int = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(
            np.uint16 if self.vocab_size <= MAX_UINT16_VOCABULARY else np.uint32
        )
        parts = [sorted(vocabulary.items()), self.end, self._ids([PROBE])]
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, pieces: Iterable[Piece]) -> Tokens:
        """See Encoder."""
        tokens = bytearray()
        end = np.array([self.end], self.dtype).tobytes()
        for batch in _batches(pieces):
            for ids, (_, ends) in zip(self._ids([text for text, _ in batch]), batch, strict=True):
                tokens += np.array(ids, self.dtype).tobytes() + (end if ends else b"")
        return np.frombuffer(tokens, self.dtype)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # of texts longer than its own model takes
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


BYTE_ENCODER = ByteEncoder()


def open_encoder(name: str, vocab_size: int, folder: Path | None = None) -> Encoder:
    """The encoder of the tokenizer `name`, from `folder` if it is given, for a model with `vocab_size` ids.

    Raises UserError if the tokenizer cannot be had, has no end of document, or has ids that the model has not.
    """
    if name == BYTES and folder is not None:
        raise UserError("this run's tokenizer is bytes, which needs no files; leave out --tokenizer")
    encoder = BYTE_ENCODER if name == BYTES else TokenizerEncoder(name, load_tokenizer(name, folder))
    if encoder.vocab_size > vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} is too small for the {encoder.vocab_size} ids of the tokenizer {name}; "
            f"raise it to {encoder.vocab_size} or choose a smaller tokenizer"
        )
    return encoder


def check_tokenizer(encoder: Encoder, expected: str) -> None:
    """Raise UserError when the encoder's digest is not the `expected` one of the run."""
    if encoder.digest != expected:
        raise UserError(
            f"the tokenizer here has fingerprint {encoder.digest[:12]}, the run's {encoder.name} has {expected[:12]}; "
            "give the folder of the author's tokenizer with --tokenizer DIR"
        )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces, cut to at most MAX_PIECE characters, in lists of about BATCH_CHARACTERS."""
    batch: list[Piece] = []
    size = 0
    for text, ends in pieces:
        for start in range(0, max(len(text), 1), MAX_PIECE):
            part = text[start : start + MAX_PIECE]
            batch.append((part, ends and start + MAX_PIECE >= len(text)))
            size += len(part) + 1  # an empty text takes room, too
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
