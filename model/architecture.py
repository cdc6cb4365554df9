"""The table of architectures: what transformers calls the parts of each family of mixtures of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from model.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. In every family the experts of a decoder layer are the module `mlp.experts`, two fused
    tensors: `gate_up_proj` [E, 2F, D] (gate rows first, then up) and `down_proj` [E, D, F]."""

    model: type[PreTrainedModel]
    config: Callable[[ModelSettings], PreTrainedConfig]
    mixture: str
    """What a checkpoint file calls the module `mlp` of a decoder layer."""
    expert_keys: tuple[str, str, str]
    """What it calls one expert's gate, up and down matrix, below `{mixture}.experts.{expert}`."""


def _olmoe_config(settings: ModelSettings) -> PreTrainedConfig:
    return OlmoeConfig(
        intermediate_size=settings.expert_size,
        num_experts=settings.num_experts,
        norm_topk_prob=settings.norm_topk_prob,
        **_common(settings),
    )


def _qwen3_moe_config(settings: ModelSettings) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        # The width of dense layers, of which there are none.
        intermediate_size=settings.expert_size,
        moe_intermediate_size=settings.expert_size,
        num_experts=settings.num_experts,
        norm_topk_prob=settings.norm_topk_prob,
        head_dim=settings.head_size,
        **_common(settings),
    )


def _mixtral_config(settings: ModelSettings) -> PreTrainedConfig:
    return MixtralConfig(
        intermediate_size=settings.expert_size,
        num_local_experts=settings.num_experts,
        head_dim=settings.head_size,
        **_common(settings),
    )


def _common(settings: ModelSettings) -> dict[str, Any]:
    """The part of a config that has the same names in every family."""
    return {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "num_experts_per_tok": settings.experts_per_token,
        "max_position_embeddings": settings.max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "rms_norm_eps": settings.norm_eps,
        "initializer_range": settings.init_std,
        "tie_word_embeddings": False,
        "use_cache": False,
        # Training needs no special tokens, and the defaults lie outside small vocabularies.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

FAMILIES = {
    "olmoe": Family(OlmoeForCausalLM, _olmoe_config, "mlp", _PROJECTIONS),
    "qwen3_moe": Family(Qwen3MoeForCausalLM, _qwen3_moe_config, "mlp", _PROJECTIONS),
    "mixtral": Family(MixtralForCausalLM, _mixtral_config, "block_sparse_moe", ("w1", "w3", "w2")),
}


def build_config(settings: ModelSettings) -> PreTrainedConfig:
    """The transformers config of `settings`."""
    return FAMILIES[settings.family].config(settings)


def build_on_meta(settings: ModelSettings) -> PreTrainedModel:
    """The transformers model of `settings` with names and shapes but no memory behind them."""
    with torch.device("meta"):
        return FAMILIES[settings.family].model(build_config(settings))
