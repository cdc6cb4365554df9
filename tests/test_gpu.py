"""What no CPU can show: the same results on a CUDA device, copies beside the computation, and memory as planned."""

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.device import choose_device, device_memory
from model.engine import Engine
from model.frozen import FrozenStore, packed_bytes
from model.initial import initial_values
from model.memory import measure
from model.optimizer import has_adam_8bit
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings, StoreKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen3_moe": {"norm_topk_prob": True, "head_dim": 24},
    "mixtral": {"norm_topk_prob": True},
}
STORES: list[StoreKind] = ["fp32", "bf16", "int8"]
SAVINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": True},
    "checkpoint": {"checkpoint": True},
    "offload": {"offload": True},
    "micro-batches": {"micro_blocks": 1},
}
OWNED = {0: (0, 3), 1: (2,), 2: ()}
LOSS = LossSettings()
SGD = OptimizerSettings(kind="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=0.0)
ADAMW = OptimizerSettings(learning_rate=3e-3)
MIDDLE = ModelSettings(
    vocab_size=32_000,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    expert_size=1024,
    num_experts=8,
    experts_per_token=2,
    max_length=512,
)
"""Big enough that what allocators round does not count."""


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """fp32 is fp32: no TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


needs_bf16 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="bf16 needs compute capability 8.0",
)
needs_8bit = pytest.mark.skipif(not has_adam_8bit(), reason="bitsandbytes is not installed")


def settings_of(family: str, experts_per_token: int = 2) -> ModelSettings:
    return ModelSettings.model_validate(
        {
            "family": family,
            "vocab_size": 259,
            "hidden_size": 64,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "expert_size": 32,
            "num_experts": 4,
            "experts_per_token": experts_per_token,
            "max_length": 64,
            "init_std": 0.1,
            **FAMILY_SETTINGS[family],
        }
    )


def build(
    settings: ModelSettings,
    compute: dict[str, Any],
    device: torch.device,
    optimizer: OptimizerSettings = SGD,
) -> Engine:
    how = ComputeSettings.model_validate(compute)
    engine = Engine(settings, LOSS, optimizer, experts=OWNED, compute=how, device=device)
    for shard, values in initial_values(settings, seed=0):
        engine.load(shard.name, values)
    return engine


def tokens(rows: int = 4, length: int = 32, vocabulary: int = 259) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (rows, length + 1))


def step_of(engine: Engine) -> tuple[float, Tensor]:
    """Cross entropy and whole gradient, seen in one step of SGD at a rate of 1."""
    before = {name: engine.read(name).astype(np.float64) for name in engine.trained_shards()}
    loss = engine.train_step(tokens(), 0).cross_entropy
    return loss, torch.from_numpy(np.concatenate([values - engine.read(name) for name, values in before.items()]))


@pytest.mark.parametrize("savings", SAVINGS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_fp32_is_close_to_the_cpu(family: str, store: str, savings: str) -> None:
    compute = {"frozen": store, **SAVINGS[savings]}
    expected_loss, expected = step_of(build(settings_of(family), compute, torch.device("cpu")))
    loss, gradient = step_of(build(settings_of(family), compute, DEVICE))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert (gradient - expected).norm() < 1e-4 * expected.norm()


@needs_bf16
@pytest.mark.parametrize("savings", SAVINGS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_bf16_is_as_close_to_fp32_as_on_the_cpu(family: str, store: str, savings: str) -> None:
    """Every token goes to every expert, so that rounding moves no token to another one."""
    settings = settings_of(family, experts_per_token=4)
    compute = {"frozen": store, **SAVINGS[savings]}
    exact_loss, exact = step_of(build(settings, compute, torch.device("cpu")))
    _, on_cpu = step_of(build(settings, {**compute, "dtype": "bf16"}, torch.device("cpu")))
    loss, gradient = step_of(build(settings, {**compute, "dtype": "bf16"}, DEVICE))
    assert loss == pytest.approx(exact_loss, rel=0.01)
    assert 0 < (gradient - exact).norm() < 1.5 * (on_cpu - exact).norm()


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_experts_arrive_in_order_while_the_device_computes(kind: StoreKind, dtype: torch.dtype) -> None:
    store = FrozenStore(kind, offload=True)
    torch.manual_seed(0)
    for expert in range(8):
        store.put(expert, torch.randn(512, 256, device=DEVICE), torch.randn(256, 256, device=DEVICE))
    assert all(buffer.device.type == "cpu" and buffer.is_pinned() for buffer in store.buffers())
    wanted = [5, 0, 7, 2, 1, 6]
    work = torch.randn(2048, 2048, device=DEVICE)
    seen = []
    for gate_up, down in store.stream(wanted, dtype, DEVICE):
        for _ in range(20):
            work = torch.tanh(work @ work)  # the device is behind from now on
        seen.append((gate_up.clone(), down.clone()))
    for expert, matrices in zip(wanted, seen, strict=True):
        for matrix, stored in zip(matrices, store.get(expert, dtype), strict=True):
            assert matrix.device.type == DEVICE.type and torch.equal(matrix.cpu(), stored)


def test_a_stream_that_is_left_early_disturbs_nothing() -> None:
    store = FrozenStore("fp32", offload=True)
    for expert in range(4):
        store.put(expert, torch.full((4096, 1024), float(expert)), torch.full((1024, 2048), float(expert)))
    stream = store.stream(range(4), torch.float32, DEVICE)
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    zeros = [torch.zeros(4096, 1024, device=DEVICE) for _ in range(8)]
    torch.cuda.synchronize()
    assert not any(matrix.any() for matrix in zeros)


def test_streamed_experts_do_not_pile_up_on_the_device() -> None:
    """However far the device is behind: the memory of one that was used is free for the next but one."""
    store = FrozenStore("bf16", offload=True)
    for expert in range(32):
        store.put(expert, torch.zeros(2048, 1024), torch.zeros(1024, 1024))
    work = torch.randn(4096, 4096, device=DEVICE)
    product = torch.mm(work, work)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    for gate_up, _ in store.stream(range(32), torch.bfloat16, DEVICE):
        for _ in range(4):
            torch.tanh(torch.mm(work, work, out=product), out=work)
        work[0, 0] += gate_up[0, 0]
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before < 3.1 * packed_bytes("bf16", 1024, 1024)


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"checkpoint": True}], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_offloading_changes_no_result(store: str, how: dict[str, Any]) -> None:
    settings = settings_of("olmoe")
    here_loss, here = step_of(build(settings, {"frozen": store, **how}, DEVICE))
    away_loss, away = step_of(build(settings, {"frozen": store, "offload": True, **how}, DEVICE))
    assert away_loss == pytest.approx(here_loss, rel=1e-6)
    assert (away - here).norm() < 1e-6 * here.norm(), "only the order of additions to the embedding may differ"


@pytest.mark.parametrize("offload", [False, True])
def test_experts_change_hands(offload: bool) -> None:
    engine = build(settings_of("olmoe"), {"offload": offload}, DEVICE, ADAMW)
    engine.train_step(tokens(), 0)
    before = {shard.name: engine.read(shard.name) for shard in engine.shards}
    for experts in ((1, 2), (), (0, 1, 2, 3), (3,)):
        engine.own(experts)
        for name, values in before.items():
            assert np.array_equal(engine.read(name), values)
        assert all(parameter.device.type == DEVICE.type for parameter in engine.model.parameters())
    engine.train_step(tokens(), 1)
    assert not np.array_equal(engine.read("layer.1.expert.3"), before["layer.1.expert.3"])
    assert np.array_equal(engine.read("layer.1.expert.0"), before["layer.1.expert.0"])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"recompute": True},
        {"checkpoint": True},
        {"frozen": "int8"},
        {"offload": True},
        pytest.param({"adam_8bit": True}, marks=needs_8bit),
        pytest.param({"frozen": "int8", "checkpoint": True, "offload": True, "adam_8bit": True}, marks=needs_8bit),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=needs_bf16)])
def test_a_step_takes_the_memory_that_was_planned(dtype: str, how: dict[str, Any]) -> None:
    """The second step, of three micro-batches with balanced experts."""
    compute = ComputeSettings.model_validate({"frozen": dtype, "dtype": dtype, "micro_blocks": 4, **how})
    planned = measure(MIDDLE, ADAMW, compute, num_owned=2, sequences=4, length=512)
    workspaces()
    before = torch.cuda.memory_allocated()
    engine = Engine(MIDDLE, LOSS, ADAMW, experts=(0, 5), compute=compute, device=DEVICE)
    for shard, values in initial_values(MIDDLE, seed=0):
        engine.load(shard.name, values)
    for layer in engine.layers:
        layer.balanced = True
    text = tokens(12, 512, MIDDLE.vocab_size)
    engine.train_step(text, 0)
    torch.cuda.reset_peak_memory_stats()
    engine.train_step(text, 1)
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{dtype} {how}: planned {planned.total / 1e6:.1f} MB, taken {taken / 1e6:.1f} MB; {planned}")
    assert taken == pytest.approx(planned.total, rel=0.05)


def workspaces() -> None:
    """Makes the memory that the libraries of both threads, of the forward and of the backward, keep for themselves."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(256, 256, device=DEVICE, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()  # type: ignore[no-untyped-call]


@needs_8bit
def test_8bit_adamw_trains_as_fp32_does() -> None:
    final = []
    for adam_8bit in (False, True):
        engine = build(settings_of("olmoe"), {"adam_8bit": adam_8bit}, DEVICE, ADAMW)
        losses = [engine.train_step(tokens(), step).cross_entropy for step in range(10)]
        assert losses[-1] < losses[0] - 0.5
        final.append(losses[-1])
    state = engine.optimizer.state[engine.model.model.embed_tokens.weight]
    assert state["state1"].dtype == torch.uint8 and state["state1"].device.type == DEVICE.type
    assert final[1] == pytest.approx(final[0], rel=0.05)


REPEAT = """
import hashlib, sys
import numpy as np
from model.engine import Engine
from model.initial import initial_values
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings

device, dtype, offload = sys.argv[1], sys.argv[2], sys.argv[3] == "offload"
settings = ModelSettings(vocab_size=259, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, expert_size=32,
                         num_experts=4, experts_per_token=2, max_length=64)
tokens = np.random.default_rng(0).integers(0, 259, (8, 65))
for _ in range(2):
    engine = Engine(settings, LossSettings(), OptimizerSettings(learning_rate=1e-2), experts=(0, 2), device=device,
                    compute=ComputeSettings(dtype=dtype, deterministic=True, offload=offload))
    for shard, values in initial_values(settings, seed=0):
        engine.load(shard.name, values)
    losses = [engine.train_step(tokens, step) for step in range(5)]
    digest = hashlib.sha256(repr(losses).encode())
    for shard in engine.shards:
        digest.update(engine.read(shard.name).tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.parametrize("offload", ["offload", "here"])
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=needs_bf16)])
def test_deterministic_mode_repeats_every_bit(dtype: str, offload: str) -> None:
    """In processes of their own: cuBLAS reads its setting for this once, when it starts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    digests = []
    for _ in range(2):
        command = [sys.executable, "-c", REPEAT, str(DEVICE), dtype, offload]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert run.returncode == 0, run.stderr
        digests += run.stdout.split()
    assert len(digests) == 4 and len(set(digests)) == 1


def test_the_device_is_found_with_its_memory() -> None:
    device, dtype, reason = choose_device()
    major, minor = torch.cuda.get_device_capability(device)
    assert device == torch.device("cuda", 0) == choose_device("cuda:0")[0]
    assert dtype == ("bf16" if major >= 8 else "fp32")
    assert torch.cuda.get_device_name(device) in reason and f"{major}.{minor}" in reason
    free = device_memory(device)
    assert 0 < free < torch.cuda.get_device_properties(device).total_memory
    taken = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert device_memory(device) <= free - 0.9 * taken.nbytes or torch.cuda.memory_reserved(device) > 2 * taken.nbytes
