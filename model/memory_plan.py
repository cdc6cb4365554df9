"""The planner: how many experts a device can train, and what has to be given up for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.errors import UserError
from model.frozen import packed_bytes
from model.memory import Memory, measure, static_memory
from model.optimizer import moment_bytes
from model.settings import ComputeSettings, ModelSettings, OptimizerSettings

MICRO_TOKENS = 4096
"""Tokens in a micro-batch, at least one sequence: enough to keep a GPU busy."""
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a plan has to fit into."""

    memory: int
    """Bytes that the trainer may take."""
    gpu: bool
    compute: ComputeSettings
    """What is fixed before anything is chosen: the dtype of the products, and the deterministic mode."""
    adam_8bit: bool
    """Whether 8-bit AdamW can be used."""

    def margin(self, total: int) -> int:
        """Bytes kept free beside `total` planned ones: for the runtime, and for what allocators waste.

        Python, torch and the text of a small run take 0.5 GB on a CPU, and the allocator 2 % (`make bench-memory`); a
        CUDA context and its libraries about 1.5 GB, and the allocator 4 % (estimates: no GPU was there).
        """
        return int(1.5 * GB + 0.04 * total) if self.gpu else int(0.5 * GB + 0.02 * total)


@dataclass(frozen=True, slots=True)
class Saving:
    """Something that can be given up for memory."""

    what: str
    cost: str
    settings: tuple[tuple[str, Any], ...]
    """The changes to the `ComputeSettings`."""
    rank: int
    """Of two savings that were made, the one of the lower rank is taken back first when there is room."""


