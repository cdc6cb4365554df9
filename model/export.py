"""Export to the Hugging Face format, and text from an exported model."""

import json
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig
from transformers.utils import logging

from model.architecture import FAMILIES, build_config
from model.errors import UserError
from model.settings import ModelSettings
from model.shards import Shard, layout

BYTE_VOCABULARY = 259
"""ByT5's vocabulary without sentinels: 0 pad, 1 end of document, 2 unknown, then the 256 bytes."""
FILE_NUMEL = 2**30
"""Values after which the next weight file is begun (4 GiB); only one file's values are in memory at a time."""


def export_checkpoint(settings: ModelSettings, read_shard: Callable[[str], np.ndarray], folder: Path) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load: config, generation config, fp32 weights
    (one tensor for each matrix of each expert), and the ByT5 tokenizer when the vocabulary is its own.

    `read_shard` returns the flat fp32 values of a shard by name. The folder appears complete or not at all. Raises
    UserError when it exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose another folder for the export")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        _write_configs(settings, partial)
        _write_weights(settings, read_shard, partial)
        os.rename(partial, folder)


def generate(
    folder: Path, prompt: str, max_new_tokens: int, seed: int, *, temperature: float = 0.8, top_k: int = 50
) -> str:
    """Samples a continuation of `prompt` from an exported folder; returns the new text.

    Raises UserError when the folder is not an export with a tokenizer.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: give a folder that was exported with a byte vocabulary")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
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


def _write_configs(settings: ModelSettings, folder: Path) -> None:
    config = build_config(settings)
    config.architectures = [FAMILIES[settings.family].model.__name__]
    config.dtype = "float32"
    config.use_cache = True
    if settings.vocab_size == BYTE_VOCABULARY:
        tokenizer = ByT5Tokenizer(extra_ids=0, model_max_length=settings.max_length)
        tokenizer.save_pretrained(folder)
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.save_pretrained(folder)
    GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id).save_pretrained(folder)


def _write_weights(settings: ModelSettings, read_shard: Callable[[str], np.ndarray], folder: Path) -> None:
    files = _files(layout(settings))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    total_size = 0
    for name, shards in zip(names, files, strict=True):
        tensors = dict(_tensors(settings, shards, read_shard))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes for its user alone; the other files are for everybody
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _files(shards: tuple[Shard, ...]) -> list[list[Shard]]:
    """The shards of each weight file. Files end only between `embed`, the layers and `head`, so no parameter is in
    two of them."""
    files: list[list[Shard]] = [[]]
    for _, group in groupby(shards, key=_section):
        if sum(shard.numel for shard in files[-1]) >= FILE_NUMEL:
            files.append([])
        files[-1] += group
    return files


def _section(shard: Shard) -> str:
    """`embed`, `layer.{i}` or `head`."""
    first, *rest = shard.name.split(".")
    return f"{first}.{rest[0]}" if first == "layer" else first


def _tensors(
    settings: ModelSettings, shards: list[Shard], read_shard: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """The named tensors of a weight file: rows of shared parameters joined, experts taken apart."""
    rows: dict[str, list[np.ndarray]] = {}
    for shard in shards:
        parts = shard.split(read_shard(shard.name))
        if shard.expert is None:
            for piece, part in zip(shard.pieces, parts, strict=True):
                rows.setdefault(piece.parameter, []).append(part)
        else:
            layer = shard.pieces[0].parameter.partition("mlp.experts.")[0]
            (gate_up,), (down,) = parts
            gate, up = np.split(gate_up, 2)
            for key, matrix in zip(FAMILIES[settings.family].expert_keys, (gate, up, down), strict=True):
                yield layer + key.format(expert=shard.expert), matrix
    for parameter, parts in rows.items():
        yield parameter, np.concatenate(parts)
