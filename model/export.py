"""Export to the Hugging Face format, and text from an exported model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig
from transformers.utils import logging

from model.architecture import FAMILIES, build_config
from model.checkpoint_writer import CheckpointWriter
from model.errors import UserError
from model.json_files import read_table
from model.settings import Dtype, ModelSettings
from model.shards import layout
from model.stored_names import expert_names, stored_name

BYTE_VOCABULARY = 259
"""ByT5's vocabulary without sentinels: 0 pad, 1 end of document, 2 unknown, then the 256 bytes."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the exported weights."""


def export_checkpoint(
    settings: ModelSettings,
    read_shard: Callable[[str], np.ndarray],
    folder: Path,
    *,
    tokenizer: Any = None,
    card: str = "",
    dtype: Dtype = "fp32",
) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it appears complete or not at all.

    Args:
        settings: of the model.
        read_shard: returns the flat fp32 values [numel] of a shard by name; called once for each, in canonical order.
        folder: a new folder, or an empty one.
        tokenizer: a transformers tokenizer, which also says what the special tokens are. None writes the ByT5 tokenizer
            where the vocabulary is its own, and no tokenizer elsewhere.
        card: the text of README.md, the model card; none is written when it is empty.
        dtype: of the weights, one tensor for each matrix of each expert.

    Raises:
        UserError: `folder` is not empty, or `tokenizer` has ids beyond the vocabulary.
    """
    if tokenizer is None and settings.vocab_size == BYTE_VOCABULARY:
        tokenizer = ByT5Tokenizer(extra_ids=0, model_max_length=settings.max_length)
    if tokenizer is not None and len(tokenizer) > settings.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {settings.vocab_size}: choose the model's own"
        )
    with CheckpointWriter(folder) as writer:
        special = {} if tokenizer is None else special_tokens(tokenizer)
        write_configs(settings, DTYPES[dtype], special, writer.partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(writer.partial)
        if card:
            (writer.partial / "README.md").write_text(card, encoding="utf-8")
        for name, tensor in stored_tensors(settings, read_shard):
            writer.add(name, tensor.to(DTYPES[dtype]))


def special_tokens(tokenizer: Any) -> dict[str, int | None]:
    """The ids that a config tells of, from a transformers tokenizer."""
    return {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}


def write_configs(settings: ModelSettings, dtype: torch.dtype, special: dict[str, Any], folder: Path) -> None:
    """Writes `config.json` and `generation_config.json`; `special` has the ids of the special tokens."""
    config = build_config(settings)
    config.architectures = [FAMILIES[settings.family].model.__name__]
    config.dtype = dtype
    config.use_cache = True
    for key, token in special.items():
        setattr(config, key, token)
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def stored_tensors(settings: ModelSettings, read_shard: Callable[[str], np.ndarray]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, fp32 by stored name: rows of shared parameters joined, experts taken apart."""
    family = FAMILIES[settings.family]
    shards = layout(settings)
    rows = {piece.parameter: piece.stop for shard in shards for piece in shard.pieces}
    joined: dict[str, list[np.ndarray]] = {}
    for shard in shards:
        parts = shard.split(read_shard(shard.name))
        if shard.expert is not None:
            layer = int(shard.pieces[0].parameter.split(".")[2])
            (gate_up,), (down,) = parts
            matrices = (*np.split(gate_up, 2), down)
            for name, matrix in zip(expert_names(family, layer, shard.expert), matrices, strict=True):
                yield name, torch.tensor(matrix)
            continue
        for piece, part in zip(shard.pieces, parts, strict=True):
            joined.setdefault(piece.parameter, []).append(part)
            if piece.stop == rows[piece.parameter]:
                values = np.concatenate(joined.pop(piece.parameter))
                yield stored_name(family, piece.parameter), torch.from_numpy(values)


def generate(
    folder: Path, prompt: str, max_new_tokens: int, seed: int, *, temperature: float = 0.8, top_k: int = 50
) -> str:
    """Samples a continuation of `prompt` from an exported folder; returns the new text.

    Raises UserError when the folder is not an export with a tokenizer.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: give a folder that was exported with a tokenizer")
    logging.disable_progress_bar()
    told = read_table(folder / "tokenizer_config.json")
    # For some architectures AutoTokenizer takes their own tokenizer, whatever the folder says.
    kind = ByT5Tokenizer if told.get("tokenizer_class") == ByT5Tokenizer.__name__ else AutoTokenizer
    tokenizer = kind.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    # An empty prompt begins a new document. The tokenizer's own end mark would end the text before it starts.
    ids = tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id]
    inputs = torch.tensor([ids])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            use_cache=True,
        )
    text: str = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return text
