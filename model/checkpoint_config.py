"""The `config.json` of a checkpoint as our settings: what they cannot express is refused with its key."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from model.errors import UserError
from model.json_files import read_table, shown
from model.settings import ModelSettings

MIXTURES: dict[str, type[PreTrainedConfig]] = {
    "olmoe": OlmoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
"""Model types that are read as they are; each is a family of ours."""
DENSE: dict[str, tuple[type[PreTrainedConfig], str]] = {
    "qwen3": (Qwen3Config, "qwen3_moe"),
    "llama": (LlamaConfig, "mixtral"),
    "mistral": (MistralConfig, "mixtral"),
}
"""Model types of dense models, with the family whose attention is theirs."""

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts_per_token": "num_experts_per_tok",
    "norm_topk_prob": "norm_topk_prob",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""The config's key for each of our fields that have the same meaning in every model type."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "clip_qkv": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (1, None),
    "hidden_act": ("silu",),
    "router_jitter_noise": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
"""Keys that our models have no switch for, with the values that mean what our models do."""
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Keys of special tokens. Only `eos_token_id` may be a list: generation ends with any of them."""


def checkpoint_settings(folder: Path) -> ModelSettings:
    """The settings of the mixture of experts in `folder`, from its `config.json` of any age.

    Raises UserError when there is none, or when it has something that our settings cannot express.
    """
    config = read_config(folder)
    family = _model_type(folder, config, MIXTURES)
    value = _reader(config, MIXTURES[family])
    experts = config.get("num_experts", config.get("num_local_experts"))
    width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    fields = _common(folder, config, MIXTURES[family]) | {
        "family": family,
        "experts_per_token": value("num_experts_per_tok"),
        "norm_topk_prob": True if family == "mixtral" else value("norm_topk_prob"),
        "num_experts": value("num_local_experts" if family == "mixtral" else "num_experts")
        if experts is None
        else experts,
        "expert_size": value(width),
    }
    return _settings(folder, fields, {"num_experts": "num_experts", "expert_size": width})


def dense_settings(folder: Path, num_experts: int, experts_per_token: int) -> ModelSettings:
    """The settings of the mixture that the dense model in `folder` becomes when each FFN turns into experts.

    Raises UserError when there is none, or when it has something that our settings cannot express.
    """
    config = read_config(folder)
    config_class, family = DENSE[_model_type(folder, config, DENSE)]
    fields = _common(folder, config, config_class) | {
        "family": family,
        "experts_per_token": experts_per_token,
        "norm_topk_prob": True,
        "num_experts": num_experts,
        "expert_size": _reader(config, config_class)("intermediate_size"),
    }
    return _settings(folder, fields, {"expert_size": "intermediate_size"})


def read_config(folder: Path) -> dict[str, Any]:
    """The table in `config.json`. Raises UserError when there is none."""
    path = folder / "config.json"
    try:
        return read_table(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is missing: give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from None


def tied_embeddings(folder: Path) -> bool:
    """Whether embedding and head are one tensor. Raises UserError when `config.json` does not say that clearly."""
    tied = read_config(folder).get("tie_word_embeddings")
    if tied not in (True, False, None):
        raise _refusal(folder, "tie_word_embeddings", tied)
    return bool(tied)


def special_ids(folder: Path, vocab_size: int) -> dict[str, int | list[int] | None]:
    """The ids of the special tokens of the dense model in `folder`; an id beyond the vocabulary, such as -1, is none.

    Raises UserError for what is no id at all.
    """
    config = read_config(folder)
    value = _reader(config, DENSE[_model_type(folder, config, DENSE)][0])
    special: dict[str, int | list[int] | None] = {}
    for key in SPECIAL:
        found = value(key)
        several = key == "eos_token_id" and isinstance(found, list)
        ids = found if several else [] if found is None else [found]
        if not all(_is_integer(token) for token in ids):
            raise _refusal(folder, key, found)
        valid = [token for token in ids if 0 <= token < vocab_size]
        special[key] = None if not valid else valid if several else valid[0]
    return special


def _model_type(folder: Path, config: Mapping[str, Any], known: Mapping[str, object]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(
            f"{folder / 'config.json'}: model_type {shown(model_type)} is not supported here: "
            f"choose a checkpoint of {', '.join(known)}"
        )
    return model_type


def _refusal(folder: Path, key: str, found: object) -> UserError:
    return UserError(
        f"{folder / 'config.json'}: {key} = {shown(found)} cannot be expressed here: choose another checkpoint"
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reader(config: Mapping[str, Any], config_class: type[PreTrainedConfig]) -> Callable[[str], Any]:
    """Reads a key, or transformers' own default where the config has none."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    return lambda key: config.get(key, defaults.get(key))


def _common(folder: Path, config: Mapping[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields that every model type has, after a look at what none of ours can have."""
    value = _reader(config, config_class)
    for key, allowed in _ONLY.items():
        if key in config and config[key] not in allowed:
            raise _refusal(folder, key, config[key])
    rope = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            rope = config[key]
            plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
            if (
                not plain
                or rope.get("partial_rotary_factor", 1) != 1
                or any(isinstance(v, dict) for v in rope.values())
            ):
                raise _refusal(folder, key, rope)
    fields = {field: value(key) for field, key in _KEYS.items()}
    window = value("sliding_window")
    if config_class in (Qwen3Config, Qwen3MoeConfig) and not value("use_sliding_window"):
        window = None
    if window is not None and not _is_integer(window):
        raise _refusal(folder, "sliding_window", window)
    # A window as long as the longest sequence hides nothing. A field of another type is refused with all others.
    if window is not None and _is_integer(fields["max_length"]) and window < fields["max_length"]:
        raise _refusal(folder, "sliding_window", window)
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    heads = fields["head_dim"], fields["num_heads"]
    if all(map(_is_integer, heads)) and math.prod(heads) == fields["hidden_size"]:
        fields["head_dim"] = None  # what our settings take without being told
    return fields | {"rope_theta": rope.get("rope_theta", config.get("rope_theta", config_class.default_theta))}


def _settings(folder: Path, fields: Mapping[str, Any], keys: Mapping[str, str]) -> ModelSettings:
    try:
        return ModelSettings.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            problem = str(first["ctx"]["error"])
        else:
            field = str(first["loc"][0])
            problem = f"{keys.get(field, _KEYS.get(field, field))} = {shown(first['input'])}: {first['msg']}"
        raise UserError(f"{folder / 'config.json'}: {problem}. Choose another checkpoint") from None
