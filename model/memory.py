"""How much memory training takes: measured on tensors without numbers, so a model of any size is planned in seconds."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from model.architecture import build_on_meta
from model.engine import Engine
from model.frozen import packed_bytes
from model.losses import OutputLoss
from model.optimizer import moment_bytes
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made while it is on, and of those that are freed.

    Memory that a kernel takes for itself, and what the allocator keeps back, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        """Bytes alive now."""
        self.peak = 0
        """The most that were alive since the last `mark`."""
        self._storages = WeakIdKeyDictionary()

    def mark(self) -> int:
        """Begins a new peak; returns the bytes alive now."""
        self.peak = self.current
        return self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages[storage] = True
            self._add(storage.nbytes())
            finalize(storage, self._add, -storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the device at the peak of a training step of several micro-batches; their sum is the peak."""

    weights: int
    """fp32 values of the shared parameters and of the own experts, and the tables of the rotary embedding."""
    gradients: int
    """Their fp32 gradients."""
    optimizer: int
    """The optimiser's state."""
    frozen: int
    """The other experts, as the store keeps them; with offloading, the three that are on the device at a time."""
    activations: int
    """What the forward of a micro-batch keeps for its backward."""
    logits: int
    """What the output loss takes beside these."""
    work: int
    """What the backward takes beyond that."""
    host: int
    """Frozen experts in host memory; not part of the total."""

    @property
    def static(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.gradients + self.optimizer + self.frozen

    @property
    def total(self) -> int:
        """Peak bytes on the device, without what the runtime takes for itself."""
        return self.static + self.activations + self.logits + self.work


class _MeteredEngine(Engine):
    """Notes the memory around the output loss."""

    meter: Meter
    before_output = 0
    """Bytes alive when the output loss begins."""
    peak_of_output = 0
    """The most bytes alive during it."""

    def output_loss(self, hidden: Tensor, tokens: Tensor) -> OutputLoss:
        self.before_output = self.meter.mark()
        output = super().output_loss(hidden, tokens)
        self.peak_of_output = self.meter.peak
        self.meter.mark()
        return output


def measure(
    settings: ModelSettings,
    optimizer: OptimizerSettings,
    compute: ComputeSettings,
    *,
    num_owned: int,
    sequences: int,
    length: int,
) -> Memory:
    """The memory of a step when this node trains `num_owned` experts of each layer, in micro-batches of `sequences`
    sequences of `length` tokens.

    The real engine takes the step, on fake tensors, and every expert is taken for equally busy. The gradients of the
    micro-batches before are there while one is computed; a step of a single micro-batch takes less.
    """
    # The same products with everything on one device.
    plain = compute.model_copy(update={"offload": False, "adam_8bit": False, "deterministic": False, "micro_blocks": 0})
    activations, logits, work = _activations(settings, plain, num_owned, sequences, length)
    return replace(
        static_memory(settings, optimizer, compute, num_owned=num_owned),
        activations=activations,
        logits=logits,
        work=work,
    )


def static_memory(
    settings: ModelSettings, optimizer: OptimizerSettings, compute: ComputeSettings, *, num_owned: int
) -> Memory:
    """The memory that does not depend on the batch, exact to the byte; activations, logits and work are 0."""
    shared, tables = _shared_sizes(settings)
    matrices = [2 * settings.expert_size * settings.hidden_size, settings.expert_size * settings.hidden_size]
    trained = [*shared, *(matrices * num_owned * settings.num_layers)]
    num_frozen = settings.num_experts - num_owned
    packed = packed_bytes(compute.frozen, settings.hidden_size, settings.expert_size)
    frozen = packed * num_frozen * settings.num_layers
    return Memory(
        weights=4 * sum(trained) + tables,
        gradients=4 * sum(trained),
        optimizer=sum(moment_bytes(optimizer, numel, adam_8bit=compute.adam_8bit) for numel in trained),
        frozen=packed * min(3, num_frozen) if compute.offload else frozen,
        activations=0,
        logits=0,
        work=0,
        host=frozen if compute.offload else 0,
    )


@cache
def _shared_sizes(settings: ModelSettings) -> tuple[tuple[int, ...], int]:
    """Values of each shared parameter, and bytes of the tables of the rotary embedding."""
    with FakeTensorMode():
        model = build_on_meta(settings)
        tables = [*type(model.model.rotary_emb)(model.config).buffers()]
    shared = [parameter.numel() for name, parameter in model.named_parameters() if ".mlp.experts." not in name]
    return tuple(shared), sum(table.nbytes for table in tables)


@cache
def _activations(
    settings: ModelSettings, compute: ComputeSettings, num_owned: int, sequences: int, length: int
) -> tuple[int, int, int]:
    """What the forward keeps, what the output loss takes beside it, and what the backward takes beyond both.

    Layers are alike: from the third on each adds what the third added.
    """
    if settings.num_layers <= 3:
        kept, in_output, in_backward = _peaks(settings, compute, num_owned, sequences, length)
    else:
        two, three = (
            _peaks(settings.model_copy(update={"num_layers": layers}), compute, num_owned, sequences, length)
            for layers in (2, 3)
        )
        more = settings.num_layers - 3
        kept, in_output, in_backward = (c + more * (c - b) for b, c in zip(two, three, strict=True))
    return kept, in_output - kept, max(0, in_backward - in_output)


def _peaks(
    settings: ModelSettings, compute: ComputeSettings, num_owned: int, sequences: int, length: int
) -> tuple[int, int, int]:
    """Bytes beyond the static ones before the output loss, at its peak, and at the backward's."""
    meter = Meter()
    with FakeTensorMode(), meter:
        any_optimizer = OptimizerSettings(kind="sgd", learning_rate=1.0)
        engine = _MeteredEngine(settings, LossSettings(), any_optimizer, experts=range(num_owned), compute=compute)
        engine.meter = meter
        for layer in engine.layers:
            layer.balanced = True
        tokens = torch.zeros(sequences, length + 1, dtype=torch.int64)
        for parameter in engine.model.parameters():  # as the micro-batches before have left them
            parameter.grad = torch.zeros_like(parameter)
        start = meter.mark()
        engine.backward(tokens)
        return engine.before_output - start, engine.peak_of_output - start, meter.peak - start
