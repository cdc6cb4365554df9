"""RMSNorm with a backward of its own: faster than a chain of operations, and it keeps no fp32 copy of its input."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Drop-in for the RMSNorm of transformers: `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in fp32
    (arXiv 1910.07467)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., D] of any floating dtype to fp32 [..., D]."""
        normed: Tensor = _RMSNorm.apply(hidden_states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RMSNorm(torch.autograd.Function):
    """Saves its input as it came and one reciprocal root for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale: Tensor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * weight
        along = torch.linalg.vecdot(grad_normed, normed).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = grad_normed.addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
