"""The table of architectures: what transformers calls the parts of each family of mixtures of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedConfig, PreTrainedModel

from model.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. In every family the experts of a decoder layer are the module `mlp.experts`, two fused
    tensors: `gate_up_proj` [E, 2F, D] (gate rows first, then up) and `down_proj` [E, D, F]."""

    model: type[PreTrainedModel]
    config: Callable[[ModelSettings], PreTrainedConfig]
    expert_keys: tuple[str, str, str]
    """Keys of one expert's gate, up and down matrix in a checkpoint file, below the name of its decoder layer."""


def _olmoe_config(settings: ModelSettings) -> PreTrainedConfig:
    return OlmoeConfig(
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.experts_per_token,
        norm_topk_prob=False,
        **_common(settings),
    )


def _common(settings: ModelSettings) -> dict[str, Any]:
    """The part of a config that has the same names in every family."""
    return {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.expert_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
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


FAMILIES = {
    "olmoe": Family(
        model=OlmoeForCausalLM,
        config=_olmoe_config,
        expert_keys=(
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            "mlp.experts.{expert}.down_proj.weight",
        ),
    ),
}


def build_config(settings: ModelSettings) -> PreTrainedConfig:
    """The transformers config of `settings`."""
    return FAMILIES[settings.family].config(settings)


def build_on_meta(settings: ModelSettings) -> PreTrainedModel:
    """The transformers model of `settings` with names and shapes but no memory behind them."""
    with torch.device("meta"):
        return FAMILIES[settings.family].model(build_config(settings))
