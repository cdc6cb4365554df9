"""The inner optimiser: its schedule, its construction, and its moments when experts change hands."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from model.settings import OptimizerSettings


def learning_rate_at(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of local step `step` (from 0): linear warm-up times a cosine from the peak to
    `final_fraction * peak` at `decay_steps`, constant from there on."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if not settings.decay_steps:
        return settings.learning_rate * warmup
    progress = min(1.0, step / settings.decay_steps)
    floor = settings.final_fraction
    return settings.learning_rate * (warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))))


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or SGD without momentum, with decoupled weight decay on every parameter."""
    if settings.kind == "sgd":
        # Without momentum the coupled decay of torch's SGD is the decoupled one.
        return torch.optim.SGD(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def replace_parameter(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, rows: Sequence[int | None]
) -> None:
    """Puts `new` [n, ...] in the place of `old` [m, ...] with the moments of the rows that are kept.

    `rows[i]` is the row of `old` that is now row i of `new`, or None when that is new here: its moments start at zero.
    The count of steps belongs to the whole tensor: when no row is kept, it starts at zero too.
    """
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    state = optimizer.state.pop(old, {})
    kept = {row: source for row, source in enumerate(rows) if source is not None}
    if not kept:
        return
    for name, value in state.items():
        if value.shape != old.shape:
            optimizer.state[new][name] = value
            continue
        moved = torch.zeros_like(new)
        moved[list(kept)] = value[list(kept.values())]
        optimizer.state[new][name] = moved.detach()
