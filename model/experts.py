"""The experts of one layer when this node trains only some of them."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class FrozenStore(nn.Module):
    """The experts that this node only reads: fp32 buffers, one pair for each expert, never a gradient.

    `put` and `get` are the only places that know how the values are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts: set[int] = set()

    def get(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`gate_up` [2F, D] and `down` [D, F] of one expert in `dtype`."""
        return self.get_buffer(f"gate_up_{expert}").to(dtype), self.get_buffer(f"down_{expert}").to(dtype)

    def put(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Keeps a copy of the values of one expert, which may be new here."""
        if expert in self.experts:
            self.get_buffer(f"gate_up_{expert}").copy_(gate_up)
            self.get_buffer(f"down_{expert}").copy_(down)
        else:
            self.register_buffer(f"gate_up_{expert}", gate_up.detach().clone(), persistent=False)
            self.register_buffer(f"down_{expert}", down.detach().clone(), persistent=False)
            self.experts.add(expert)

    def drop(self, expert: int) -> None:
        """Forgets one expert."""
        delattr(self, f"gate_up_{expert}")
        delattr(self, f"down_{expert}")
        self.experts.remove(expert)

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenStore":
        def keep_dtype(tensor: Tensor) -> Tensor:
            # The values are kept as they came: `.to(dtype)` on the model moves them but never rounds them.
            moved: Tensor = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self


class SplitExperts(nn.Module):
    """Drop-in for the experts module of transformers (`OlmoeExperts` and its like), SwiGLU without biases.

    Owned experts are rows of two trainable fp32 Parameters, `gate_up` [n, 2F, D] (gate rows first) and `down`
    [n, D, F], in ascending order of `owned`; all others are in `frozen`. A frozen expert's weight gradient is never
    computed. Values start at zero.
    """

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int, owned: Iterable[int] = ()) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.owned = tuple(sorted(set(owned)))
        self.gate_up = nn.Parameter(torch.zeros(len(self.owned), 2 * expert_size, hidden_size))
        self.down = nn.Parameter(torch.zeros(len(self.owned), hidden_size, expert_size))
        self.frozen = FrozenStore()
        for expert in set(range(num_experts)).difference(self.owned):
            self.frozen.put(
                expert, self.gate_up.new_zeros(self.gate_up.shape[1:]), self.down.new_zeros(self.down.shape[1:])
            )
        self.last_counts: Tensor | None = None
        """Token copies that each expert got in the last forward, [E] int64."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mixture of the experts' outputs [T, D] for `hidden_states` [T, D], with `top_k_index` [T, K] int64 (distinct
        in each row) and `top_k_weights` [T, K]. Computes in the dtype of autocast where that is on."""
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(kind))
        expert_of_row, order = top_k_index.flatten().sort(stable=True)
        starts = torch.searchsorted(expert_of_row, torch.arange(self.num_experts + 1, device=order.device))
        self.last_counts = starts.diff()
        # The one wait for the device in this layer; the backward uses the same numbers.
        bounds = starts.tolist()
        mixture: Tensor = _Mixture.apply(  # type: ignore[no-untyped-call]
            hidden_states, top_k_weights, self.gate_up, self.down, self, order, bounds
        )
        return mixture

    def weight(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`gate_up` [2F, D] and `down` [D, F] of one expert, detached; they may share its memory."""
        if expert in self.frozen.experts:
            return self.frozen.get(expert, dtype)
        row = self.owned.index(expert)
        return self.gate_up.detach()[row].to(dtype), self.down.detach()[row].to(dtype)

    def read(self, expert: int) -> tuple[Tensor, Tensor]:
        """`gate_up` [2F, D] and `down` [D, F] of one expert in fp32, detached; they may share its memory."""
        return self.weight(expert, torch.float32)

    def write(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Copies values into one expert."""
        if expert in self.frozen.experts:
            self.frozen.put(expert, gate_up, down)
        else:
            row = self.owned.index(expert)
            self.gate_up.detach()[row].copy_(gate_up)
            self.down.detach()[row].copy_(down)

    def own(self, experts: Iterable[int]) -> None:
        """Makes `experts` (any set, also none) the trained ones. All values stay; `gate_up` and `down` become new
        Parameters."""
        owned = tuple(sorted(set(experts)))
        gate_up = self.gate_up.new_empty(len(owned), *self.gate_up.shape[1:])
        down = self.down.new_empty(len(owned), *self.down.shape[1:])
        for row, expert in enumerate(owned):
            gate_up[row], down[row] = self.read(expert)
        for expert in set(self.owned).difference(owned):
            self.frozen.put(expert, *self.read(expert))
        for expert in self.frozen.experts.intersection(owned):
            self.frozen.drop(expert)
        self.gate_up, self.down, self.owned = nn.Parameter(gate_up), nn.Parameter(down), owned


class _Mixture(torch.autograd.Function):
    """y_t = sum_k w_tk * down_e (silu(gate_e x_t) * up_e x_t), e = index_tk.

    Rows are token copies sorted by expert: `order` [T*K] numbers them, expert e has rows bounds[e]:bounds[e+1].
    Saved for the backward: x, the router weights and the inner pre-activations [T*K, 2F]; no copy of any weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts: SplitExperts,
        order: Tensor,
        bounds: list[int],
    ) -> Tensor:
        token = order // weights.shape[1]
        scale = weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        inner = x.new_empty(len(order), gate_up.shape[1])
        mixture = torch.zeros_like(x)
        for expert, rows in _groups(bounds):
            expert_gate_up, expert_down = experts.weight(expert, x.dtype)
            torch.mm(x.index_select(0, token[rows]), expert_gate_up.t(), out=inner[rows])
            gate, up = inner[rows].chunk(2, dim=-1)
            out = F.silu(gate).mul_(up) @ expert_down.t()
            # A token comes once in each group: the order of the additions is fixed on every device.
            mixture.index_add_(0, token[rows], out.mul_(scale[rows]))
        # Saving the two Parameters costs nothing and makes autograd notice weights that change before the backward.
        ctx.save_for_backward(x, weights, order, token, scale, inner, gate_up, down)
        ctx.experts, ctx.bounds = experts, bounds
        return mixture

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, token, scale, inner, gate_up, down = ctx.saved_tensors
        experts: SplitExperts = ctx.experts
        grad_x = torch.zeros_like(x)
        grad_scale = torch.empty_like(scale)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        for expert, rows in _groups(ctx.bounds):
            expert_gate_up, expert_down = experts.weight(expert, x.dtype)
            gate, up = inner[rows].chunk(2, dim=-1)
            silu = F.silu(gate)
            product = silu * up
            grad_out = grad.index_select(0, token[rows])
            grad_product = grad_out @ expert_down
            torch.sum(grad_product * product, dim=-1, keepdim=True, out=grad_scale[rows])
            grad_product *= scale[rows]
            grad_gate = torch.ops.aten.silu_backward(grad_product * up, gate)
            grad_inner = torch.cat([grad_gate, grad_product.mul_(silu)], dim=-1)
            grad_x.index_add_(0, token[rows], grad_inner @ expert_gate_up)
            if expert in experts.owned:
                row = experts.owned.index(expert)
                grad_gate_up[row] = grad_inner.t() @ x.index_select(0, token[rows])
                grad_down[row] = grad_out.t() @ product.mul_(scale[rows])
        grad_weights = torch.empty_like(weights)
        grad_weights.view(-1)[order] = grad_scale.flatten().to(weights.dtype)
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None


def _groups(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    """The experts that got any rows, with these rows."""
    return ((expert, slice(a, b)) for expert, (a, b) in enumerate(pairwise(bounds)) if b > a)