RECOMPUTE = Saving(
    "the inner activations of the experts are computed again in the backward",
    "two of the three products of an expert are done twice: a step takes about a tenth longer",
    (("recompute", True),),
    rank=4,
)
CHECKPOINT = Saving(
    "each layer is computed again in the backward",
    "a second forward: a step takes about a third longer",
    (("recompute", False), ("checkpoint", True)),
    rank=3,
)
ONE_SEQUENCE = Saving(
    "one sequence at a time", "smaller products, which a GPU computes less well", (("micro_blocks", 1),), rank=2
)
BF16_STORE = Saving("frozen experts in bf16", "their weights are rounded by up to 0.4 %", (("frozen", "bf16"),), rank=1)
INT8_STORE = Saving(
    "frozen experts in int8",
    "their weights are rounded by about 0.7 %",
    (("frozen", "int8"),),
    rank=0,
)
ADAM_8BIT = Saving(
    "the moments of AdamW in 8 bits",
    "they are rounded; needs bitsandbytes",
    (("adam_8bit", True),),
    rank=5,
)
OFFLOAD = Saving(
    "frozen experts in host memory",
    "all of them cross the bus two or three times for each micro-batch",
    (("offload", True),),
    rank=6,
)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How to train on a device, and what that takes."""

    model: ModelSettings
    optimizer: OptimizerSettings
    device: Device
    compute: ComputeSettings
    num_owned: int
    """Experts of each layer that the numbers are for."""
    memory: Memory
    savings: tuple[Saving, ...]
    """What was given up, in the order in which it is tried."""

    @property
    def margin(self) -> int:
        """Bytes kept free."""
        return self.device.margin(self.memory.total)

    @property
    def needed(self) -> int:
        """Bytes of device memory for all of it."""
        return self.memory.total + self.margin

    @property
    def fits(self) -> bool:
        """Whether the device has them."""
        return self.needed <= self.device.memory

    @property
    def capacity(self) -> int:
        """The most experts of each layer that fit with the same savings; may be 0."""
        room = self.device.memory - self.needed
        return max(0, min(self.model.num_experts, self.num_owned + room // self.bytes_per_expert))

    @property
    def bytes_per_expert(self) -> int:
        """Device memory that one more expert takes: in all layers it trades its place in the store for fp32 values,
        gradients and moments; in one layer a second gradient, while a micro-batch is added to those before."""
        sizes = [2 * self.model.expert_size * self.model.hidden_size, self.model.expert_size * self.model.hidden_size]
        trained = sum(
            8 * numel + moment_bytes(self.optimizer, numel, adam_8bit=self.compute.adam_8bit) for numel in sizes
        )
        stored = packed_bytes(self.compute.frozen, self.model.hidden_size, self.model.expert_size)
        if self.compute.offload:
            stored = 0
        per_expert = self.model.num_layers * (trained - stored) + 4 * sum(sizes)
        return per_expert + self.device.margin(per_expert) - self.device.margin(0)


def plan_training(
    model: ModelSettings, optimizer: OptimizerSettings, device: Device, *, batch: int, length: int, num_wanted: int
) -> MemoryPlan:
    """The plan that gives up least so that `num_wanted` experts of each layer fit.

    A step takes `batch` sequences of `length` tokens. Savings are made in order until the model fits, first those that
    only cost time; then each one that turns out to be needless is taken back. Raises UserError when nothing fits, with
    what would.
    """
    if not 0 < num_wanted <= model.num_experts:
        raise UserError(f"cannot train {num_wanted} experts: this model has {model.num_experts} in each layer")
    micro = min(batch, max(1, MICRO_TOKENS // length))

    def plan(savings: Sequence[Saving]) -> MemoryPlan:
        store = "bf16" if device.compute.dtype == "bf16" else "fp32"
        update: dict[str, Any] = {"frozen": store, "micro_blocks": micro}
        for saving in savings:
            update |= dict(saving.settings)
        compute = device.compute.model_copy(update=update)
        static = static_memory(model, optimizer, compute, num_owned=num_wanted)
        shown = tuple(saving for saving in savings if saving != RECOMPUTE or CHECKPOINT not in savings)
        bare = MemoryPlan(
            model=model,
            optimizer=optimizer,
            device=device,
            compute=compute,
            num_owned=num_wanted,
            memory=static,
            savings=shown,
        )
        return _with_activations(bare, length) if bare.fits else bare

    possible = _possible_savings(model, optimizer, device, micro)
    attempts = [possible[:number] for number in range(len(possible) + 1)]
    # Of a few small experts, one that is unpacked may take more than the others save.
    attempts.append([saving for saving in possible if saving != INT8_STORE])
    savings = next((attempt for attempt in attempts if plan(attempt).fits), None)
    if savings is None:
        raise UserError(_refusal(_with_activations(plan(possible), length)))
    for saving in sorted(savings, key=lambda saving: saving.rank):
        without = [other for other in savings if other != saving]
        if plan(without).fits:
            savings = without
    return plan(savings)


def _possible_savings(model: ModelSettings, optimizer: OptimizerSettings, device: Device, micro: int) -> list[Saving]:
    savings = [RECOMPUTE]
    if model.num_layers > 2:  # one layer is there as a whole in the backward, so of two RECOMPUTE saves as much
        savings.append(CHECKPOINT)
    if micro > 1:
        savings.append(ONE_SEQUENCE)
    if device.compute.dtype == "fp32":
        savings.append(BF16_STORE)
    savings.append(INT8_STORE)
    if device.adam_8bit and optimizer.kind == "adamw":
        savings.append(ADAM_8BIT)
    if device.gpu:
        savings.append(OFFLOAD)
    return savings


def _with_activations(plan: MemoryPlan, length: int) -> MemoryPlan:
    sequences = plan.compute.micro_blocks
    memory = measure(
        plan.model, plan.optimizer, plan.compute, num_owned=plan.num_owned, sequences=sequences, length=length
    )
    return replace(plan, memory=memory)


def _refusal(plan: MemoryPlan) -> str:
    """Why a plan that has given up everything does not fit, and what would, in one line."""
    least = plan.needed - (plan.num_owned - 1) * plan.bytes_per_expert
    text = (
        f"{plan.num_owned} of {plan.model.num_experts} experts need {_at_least(plan.needed)} GB and there are "
        f"{math.floor(10 * plan.device.memory / GB) / 10} GB, with everything given up that can be"
    )
    if plan.capacity:
        return f"{text}. Train fewer: --experts {plan.capacity}"
    remedy = f"A device with {_at_least(least)} GB could train one expert; or take a run with a smaller model"
    if not plan.device.adam_8bit and plan.optimizer.kind == "adamw":
        remedy += ". 8-bit AdamW, which saves most, is not installed: pip install 'spes-node[adam8bit]'"
    return f"{text}. {remedy}"


def _at_least(size: int) -> float:
    """GB, rounded up: who has so many has enough."""
    return math.ceil(10 * size / GB) / 10
