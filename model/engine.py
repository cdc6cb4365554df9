"""The engine: one node's copy of the model, of which it trains the shared parameters and its own experts."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from model.architecture import build_on_meta
from model.experts import SplitExperts
from model.losses import OutputLoss, load_balancing_loss, output_loss, router_z_loss
from model.norm import RMSNorm
from model.optimizer import build_optimizer, learning_rate_at, replace_parameter
from model.settings import LossSettings, ModelSettings, OptimizerSettings
from model.shards import DTYPE, Shard, layout

EVALUATION_TOKENS = 8192
"""Tokens that one forward of the evaluation takes."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What one step measured, before its update; losses are unweighted."""

    cross_entropy: float
    """Mean over predicted tokens, nats."""
    load_balancing: float
    """Mean over layers; 1 is perfect balance."""
    router_z: float
    output_z: float
    gradient_norm: float
    """Norm of the node's own gradient before clipping."""
    learning_rate: float


class Engine:
    """The model of `settings` with the experts in `experts` (the same ids in every layer) trainable.

    Parameters are fp32 on `device`; `dtype` bfloat16 computes under autocast. Weights are zero until `load`ed.
    """

    def __init__(
        self,
        settings: ModelSettings,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        *,
        experts: Iterable[int] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.shards = layout(settings)
        self._shards = {shard.name: shard for shard in self.shards}
        self._loss_settings = loss
        self._optimizer_settings = optimizer
        self.model = _build(settings, experts, self.device)
        self._layers = [layer.mlp.experts for layer in self.model.model.layers]
        self.optimizer = build_optimizer(optimizer, self.model.parameters())

    @property
    def experts(self) -> frozenset[int]:
        """Ids of the experts that this node trains."""
        return frozenset(self._layers[0].owned)

    def own(self, experts: Iterable[int]) -> None:
        """Changes which experts are trained. Values stay, and so do the optimiser's moments of all that is trained
        before and after; moments of new experts start at zero."""
        owned = frozenset(experts)
        if owned == self.experts:
            return
        for layer in self._layers:
            before, old = layer.owned, (layer.gate_up, layer.down)
            layer.own(owned)
            rows = [before.index(expert) if expert in before else None for expert in layer.owned]
            for old_parameter, parameter in zip(old, (layer.gate_up, layer.down), strict=True):
                replace_parameter(self.optimizer, old_parameter, parameter, rows)

    def trained_shards(self) -> tuple[str, ...]:
        """Names of the shared shards and of the own experts' shards, in canonical order."""
        return tuple(shard.name for shard in self.shards if shard.expert is None or shard.expert in self.experts)

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
        """A copy of the values of the shard `name`, flat fp32 [numel]."""
        shard = self._shards[name]
        if shard.expert is not None:
            tensors = [*self._experts_of(shard).read(shard.expert)]
        else:
            tensors = [self.model.get_parameter(p.parameter)[p.start : p.stop] for p in shard.pieces]
        return np.concatenate([tensor.cpu().numpy().ravel() for tensor in tensors], dtype=DTYPE)

    def train_step(self, tokens: np.ndarray | Tensor, step: int) -> StepLoss:
        """One optimiser step on `tokens` [B, S+1] at the learning rate of local step `step`.

        Raises FloatingPointError, with nothing changed, when the loss or the gradient is not finite.
        """
        weights = self._loss_settings
        output, router_logits = self._forward(self._tokens(tokens))
        balance = load_balancing_loss(router_logits, torch.stack([layer.last_counts for layer in self._layers]))
        router_z = router_z_loss(router_logits)
        total = output.total + weights.load_balancing * balance + weights.router_z * router_z
        total.backward()  # type: ignore[no-untyped-call]

        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters])
        # The one wait for the device outside the layers.
        measured = torch.stack([output.cross_entropy, balance, router_z, output.z, norm]).tolist()
        if not all(map(math.isfinite, measured)):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"local step {step} was not taken: its cross entropy is {measured[0]}, its gradient norm {measured[-1]}"
            )
        if self._optimizer_settings.clip_norm:
            clip_grads_with_norm_(parameters, self._optimizer_settings.clip_norm, norm)
        learning_rate = learning_rate_at(self._optimizer_settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepLoss(
            cross_entropy=measured[0],
            load_balancing=measured[1],
            router_z=measured[2],
            output_z=measured[3],
            gradient_norm=measured[4],
            learning_rate=learning_rate,
        )

    @torch.no_grad()
    def evaluate(self, tokens: np.ndarray | Tensor) -> tuple[float, int]:
        """Summed cross entropy in nats over `tokens` [B, S+1], and the number of tokens predicted, B * S."""
        length = tokens.shape[1] - 1
        total = 0.0
        for batch in torch.split(self._tokens(tokens), max(1, EVALUATION_TOKENS // length)):
            output, _ = self._forward(batch)
            total += output.cross_entropy.item() * len(batch) * length
        return total, len(tokens) * length

    def _forward(self, tokens: Tensor) -> tuple[OutputLoss, Tensor]:
        """Losses of the output, and the logits of the routers [L, B*S, E]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = self.model.model(tokens[:, :-1], output_router_logits=True)
            output = output_loss(
                states.last_hidden_state.flatten(0, 1),
                self.model.lm_head.weight,
                tokens[:, 1:].flatten(),
                self._loss_settings.output_z,
            )
        return output, torch.stack(states.router_logits)

    def _tokens(self, tokens: np.ndarray | Tensor) -> Tensor:
        if isinstance(tokens, np.ndarray):
            # A copy: torch refuses to share memory that is read-only.
            tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens.to(self.device, torch.int64)

    def _experts_of(self, shard: Shard) -> SplitExperts:
        module = self.model.get_submodule(shard.pieces[0].parameter.rpartition(".")[0])
        assert isinstance(module, SplitExperts)
        return module


def _build(settings: ModelSettings, experts: Iterable[int], device: torch.device) -> PreTrainedModel:
    """The transformers model with our experts and norms in the place of its own, all zero; the fused experts never get
    memory."""
    owned = tuple(experts)
    model = build_on_meta(settings)
    for name, module in [*model.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, RMSNorm(module.weight, module.variance_epsilon))
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.mlp.experts = SplitExperts(settings.num_experts, settings.hidden_size, settings.expert_size, owned)
    model.to_empty(device=device)
    # Its tables are buffers that are computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for tensor in (*model.parameters(), *(buffer for layer in model.model.layers for buffer in layer.mlp.buffers())):
        nn.init.zeros_(tensor)
    return model
