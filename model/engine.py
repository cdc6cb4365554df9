"""The engine: one node's copy of the model, of which it trains the shared parameters and its own experts."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from model.architecture import build_on_meta
from model.errors import UserError
from model.experts import SplitExperts, check_experts
from model.losses import OutputLoss, load_balancing_loss, output_loss, own_share_factor, router_z_loss
from model.moments import Moments
from model.norm import RMSNorm
from model.optimizer import build_optimizer, learning_rate_at, moments_of, put_moments, train_only
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings
from model.shards import DTYPE, Shard, layout

EVALUATION_TOKENS = 8192
"""Tokens that one forward of the evaluation takes, where no micro-batch is set."""

CAUSAL_ATTENTION = "causal_sdpa"
"""Blocks are neither padded nor packed. transformers makes no mask for an attention that it has no mask function for,
and so does not look into the positions first, for which every forward would wait for the device."""
AttentionInterface.register(CAUSAL_ATTENTION, sdpa_attention_forward)

Experts = Iterable[int] | Mapping[int, Iterable[int]]
"""Which experts a node owns: the same ids in every layer, or the ids of each layer by its number."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What one step measured, before its update; losses are unweighted."""

    cross_entropy: float
    """Mean over predicted tokens, nats."""
    load_balancing: float
    """Mean over layers, with the factor on own experts; without one, 1 is perfect balance."""
    router_z: float
    output_z: float
    gradient_norm: float
    """Norm of the node's own gradient before clipping."""
    learning_rate: float


class Evaluation(NamedTuple):
    """What held-out text shows of a state."""

    nats: float
    """Summed cross entropy."""
    tokens: int
    """How many were predicted, B * S."""
    choices: Tensor
    """How often the router of each layer chose each expert, int64 [L, E]; a row sums to tokens * experts_per_token."""


