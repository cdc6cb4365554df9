"""The inner optimiser: its schedule, its construction, and its moments when experts change hands."""

import logging
import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from model.errors import UserError
from model.moments import MAX_STEP, Moments
from model.settings import OptimizerSettings
from model.shards import DTYPE

MIN_8BIT_NUMEL = 4096
"""Smaller parameters keep fp32 moments, as bitsandbytes has it."""


def learning_rate_at(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of local step `step` (from 0): linear warm-up times a cosine from the peak to
    `final_fraction * peak` at `decay_steps`, constant from there on."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if not settings.decay_steps:
        return settings.learning_rate * warmup
    progress = min(1.0, step / settings.decay_steps)
    floor = settings.final_fraction
    return settings.learning_rate * (warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))))


def build_optimizer(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter], *, adam_8bit: bool = False
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or SGD without momentum, with decoupled weight decay on every parameter.

    With `adam_8bit`, AdamW keeps its moments in blocks of 256 values of 8 bits (arXiv 2110.02861); raises UserError
    when bitsandbytes is not installed.
    """
    if settings.kind == "sgd":
        # Without momentum the coupled decay of torch's SGD is the decoupled one.
        return torch.optim.SGD(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if adam_8bit:
        optimizer: torch.optim.Optimizer = _bitsandbytes().AdamW8bit(parameters, **options)
        return optimizer
    return torch.optim.AdamW(parameters, **options, fused=True)


def has_adam_8bit() -> bool:
    """Whether AdamW with 8-bit moments can be used here."""
    return find_spec("bitsandbytes") is not None


def moment_bytes(settings: OptimizerSettings, numel: int, *, adam_8bit: bool = False) -> int:
    """Bytes of the optimiser's state for one parameter of `numel` values, once it has taken a step."""
    if settings.kind == "sgd":
        return 0
    if not adam_8bit:
        return 8 * numel + 4  # two moments and the count of steps
    if numel < MIN_8BIT_NUMEL:
        return 8 * numel
    return 2 * numel + 8 * math.ceil(numel / 256)  # and an fp32 scale for each block of both moments


def train_only(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Makes `parameters` the trained ones: those that were trained before keep their moments and their count of steps,
    new ones start with none, and those that are not trained any more lose theirs."""
    (group,) = optimizer.param_groups
    group["params"] = [*parameters]
    kept = {id(parameter) for parameter in group["params"]}
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
        del optimizer.state[parameter]


def moments_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Moments | None:
    """A copy of AdamW's moments of `parameters`, which take their steps together, one after another; None before the
    first step, and for other optimisers."""
    states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    if not isinstance(optimizer, torch.optim.AdamW) or len(states) < len(parameters):
        return None
    exp_avg, exp_avg_sq = (
        np.concatenate([state[kind].cpu().numpy().ravel() for state in states], dtype=DTYPE)
        for kind in ("exp_avg", "exp_avg_sq")
    )
    return Moments(exp_avg, exp_avg_sq, min(int(states[0]["step"].item()), MAX_STEP))


def put_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
    step: int,
) -> bool:
    """Gives each of `parameters` a copy of its `exp_avg` and `exp_avg_sq` from `parts`, any shape, and the count of
    steps; False, with nothing done, for other optimisers than AdamW in fp32."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return False
    for parameter, (exp_avg, exp_avg_sq) in zip(parameters, parts, strict=True):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=parameter.device),  # on the device: the optimiser is fused
            "exp_avg": torch.tensor(exp_avg, device=parameter.device).view_as(parameter),
            "exp_avg_sq": torch.tensor(exp_avg_sq, device=parameter.device).view_as(parameter),
        }
    return True


def _bitsandbytes() -> Any:
    if not has_adam_8bit():
        raise UserError("8-bit AdamW needs bitsandbytes: pip install 'spes-node[adam8bit]'")
    # It warns of kernels for 4-bit weights that are not there and not wanted.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return import_module("bitsandbytes.optim")
