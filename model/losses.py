"""The losses: cross entropy with the output z-loss, and the two losses of the routers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_IN_MEMORY = 2**25
"""Logits that exist at one time (128 MiB in fp32), whatever the vocabulary."""


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
    return OutputLoss(*_OutputLoss.apply(hidden, weight, targets, z_weight, chunk))  # type: ignore[no-untyped-call]


class _OutputLoss(torch.autograd.Function):
    """Computes the gradients in the forward, chunk by chunk of tokens, while the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_weight: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        grad_weight = torch.zeros_like(weight) if needs_gradient else None
        cross_entropy = hidden.new_zeros((), dtype=torch.float32)
        z = torch.zeros_like(cross_entropy)
        scale = 1 / len(targets)
        for start in range(0, len(targets), chunk):
            part = hidden[start : start + chunk]
            target = targets[start : start + chunk].unsqueeze(-1)
            logits = (part @ weight.t()).float()
            log_z = logits.logsumexp(-1, keepdim=True)
            cross_entropy += (log_z - logits.gather(-1, target)).sum() * scale
            z += log_z.square().sum() * scale
            if grad_hidden is not None and grad_weight is not None:
                # d log Z / d logit is the softmax.
                grad = logits.sub_(log_z).exp_().mul_((1 + 2 * z_weight * log_z) * scale)
                grad.scatter_add_(-1, target, grad.new_full(target.shape, -scale))
                grad_hidden[start : start + chunk] = grad @ weight
                grad_weight += grad.t() @ part
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden, grad_weight)
        total = cross_entropy + z_weight * z
        ctx.mark_non_differentiable(cross_entropy, z)
        return total, cross_entropy, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None, None


def load_balancing_loss(router_logits: Tensor, counts: Tensor) -> Tensor:
    """Mean over layers of E * sum_e f_e P_e, at least 1 when balanced and up to E / K when collapsed.

    `router_logits` [L, T, E]; `counts` [L, E], token copies sent to each expert. f_e = count_e / (T K) is the share of
    the token copies, P_e the mean router probability (Switch Transformer, arXiv 2101.03961, eq. 4 to 6, for K copies).
    Layers are never pooled: layers that each collapse on other experts look balanced when pooled.
    """
    probability = router_logits.float().softmax(-1).mean(1)
    share = counts / counts.sum(-1, keepdim=True)
    return router_logits.shape[-1] * (share * probability).sum(-1).mean()


def router_z_loss(router_logits: Tensor) -> Tensor:
    """Mean over layers and tokens of log(sum_e exp logit_e)^2 for `router_logits` [L, T, E] (ST-MoE, arXiv 2202.08906,
    eq. 5)."""
    return router_logits.float().logsumexp(-1).square().mean()
