"""The plan's memory is what training really takes."""

from typing import Any

import numpy as np
import pytest
import torch

from model import memory
from model.engine import Engine
from model.initial import initial_values
from model.losses import output_loss
from model.memory import Meter, measure
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings, StoreKind

ADAMW = OptimizerSettings(learning_rate=1e-3)
SGD = OptimizerSettings(kind="sgd", learning_rate=1e-3)
SETTINGS = ModelSettings(
    vocab_size=500,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    expert_size=96,
    num_experts=4,
    experts_per_token=2,
    max_length=64,
)
QWEN = SETTINGS.model_copy(update={"family": "qwen3_moe", "head_dim": 24, "norm_topk_prob": True})
MIXTRAL = SETTINGS.model_copy(update={"family": "mixtral", "norm_topk_prob": True})
COMPUTE: list[dict[str, Any]] = [
    {},
    {"frozen": "bf16"},
    {"frozen": "int8"},
    {"frozen": "int8", "adam_8bit": True},
    {"dtype": "bf16", "frozen": "bf16"},
    {"recompute": True},
    {"checkpoint": True},
    {"frozen": "int8", "recompute": True, "checkpoint": True, "dtype": "bf16"},
]


CASES = [(SETTINGS, how) for how in COMPUTE] + [
    (family, how) for family in (QWEN, MIXTRAL) for how in (COMPUTE[0], COMPUTE[-1])
]
"""Every way to compute for one family, the plainest and the most frugal one for the others."""


def _identify(value: Any) -> str:
    return str(getattr(value, "family", getattr(value, "kind", value)))


def tokens(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, SETTINGS.vocab_size, (rows, 65)))


def trained_engine(settings: ModelSettings, optimizer: OptimizerSettings, compute: ComputeSettings) -> Engine:
    engine = Engine(settings, LossSettings(), optimizer, experts=(0, 3), compute=compute)
    for shard, values in initial_values(settings, seed=0):
        engine.load(shard.name, values)
    engine.train_step(tokens(1), 0)
    return engine


@pytest.mark.parametrize(
    ("settings", "compute", "optimizer"), [*((*case, ADAMW) for case in CASES), (SETTINGS, {}, SGD)], ids=_identify
)
def test_static_memory_is_exact_to_the_byte(
    settings: ModelSettings, compute: dict[str, Any], optimizer: OptimizerSettings
) -> None:
    how = ComputeSettings.model_validate(compute)
    planned = measure(settings, optimizer, how, num_owned=2, sequences=2, length=64)
    engine = trained_engine(settings, optimizer, how)
    engine.backward(tokens(2))
    parameters = [*engine.model.parameters()]
    frozen = [buffer for layer in engine.layers for buffer in layer.buffers()]
    weights = {id(tensor): tensor for tensor in (*parameters, *engine.model.buffers())}
    for buffer in frozen:
        del weights[id(buffer)]
    assert planned.weights == sum(tensor.nbytes for tensor in weights.values())
    assert planned.gradients == sum(p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None)
    assert planned.frozen == sum(buffer.untyped_storage().nbytes() for buffer in frozen)
    state = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in engine.optimizer.state.values()
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not name.startswith("qmap")  # a table of bitsandbytes for all
    }
    assert planned.optimizer == sum(state.values())


@pytest.mark.parametrize(("settings", "compute"), CASES, ids=_identify)
def test_peak_is_what_a_real_step_takes(settings: ModelSettings, compute: dict[str, Any]) -> None:
    """The second micro-batch of a real step with balanced experts, seen by the same meter."""
    how = ComputeSettings.model_validate(compute)
    planned = measure(settings, ADAMW, how, num_owned=2, sequences=8, length=64)
    meter = Meter()
    with meter:
        engine = trained_engine(settings, ADAMW, how)
        for layer in engine.layers:
            layer.balanced = True
        engine.backward(tokens(8))
        before = meter.mark()
        engine.backward(tokens(8))
    assert planned.total - planned.static == pytest.approx(meter.peak - before, rel=0.002)


@pytest.mark.parametrize("compute", [{}, {"dtype": "bf16", "recompute": True}, {"checkpoint": True}], ids=str)
def test_deep_models_are_counted_from_their_first_layers(compute: dict[str, Any]) -> None:
    how = ComputeSettings.model_validate(compute)
    planned = measure(SETTINGS, ADAMW, how, num_owned=2, sequences=4, length=64)
    kept, in_output, in_backward = memory._peaks(SETTINGS, how, 2, 4, 64)
    assert planned.activations == kept
    assert planned.total - planned.static == max(in_output, in_backward)


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "int8"])
def test_experts_that_are_unpacked_are_counted(frozen: StoreKind) -> None:
    """Wide experts and few tokens: one unpacked expert is more than all activations."""
    wide = SETTINGS.model_copy(update={"expert_size": 2000, "num_layers": 2, "vocab_size": 50})
    how = ComputeSettings(frozen=frozen)
    planned = measure(wide, ADAMW, how, num_owned=1, sequences=1, length=16)
    meter = Meter()
    with meter:
        engine = Engine(wide, LossSettings(), ADAMW, experts=(0,), compute=how)
        for layer in engine.layers:
            layer.balanced = True
        small = tokens(1)[:, :17] % 50
        engine.backward(small)
        before = meter.mark()
        engine.backward(small)
    assert planned.total - planned.static == pytest.approx(meter.peak - before, rel=0.01)


def test_offloaded_experts_are_counted_on_the_host() -> None:
    here = measure(SETTINGS, ADAMW, ComputeSettings(frozen="int8"), num_owned=2, sequences=1, length=64)
    away = measure(SETTINGS, ADAMW, ComputeSettings(frozen="int8", offload=True), num_owned=2, sequences=1, length=64)
    assert away.host == here.frozen and here.host == 0
    assert away.frozen == here.frozen / (4 * 2) * 2  # two frozen experts of one layer of four


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [256, 151_665])
def test_the_output_loss_never_holds_all_logits(vocabulary: int, dtype: torch.dtype) -> None:
    """Beside the gradient of the output matrix it takes a few chunks, not [T, V]."""
    tokens, width = 800_000_000 // vocabulary // 4, 8  # all logits would be 0.8 GB in fp32
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    meter = Meter()
    with meter, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        output_loss(hidden, weight, targets, 1e-5).total.backward()  # type: ignore[no-untyped-call]
    chunk = 4 * min(tokens * vocabulary, 2**25)
    assert meter.peak < 3 * chunk + 3 * (weight.nbytes + hidden.nbytes)


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight = torch.randn(2, 64), torch.randn(50_000, 64, requires_grad=True)
    meter = Meter()
    with meter, torch.no_grad():
        output_loss(hidden, weight, torch.tensor([7, 9]), 1e-5)
    assert meter.peak - weight.nbytes < weight.nbytes / 2  # the meter sees the weight when it is first looked at
