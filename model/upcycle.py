"""Upcycling: a dense checkpoint becomes a mixture of experts, whose experts are noisy copies of its FFN.

The method is that of the SPES paper (arXiv 2602.11543, section 4.1) after sparse upcycling (arXiv 2212.05055).
"""

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from model.architecture import FAMILIES, Family, build_on_meta
from model.checkpoint import tied_name
from model.checkpoint_config import dense_settings, special_ids, tied_embeddings
from model.checkpoint_writer import CheckpointWriter
from model.errors import UserError
from model.export import write_configs
from model.settings import ModelSettings, Settings
from model.stored_names import EMBEDDING, expert_names, stored_name
from model.weight_files import WeightFiles

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied as they are, where the dense checkpoint has them."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")


class UpcycleSettings(Settings):
    """How the experts are made."""

    experts: int = Field(default=8, ge=2, le=4096)
    """Experts in each layer."""
    top_k: int = Field(default=2, ge=1, le=4096)
    """Experts that the router picks for each token."""
    noise_std: float = Field(default=0.02, ge=0)
    """Standard deviation of the noise."""
    noise_fraction: float = Field(default=0.5, ge=0, le=1)
    """Probability with which an element of an expert gets noise."""
    router: Literal["normal", "zeros"] = "normal"
    """First weights of the routers. `normal`: with the standard deviation of the config's `initializer_range`. `zeros`:
    all logits are equal, ties go to the lowest ids, and only the first `top_k` experts get tokens."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the noise and of the routers."""


def upcycle(dense: Path, folder: Path, options: dict[str, Any]) -> ModelSettings:
    """Writes the new folder `folder`: the dense checkpoint `dense` (qwen3, llama or mistral) as a mixture of experts.

    Tensors are read and written one by one, in the dtype that they are stored in; noise is added in fp32. The same bits
    for the same arguments, whatever the number of threads. `options` are those of `UpcycleSettings`.

    Returns:
        The settings of the mixture.

    Raises:
        UserError: an option is out of range, the checkpoint is damaged or not like ours, or `folder` is not empty.
    """
    how = _checked(options)
    settings = dense_settings(dense, how.experts, how.top_k)
    special = special_ids(dense, settings.vocab_size)
    tied = tied_embeddings(dense)
    files = WeightFiles.open(dense)
    shared = {
        name: tuple(parameter.shape)
        for name, parameter in build_on_meta(settings).named_parameters()
        if ".mlp." not in name
    }
    wide, narrow = (settings.expert_size, settings.hidden_size), (settings.hidden_size, settings.expert_size)
    ffn = {
        name: shape
        for layer in range(settings.num_layers)
        for name, shape in zip(_dense_names(layer), (wide, wide, narrow), strict=True)
    }
    files.check((shared | ffn).items(), lambda name: tied_name(files, name) if tied else name)

    with CheckpointWriter(folder) as writer:
        dtype = files.dtype(tied_name(files, EMBEDDING))
        write_configs(settings, dtype, special, writer.partial)
        # Its own defaults for sampling are better than none.
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (dense / name).is_file():
                (writer.partial / name).write_bytes(_contents(dense / name))
        done = set()
        for name in shared:
            writer.add(
                stored_name(FAMILIES[settings.family], name), files.read(tied_name(files, name) if tied else name)
            )
            layer = int(name.split(".")[2]) if ".layers." in name else -1
            if layer >= 0 and layer not in done:
                done.add(layer)
                _write_mixture(writer, files, settings, how, layer)
    return settings


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): download it again, or take it away") from None


def _checked(options: dict[str, Any]) -> UpcycleSettings:
    try:
        how = UpcycleSettings.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option} {first['input']}: {first['msg'].replace('Input should', 'must')}") from None
    if how.top_k > how.experts:
        raise UserError(f"--top-k {how.top_k} is more than --experts {how.experts}: a token cannot have so many")
    return how


def _dense_names(layer: int) -> list[str]:
    """Gate [F, D], up [F, D] and down matrix [D, F] of a dense layer."""
    return [f"model.layers.{layer}.mlp.{matrix}.weight" for matrix in _MATRICES]


def _write_mixture(
    writer: CheckpointWriter, files: WeightFiles, settings: ModelSettings, how: UpcycleSettings, layer: int
) -> None:
    """Write the router and the experts of one layer."""
    family: Family = FAMILIES[settings.family]
    ffn = [files.read(name) for name in _dense_names(layer)]
    router = torch.zeros(how.experts, settings.hidden_size)
    if how.router == "normal":
        router.normal_(0, settings.init_std, generator=_generator(how.seed, f"{layer}/router"))
    writer.add(stored_name(family, f"model.layers.{layer}.mlp.gate.weight"), router.to(ffn[0].dtype))
    for expert in range(how.experts):
        names = expert_names(family, layer, expert)
        for name, matrix, values in zip(names, _MATRICES, ffn, strict=True):
            writer.add(name, noisy(values, how, _generator(how.seed, f"{layer}/{expert}/{matrix}")))


def noisy(values: Tensor, how: UpcycleSettings, generator: torch.Generator) -> Tensor:
    """`values` with Gaussian noise, added in fp32 to a random part of the elements; the dtype stays."""
    if not how.noise_std or not how.noise_fraction:
        return values
    chosen = torch.rand(values.shape, generator=generator) < how.noise_fraction
    noise = torch.empty(values.shape).normal_(0, how.noise_std, generator=generator)
    return torch.where(chosen, values.float() + noise, values.float()).to(values.dtype)


def _generator(seed: int, what: str) -> torch.Generator:
    """Each tensor has a generator of its own, so its values do not depend on what was drawn before it."""
    digest = hashlib.sha256(f"upcycle/{seed}/{what}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
