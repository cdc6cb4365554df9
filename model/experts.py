"""The experts of one layer when this node trains only some of them."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.errors import UserError
from model.frozen import FrozenStore, Matrices
from model.settings import ComputeSettings

_DEFAULTS = ComputeSettings()


class SplitExperts(nn.Module):
    """Drop-in for the experts module of transformers (`OlmoeExperts` and its like), SwiGLU without biases.

    Each owned expert e is two trainable fp32 Parameters, `gate_up[str(e)]` [2F, D] (gate rows first) and `down[str(e)]`
    [D, F]; all others are in `frozen`. A frozen expert's weight gradient is never computed. Values start at zero.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        owned: Iterable[int] = (),
        *,
        compute: ComputeSettings = _DEFAULTS,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.ParameterDict()
        self.down = nn.ParameterDict()
        self.frozen = FrozenStore(compute.frozen, offload=compute.offload)
        self.recompute = compute.recompute
        self.balanced = False
        """Take every expert as equally busy instead of asking the device: for shapes without numbers behind them."""
        self.last_counts: Tensor | None = None
        """Token copies that each expert got in the last forward, [E] int64."""
        owned = frozenset(owned)
        check_experts(owned, num_experts)
        for expert in range(num_experts):
            gate_up = torch.zeros(2 * expert_size, hidden_size, device=device)
            down = torch.zeros(hidden_size, expert_size, device=device)
            if expert in owned:
                self.gate_up[str(expert)], self.down[str(expert)] = nn.Parameter(gate_up), nn.Parameter(down)
            else:
                self.frozen.put(expert, gate_up, down)

    @property
    def owned(self) -> tuple[int, ...]:
        """Ids of the trained experts, ascending."""
        return tuple(map(int, self.gate_up))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Mixture of the experts' outputs [T, D] for `hidden_states` [T, D], with `top_k_index` [T, K] int64 (distinct
        in each row) and `top_k_weights` [T, K]. Computes in the dtype of autocast where that is on.

        fp32 gives the bits of transformers' eager path; its grouped path adds the experts of a token in another order,
        which can be seen in the last bit where K > 2.
        """
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(kind))
        expert_of_row, order = top_k_index.flatten().sort(stable=True)
        starts = torch.searchsorted(expert_of_row, torch.arange(self.num_experts + 1, device=order.device))
        self.last_counts = starts.diff()
        if self.balanced:
            bounds = [expert * len(order) // self.num_experts for expert in range(self.num_experts + 1)]
        else:
            # The one wait for the device in this layer; the backward uses the same numbers.
            bounds = starts.tolist()
        keep = torch.is_grad_enabled() and not self.recompute
        mixture: Tensor = _Mixture.apply(  # type: ignore[no-untyped-call]
            hidden_states, top_k_weights, self, order, bounds, keep, *self.gate_up.values(), *self.down.values()
        )
        return mixture

    def busy(self, bounds: list[int], like: Tensor) -> Iterator[tuple[int, slice, Matrices]]:
        """The experts that got any rows, with these rows and their weights in the dtype and on the device of `like`."""
        groups = [(expert, slice(a, b)) for expert, (a, b) in enumerate(pairwise(bounds)) if b > a]
        frozen = [expert for expert, _ in groups if expert in self.frozen.experts]
        stream = self.frozen.stream(frozen, like.dtype, like.device)
        for expert, rows in groups:
            yield expert, rows, next(stream) if expert in self.frozen.experts else self.weights(expert, like.dtype)

    def weights(self, expert: int, dtype: torch.dtype = torch.float32) -> Matrices:
        """The values of one expert as this node computes with them, detached; they may share its memory."""
        if expert in self.frozen.experts:
            return self.frozen.get(expert, dtype)
        return self.gate_up[str(expert)].detach().to(dtype), self.down[str(expert)].detach().to(dtype)

    def write(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Copies values into one expert."""
        if expert in self.frozen.experts:
            self.frozen.put(expert, gate_up, down)
        else:
            self.gate_up[str(expert)].detach().copy_(gate_up)
            self.down[str(expert)].detach().copy_(down)

    def _save_to_state_dict(self, *_: Any) -> None:
        # transformers would save a part of the experts under names of ours, without a word.
        raise RuntimeError("frozen experts are not in a state dict: write a checkpoint with model.export")

    def own(self, experts: Iterable[int], device: torch.device | None = None) -> None:
        """Makes `experts` (any set, also none) the trained ones. An expert that was owned before keeps its Parameters;
        new ones take the values of the store, as it has kept them. Raises UserError for an id that is out of range."""
        owned = frozenset(experts)
        check_experts(owned, self.num_experts)
        before = frozenset(self.owned)
        if owned == before:
            return
        for expert in before - owned:
            self.frozen.put(expert, self.gate_up.pop(str(expert)), self.down.pop(str(expert)))
        for expert in owned - before:
            gate_up, down = self.frozen.get(expert, torch.float32, device)
            self.gate_up[str(expert)] = nn.Parameter(gate_up.clone())
            self.down[str(expert)] = nn.Parameter(down.clone())
            self.frozen.drop(expert)
        for name in ("gate_up", "down"):
            parameters = getattr(self, name)
            setattr(self, name, nn.ParameterDict({str(expert): parameters[str(expert)] for expert in sorted(owned)}))


