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
        # In the order of transformers' own norm, so fp32 gives its bits.
        normed = x.float().square()
        scale: Tensor = normed.mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale, out=normed).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        # One buffer for all: first the product that both gradients are sums of, then the gradient of x.
        product = grad * x
        grad_weight = scale.flatten() @ product.flatten(0, -2)
        along = (product @ weight).unsqueeze(-1).mul_(scale.pow(3).div_(x.shape[-1]))
        grad_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(x, along, value=-1)
        return grad_x.to(x.dtype), grad_weight, None