class Engine:
    """The model of `settings`, of which this node trains the shared parameters and its own experts.

    Parameters are fp32 on `device`; `compute` says how they are held and computed with. Weights are zero until they are
    loaded. `model` is a transformers model of which only the experts and the norms are ours.
    """

    def __init__(
        self,
        settings: ModelSettings,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        *,
        experts: Experts = (),
        compute: ComputeSettings = ComputeSettings(),  # noqa: B008 - frozen
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.compute = compute
        self.shards = layout(settings)
        self._shards = {shard.name: shard for shard in self.shards}
        self._settings = settings
        self._loss_settings = loss
        self._optimizer_settings = optimizer
        if compute.deterministic:
            _compute_deterministically()
        self.model = _build(settings, _by_layer(experts, settings), compute, self.device)
        self.layers: list[SplitExperts] = [layer.mlp.experts for layer in self.model.model.layers]
        """The experts of each layer."""
        self.optimizer = build_optimizer(optimizer, self.model.parameters(), adam_8bit=compute.adam_8bit)
        self._own_mask = self._mask()

    @property
    def experts(self) -> tuple[frozenset[int], ...]:
        """Ids of the experts that this node trains, for each layer."""
        return tuple(frozenset(layer.owned) for layer in self.layers)

    def own(self, experts: Experts) -> None:
        """Changes which experts are trained. Values stay as this node holds them (a store of fewer bits has rounded
        those that were frozen: `load` what is now owned), and so do the optimiser's moments of all that is trained
        before and after; moments of new experts start at zero. Raises UserError for an id that is out of range."""
        for layer, owned in zip(self.layers, _by_layer(experts, self._settings), strict=True):
            layer.own(owned, self.device)
        train_only(self.optimizer, self.model.parameters())
        self._own_mask = self._mask()

    def trained_shards(self) -> tuple[str, ...]:
        """Names of the shared shards and of the own experts' shards, in canonical order."""
        return tuple(
            shard.name for shard in self.shards if shard.expert is None or shard.expert in self._experts_of(shard).owned
        )

    @torch.no_grad()
    def load(self, name: str, values: np.ndarray) -> None:
        """Copies the flat fp32 `values` [numel] into the shard `name`."""
        shard = self._shards[name]
        tensors = [torch.tensor(part) for part in shard.split(values)]
        if shard.expert is not None:
            self._experts_of(shard).write(shard.expert, *(tensor[0] for tensor in tensors))
        else:
            for piece, tensor in zip(shard.pieces, tensors, strict=True):
                self.model.get_parameter(piece.parameter)[piece.start : piece.stop].copy_(tensor)

    @torch.no_grad()
    def read(self, name: str) -> np.ndarray:
        """A copy of the values of the shard `name` as this node holds them, flat fp32 [numel]."""
        shard = self._shards[name]
        if shard.expert is not None:
            tensors = [*self._experts_of(shard).weights(shard.expert)]
        else:
            tensors = [self.model.get_parameter(p.parameter)[p.start : p.stop] for p in shard.pieces]
        return np.concatenate([tensor.cpu().numpy().ravel() for tensor in tensors], dtype=DTYPE)

    @torch.no_grad()
    def fold(self, name: str, values: np.ndarray, reference: np.ndarray) -> None:
        """Moves the training of a trained shard since `reference` onto `values`, both flat fp32 [numel]: its values x
        become `values` + (x - `reference`), elementwise in fp32. The optimiser's moments stay."""
        shard = self._shards[name]
        trained: Sequence[Tensor] = (
            self._own_parameters(shard)
            if shard.expert is not None
            else [self.model.get_parameter(piece.parameter)[piece.start : piece.stop] for piece in shard.pieces]
        )
        for tensor, base, before in zip(trained, shard.split(values), shard.split(reference), strict=True):
            # One operand on the device at a time.
            tensor.sub_(torch.tensor(before).view_as(tensor).to(self.device))
            tensor.add_(torch.tensor(base).view_as(tensor).to(self.device))

    def moments(self, name: str) -> Moments | None:
        """A copy of the moments of the shard of an own expert; None when there are none in fp32: before its first step,
        in SGD, in 8-bit AdamW."""
        return moments_of(self.optimizer, self._own_parameters(self._shards[name]))

    def load_moments(self, name: str, moments: Moments) -> bool:
        """Puts `moments` in the place of those of an own expert's shard; False, with nothing done, when the optimiser
        keeps none in fp32."""
        shard = self._shards[name]
        parts = zip(shard.split(moments.exp_avg), shard.split(moments.exp_avg_sq), strict=True)
        return put_moments(self.optimizer, self._own_parameters(shard), parts, moments.step)

    def train_step(self, tokens: np.ndarray | Tensor, step: int) -> StepLoss:
        """One optimiser step on `tokens` [B, S+1] at the learning rate of local step `step`.

        With micro-batches the gradient is the mean of theirs, and so are the measured losses. Raises
        FloatingPointError, with nothing changed, when the loss or the gradient is not finite.
        """
        batch = self._tokens(tokens)
        losses = torch.zeros(4, device=self.device)
        try:
            for part in torch.split(batch, self.compute.micro_blocks or len(batch)):
                share = len(part) / len(batch)
                losses += share * self.backward(part, step, share=share)
        except BaseException:
            self.optimizer.zero_grad()  # half a gradient must not leak into the next step
            raise
        norm = self.gradient_norm()
        # The one wait for the device outside the layers.
        cross_entropy, balance, router_z, output_z, gradient_norm = torch.cat([losses, norm.reshape(1)]).tolist()
        if not all(map(math.isfinite, (cross_entropy, balance, router_z, output_z, gradient_norm))):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"local step {step} was not taken: its cross entropy is {cross_entropy}, "
                f"its gradient norm {gradient_norm}"
            )
        learning_rate = self.update(step, norm)
        return StepLoss(cross_entropy, balance, router_z, output_z, gradient_norm, learning_rate)

    def backward(self, tokens: Tensor, step: int = 0, *, share: float = 1.0) -> Tensor:
        """Adds `share` times the gradient of the training loss on `tokens` [b, S+1] int64 to the parameters' `grad`;
        returns the measured losses of `loss`."""
        total, measured = self.loss(tokens, step)
        (total * share).backward()  # type: ignore[no-untyped-call]
        return measured

    def loss(self, tokens: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """The training loss on `tokens` [b, S+1] int64 at local step `step`, which carries the gradient; and cross
        entropy, load-balancing loss, router z-loss and output z-loss as fp32 [4], unweighted."""
        weights = self._loss_settings
        hidden, router_logits = self.hidden_states(tokens)
        output = self.output_loss(hidden, tokens)
        factor = own_share_factor(weights, step)
        counts = torch.stack([layer.last_counts for layer in self.layers if layer.last_counts is not None])
        balance = load_balancing_loss(router_logits, counts, 1 - (1 - factor) * self._own_mask if factor != 1 else None)
        router_z = router_z_loss(router_logits)
        total = output.total + weights.load_balancing * balance + weights.router_z * router_z
        return total, torch.stack([output.cross_entropy, balance.detach(), router_z.detach(), output.z])

    def gradient_norm(self) -> Tensor:
        """Norm of the gradient of all that this node trains."""
        return get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    def update(self, step: int, norm: Tensor) -> float:
        """Clips the gradient, whose norm is `norm`, takes the optimiser's step number `step` and drops the gradient;
        returns the learning rate."""
        if self._optimizer_settings.clip_norm:
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            clip_grads_with_norm_(parameters, self._optimizer_settings.clip_norm, norm)
        learning_rate = learning_rate_at(self._optimizer_settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return learning_rate

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray | Tensor) -> Evaluation:
        """How well `tokens` [B, S+1] are predicted, and by which experts."""
        length = tokens.shape[1] - 1
        total = 0.0
        choices = torch.zeros(self._settings.num_layers, self._settings.num_experts, dtype=torch.int64)
        rows = self.compute.micro_blocks or max(1, EVALUATION_TOKENS // length)
        for batch in torch.split(self._tokens(tokens), rows):
            hidden, logits = self.hidden_states(batch)
            total += self.output_loss(hidden, batch).cross_entropy.item() * len(batch) * length
            chosen = logits.topk(self._settings.experts_per_token, dim=-1).indices.flatten(1).cpu()
            choices += torch.stack([layer.bincount(minlength=self._settings.num_experts) for layer in chosen])
        return Evaluation(total, len(tokens) * length, choices)

    def hidden_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the layers make of `tokens` [b, S+1] without the last one, [b*S, D], and the logits of the routers
        [L, b*S, E]."""
        with self._autocast(), self._unmasked():
            states = self.model.model(tokens[:, :-1], output_router_logits=True)
        return states.last_hidden_state.flatten(0, 1), torch.stack(states.router_logits)

    def output_loss(self, hidden: Tensor, tokens: Tensor) -> OutputLoss:
        """Losses of the output for `hidden` [b*S, D], the hidden states of `tokens` [b, S+1]."""
        with self._autocast():
            return output_loss(hidden, self.model.lm_head.weight, tokens[:, 1:].flatten(), self._loss_settings.output_z)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute.dtype == "bf16")

    @contextmanager
    def _unmasked(self) -> Iterator[None]:
        """Inside, attention is causal and nothing else; outside, `model` takes masks, positions and caches as ever."""
        config = self.model.config
        before, config._attn_implementation = config._attn_implementation, CAUSAL_ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before

    def _mask(self) -> Tensor:
        """1 for each own expert, [L, E]."""
        mask = torch.zeros(len(self.layers), self.layers[0].num_experts)
        for row, layer in zip(mask, self.layers, strict=True):
            row[list(layer.owned)] = 1
        return mask.to(self.device)

    def _tokens(self, tokens: np.ndarray | Tensor) -> Tensor:
        if isinstance(tokens, np.ndarray):
            # A copy: torch refuses to share memory that is read-only.
            tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens.to(self.device, torch.int64)

    def _experts_of(self, shard: Shard) -> SplitExperts:
        module = self.model.get_submodule(shard.pieces[0].parameter.rpartition(".")[0])
        assert isinstance(module, SplitExperts)
        return module

    def _own_parameters(self, shard: Shard) -> tuple[nn.Parameter, nn.Parameter]:
        """The two matrices of an own expert, in the order of its shard's pieces."""
        experts = self._experts_of(shard)
        return experts.gate_up[str(shard.expert)], experts.down[str(shard.expert)]


def _build(
    settings: ModelSettings, experts: Sequence[frozenset[int]], compute: ComputeSettings, device: torch.device
) -> PreTrainedModel:
    """The transformers model with our experts and norms in the place of its own, all zero; the fused experts never get
    memory."""
    model = build_on_meta(settings)
    for name, module in [*model.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, RMSNorm(module.weight, module.variance_epsilon))
    for layer in model.model.layers:
        layer.mlp.experts = nn.Identity()
    for name, parameter in [*model.named_parameters()]:
        module, _, attribute = name.rpartition(".")
        zeros = nn.Parameter(torch.zeros(parameter.shape, device=device))
        setattr(model.get_submodule(module), attribute, zeros)
    # Its tables are buffers that are computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for layer, owned in zip(model.model.layers, experts, strict=True):
        layer.mlp.experts = SplitExperts(
            settings.num_experts, settings.hidden_size, settings.expert_size, owned, compute=compute, device=device
        )
    if compute.checkpoint:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def _by_layer(experts: Experts, settings: ModelSettings) -> list[frozenset[int]]:
    """The owned ids of each layer. Raises UserError for layers and experts that the model does not have."""
    layers = range(settings.num_layers)
    if not isinstance(experts, Mapping):
        experts = dict.fromkeys(layers, frozenset(experts))
    if unknown := sorted(set(experts).difference(layers)):
        raise UserError(f"layer {unknown[0]} does not exist: this model has layers 0 to {layers[-1]}")
    owned = [frozenset(experts.get(layer, ())) for layer in layers]
    check_experts(frozenset().union(*owned), settings.num_experts)
    return owned


def _compute_deterministically() -> None:
    # What cuBLAS needs to keep its promise; it reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
