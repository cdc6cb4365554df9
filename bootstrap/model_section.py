"""Writes the `[model]` section of a run file for a model that is there already."""

import json
import re

from model.settings import ModelSettings

COMMENTS = {
    "family": "architecture in transformers",
    "vocab_size": "rows of the embedding and of the output head",
    "hidden_size": "width of the residual stream",
    "num_layers": "decoder layers, each with one mixture of experts",
    "num_heads": "attention heads",
    "num_kv_heads": "key and value heads; fewer than num_heads is grouped-query attention",
    "head_dim": "width of one attention head",
    "expert_size": "inner width of one expert",
    "num_experts": "experts in each layer; the nodes share them out",
    "experts_per_token": "experts that the router picks for each token",
    "norm_topk_prob": "whether the router weights of the picked experts are scaled to sum to 1",
    "max_length": "longest sequence, tokens; may be less than the checkpoint's",
    "rope_theta": "base of the rotary position embedding",
    "norm_eps": "epsilon of RMSNorm",
    "init_std": "standard deviation of random first weights; a checkpoint has its own weights",
}


def with_model(text: str, model: ModelSettings) -> str:
    """The run file `text` with `model` in its `[model]` section, and with blocks that are not longer than it allows.

    Other lines stay as they are, comments too.
    """
    lines = ["[model]                   # as in the checkpoint's config.json"]
    for key, value in model:
        if value is not None:
            comment = f"# {COMMENTS[key]}" if key in COMMENTS else ""
            lines.append(f"{f'{key} = {json.dumps(value)}':<25} {comment}".rstrip())
    section = "\n".join(lines) + "\n"
    text = re.sub(r"(?ms)^\[model\].*?(?=^\s*^\[|\Z)", lambda _: section, text, count=1)
    return re.sub(
        r"(?m)^block_tokens = (\d+) *",
        lambda match: f"block_tokens = {min(int(match[1]), model.max_length)}".ljust(len(match[0])),
        text,
    )