def check_experts(experts: Iterable[int], num_experts: int) -> None:
    """Raises UserError for an id that is out of range."""
    for expert in sorted(experts):
        if not 0 <= expert < num_experts:
            raise UserError(f"expert {expert} does not exist: this model has experts 0 to {num_experts - 1}")


class _Mixture(torch.autograd.Function):
    """y_t = sum_k w_tk * down_e (silu(gate_e x_t) * up_e x_t), e = index_tk.

    Rows are token copies sorted by expert: `order` [T*K] numbers them, expert e has rows bounds[e]:bounds[e+1]. Saved
    for the backward: x, the router weights and, unless recomputed, the inner pre-activations [T*K, 2F]; no copy of any
    weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: SplitExperts,
        order: Tensor,
        bounds: list[int],
        keep: bool,
        *owned: Tensor,
    ) -> Tensor:
        token = order // weights.shape[1]
        scale = weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        kept: list[Tensor] = []
        mixture = torch.zeros_like(x)
        for _, rows, (gate_up, down) in experts.busy(bounds, x):  # no enumerate: it would hold on to the weights
            tokens = token[rows]
            inner = x.index_select(0, tokens) @ gate_up.t()
            gate, up = inner.chunk(2, dim=-1)
            out = F.silu(gate).mul_(up) @ down.t()
            # A token comes once in each group: the order of the additions is fixed on every device.
            mixture.index_add_(0, tokens, out.mul_(scale[rows]))
            if keep:
                kept.append(inner)
            del gate_up, down  # before the next ones are unpacked
        # Saving the Parameters costs nothing and makes autograd notice weights that change before the backward.
        ctx.save_for_backward(x, weights, order, token, scale, *kept, *owned)
        ctx.experts, ctx.bounds, ctx.num_kept, ctx.owned = experts, bounds, len(kept), experts.owned
        return mixture

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, token, scale, *saved = ctx.saved_tensors
        kept, parameters = saved[: ctx.num_kept], saved[ctx.num_kept :]
        grad_x = torch.zeros_like(x)
        grad_scale = scale.new_empty(len(scale))
        gradients: dict[int, tuple[Tensor, Tensor]] = {}
        inner_of_rows = iter(kept)
        for expert, rows, (gate_up, down) in ctx.experts.busy(ctx.bounds, x):
            trained, tokens, row_scale = expert in ctx.owned, token[rows], scale[rows]
            inputs = x.index_select(0, tokens) if trained or not kept else None
            inner = next(inner_of_rows) if kept else inputs @ gate_up.t()
            gate, up = inner.chunk(2, dim=-1)
            silu = F.silu(gate)
            product = silu * up
            grad_out = grad.index_select(0, tokens)
            grad_product = grad_out @ down
            torch.linalg.vecdot(grad_product, product, out=grad_scale[rows])
            grad_product *= row_scale
            grad_inner = torch.empty_like(inner)
            grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
            torch.mul(grad_product, silu, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_product.mul_(up), gate, grad_input=grad_gate)
            grad_x.index_add_(0, tokens, grad_inner @ gate_up)
            del gate_up, down
            if inputs is not None and trained:
                grad_gate_up, grad_down = grad_inner.t() @ inputs, grad_out.mul_(row_scale).t() @ product
                gradients[expert] = grad_gate_up.to(parameters[0].dtype), grad_down.to(parameters[0].dtype)
        grad_weights = torch.empty_like(weights)
        grad_weights.view(-1)[order] = grad_scale.to(weights.dtype)
        grad_owned = [
            gradients[expert][matrix] if expert in gradients else torch.zeros_like(parameter)
            for (matrix, expert), parameter in zip(
                ((matrix, expert) for matrix in (0, 1) for expert in ctx.owned), parameters, strict=True
            )
        ]
        return grad_x, grad_weights, None, None, None, None, *grad_owned
