"""The losses: cross entropy with the output z-loss, and the two losses of the routers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.settings import LossSettings

LOGITS_IN_MEMORY = 2**25
"""Logits that exist at one time (128 MiB in fp32), whatever the vocabulary."""
VOCABULARY_ROWS = 2**14
"""Rows of the output matrix whose gradient is computed at a time, where its dtype is not that of the products."""


class OutputLoss(NamedTuple):
    """Scalars in fp32; only `total` carries a gradient."""

    total: Tensor
    """`cross_entropy + z_weight * z`."""
    cross_entropy: Tensor
    """Mean over tokens, nats."""
    z: Tensor
    """Mean over tokens of log(Z)^2."""


def output_loss(hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float) -> OutputLoss:
    """Cross entropy and z-loss of `logits = hidden @ weight.T`, without ever holding all the logits.

    `hidden` [T, D], `weight` [V, D], `targets` [T] int64. With Z = sum_v exp(logit_v):
    cross entropy = mean_t(log Z_t - logit_{t, target}); z = mean_t(log Z_t ^ 2) (PaLM, arXiv 2204.02311, section 5).
    The logarithms are taken in fp32; the products run in the dtype of autocast where that is on.
    """
    chunk = max(1, LOGITS_IN_MEMORY // weight.shape[0])
    learns = torch.is_grad_enabled()
    return OutputLoss(*_OutputLoss.apply(hidden, weight, targets, z_weight, chunk, learns))  # type: ignore[no-untyped-call]


class _OutputLoss(torch.autograd.Function):
    """Computes the gradients in the forward, chunk by chunk of tokens, while the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float, chunk: int, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        weight_here = weight.to(hidden.dtype)  # once, not for each chunk
        grad_hidden = torch.empty_like(hidden) if learns else None
        grad_weight = torch.zeros_like(weight) if learns else None
        cross_entropy = hidden.new_zeros((), dtype=torch.float32)
        z = torch.zeros_like(cross_entropy)
        scale = 1 / len(targets)
        for start in range(0, len(targets), chunk):
            part = hidden[start : start + chunk]
            target = targets[start : start + chunk].unsqueeze(-1)
            logits = (part @ weight_here.t()).float()
            # Everything relative to the largest logit of the row: large logits lose no digits.
            top = logits.amax(-1, keepdim=True)
            of_target = logits.sub_(top).gather(-1, target)
            sums = logits.exp_().sum(-1, keepdim=True)
            log_z = sums.log()
            cross_entropy += (log_z - of_target).sum() * scale
            log_z += top
            z += log_z.square().sum() * scale
            if grad_hidden is not None and grad_weight is not None:
                # d log Z / d logit is the softmax.
                grad = logits.mul_((1 + 2 * z_weight * log_z) * scale / sums)
                grad = grad.scatter_add_(-1, target, grad.new_full(target.shape, -scale)).to(hidden.dtype)
                torch.mm(grad, weight_here, out=grad_hidden[start : start + chunk])
                _add_product(grad_weight, grad, part)
        ctx.gradients = grad_hidden, grad_weight
        total = cross_entropy + z_weight * z
        ctx.mark_non_differentiable(cross_entropy, z)
        return total, cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Handed on without a copy, so there is nothing left for a second backward.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None, None


def _add_product(total: Tensor, grad: Tensor, part: Tensor) -> None:
    """`total` [V, D] += grad.T @ part, for `grad` [t, V] and `part` [t, D] of one dtype, without another [V, D]."""
    if total.dtype == part.dtype:
        total.addmm_(grad.t(), part)
        return
    for start in range(0, len(total), VOCABULARY_ROWS):
        rows = slice(start, start + VOCABULARY_ROWS)
        total[rows] += grad[:, rows].t() @ part


def load_balancing_loss(router_logits: Tensor, counts: Tensor, factor: Tensor | None = None) -> Tensor:
    """Mean over layers of E * sum_e f_e P_e, at least 1 when balanced and up to E / K when collapsed.

    `router_logits` [L, T, E]; `counts` [L, E], token copies sent to each expert. f_e = count_e / (T K) is the share of
    the token copies, P_e the mean router probability (Switch Transformer, arXiv 2101.03961, eq. 4 to 6, for K copies).
    Layers are never pooled: layers that each collapse on other experts look balanced when pooled. `factor` [L, E]
    multiplies the shares f_e (`own_share_factor`).
    """
    probability = router_logits.float().softmax(-1).mean(1)
    share = counts / counts.sum(-1, keepdim=True)
    if factor is not None:
        share = share * factor
    return router_logits.shape[-1] * (share * probability).sum(-1).mean()


def own_share_factor(settings: LossSettings, step: int) -> float:
    """The factor on the shares of a node's own experts at local step `step` (from 0): from `own_share_start` linearly
    to 1 at `own_share_steps`.

    The released code of SPES (spes/decayed_load_balance_loss.py) has the same line, but first applies it 500 steps
    after each start and trains with 1 until then; here it holds from the first step.
    """
    if not settings.own_share_steps:
        return 1.0
    progress = min(1.0, step / settings.own_share_steps)
    return settings.own_share_start + (1 - settings.own_share_start) * progress


def router_z_loss(router_logits: Tensor) -> Tensor:
    """Mean over layers and tokens of log(sum_e exp logit_e)^2 for `router_logits` [L, T, E] (ST-MoE, arXiv 2202.08906,
    eq. 5)."""
    return router_logits.float().logsumexp(-1).square().mean()
