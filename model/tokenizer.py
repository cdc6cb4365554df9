"""Tokenizers by name: bytes, or whatever the Hugging Face Hub or a folder has."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
"""The tokenizer of bytes, ByT5's without sentinels: it needs no files."""
HUB_SECONDS = 10.0
"""How long the Hub may take to answer whether it has a tokenizer."""
_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_folder(folder: Path) -> None:
    """Raise UserError when `folder` holds no tokenizer that transformers has saved. Loads nothing."""
    if not any((folder / name).is_file() for name in _FILES):
        problem = f"has no {_FILES[0]}" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {problem}; name a folder that holds a Hugging Face tokenizer")


def load_tokenizer(name: str, folder: Path | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer `name`: `bytes`, a name on the Hugging Face Hub, or a folder. No code of theirs is ever run.

    `folder` is where its files are, if not under its name; the Hub is asked only for what its cache does not have.
    Raises UserError when it cannot be had.
    """
    # Seconds to import, and the daemon asks this module only about folders.
    from transformers import ByT5Tokenizer

    if name == BYTES:
        return ByT5Tokenizer(extra_ids=0)
    if folder is not None or os.path.isdir(name):
        path = folder or Path(name)
        check_folder(path)
        return _load(str(path), local=True)
    try:
        return _load(name, local=True)
    except UserError:
        _ask_the_hub(name)
    return _load(name, local=False)


def _load(place: str, *, local: bool) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # for a broken file the tokenizers library has nothing more special
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"no tokenizer can be loaded from {place}: {reason}; check its files") from error
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer {place} has no fast version (tokenizer.json); choose one that has")
    return tokenizer


def _ask_the_hub(name: str) -> None:
    """Raise UserError when the Hub does not answer or has no such model; downloads try again for a minute first."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"the Hugging Face Hub has no tokenizer {name} for this box; check data.tokenizer, or give a folder that "
            "holds it with --tokenizer DIR"
        ) from error
    except (HTTPError, OSError) as error:
        raise UserError(
            f"the tokenizer {name} is not on this box, and the Hugging Face Hub cannot be reached; run "
            f"hf download {name} {' '.join(_FILES)} --local-dir DIR where there is internet, and give that folder with "
            "--tokenizer DIR"
        ) from error
