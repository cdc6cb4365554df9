"""Split experts compute what the fused ones compute, and never the gradient of a frozen expert."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from model.errors import UserError
from model.experts import SplitExperts
from model.frozen import FrozenStore
from model.memory import Meter
from model.settings import ComputeSettings, StoreKind

E, D, F, T, K = 4, 16, 8, 40, 2
OWNED = [(), (1,), (0, 3), (0, 1, 2, 3)]
KINDS: list[StoreKind] = ["fp32", "bf16", "int8"]
RELATIVE_ERROR = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127}
"""Bound on the rounding of a value: of itself for bf16, of its row's largest for int8."""


@pytest.fixture(autouse=True)
def _no_advice() -> Iterator[None]:
    # transformers warns about an experts module outside of a model
    logging.getLogger("transformers.integrations.moe").disabled = True
    yield
    logging.getLogger("transformers.integrations.moe").disabled = False


def fused_experts() -> OlmoeExperts:
    torch.manual_seed(0)
    experts = OlmoeExperts(OlmoeConfig(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def split_experts(fused: OlmoeExperts, owned: tuple[int, ...], compute: ComputeSettings | None = None) -> SplitExperts:
    split = SplitExperts(E, D, F, owned, compute=compute or ComputeSettings())
    for expert in range(E):
        split.write(expert, fused.gate_up_proj.detach()[expert], fused.down_proj.detach()[expert])
    return split


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    weights, index = torch.randn(T, E).softmax(-1).topk(K, dim=-1)
    return torch.randn(T, D, requires_grad=True), index, weights.requires_grad_()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("owned", OWNED)
def test_forward_and_gradients_equal_the_fused_experts(owned: tuple[int, ...], recompute: bool) -> None:
    fused = fused_experts()
    split = split_experts(fused, owned, ComputeSettings(recompute=recompute))
    x, index, weights = batch()
    direction = torch.randn(T, D)

    expected = fused(x, index, weights)
    expected_grads = torch.autograd.grad(expected, [x, weights, fused.gate_up_proj, fused.down_proj], direction)
    actual = split(x, index, weights)
    own = [*split.gate_up.values(), *split.down.values()]
    grads = torch.autograd.grad(actual, [x, weights, *own], direction)

    assert torch.equal(actual, expected)
    wanted = [*expected_grads[:2], *expected_grads[2][list(owned)], *expected_grads[3][list(owned)]]
    for grad, expected_grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("owned", OWNED)
def test_backward_multiplies_no_weight_gradient_of_a_frozen_expert(owned: tuple[int, ...], recompute: bool) -> None:
    split = split_experts(fused_experts(), owned, ComputeSettings(recompute=recompute))
    x, index, weights = batch()
    y = split(x, index, weights)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == (3 if recompute else 2) * E + 2 * len(owned)
    assert len([*split.parameters()]) == 2 * len(owned)
    assert all(buffer.grad is None and not buffer.requires_grad for buffer in split.buffers())


def test_recomputation_keeps_no_inner_activation() -> None:
    def saved(recompute: bool) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        split = split_experts(fused_experts(), (), ComputeSettings(recompute=recompute))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            split(*batch())
        return sum(sizes.values())

    assert saved(False) - saved(True) == T * K * 2 * F * 4


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    split = split_experts(fused_experts(), (1, 2))
    x, _, weights = batch()
    split(x, torch.tensor([[0, 1]]).expand(T, K), weights).sum().backward()
    assert split.last_counts is not None
    assert split.last_counts.tolist() == [T, T, 0, 0]
    busy, idle = split.gate_up["1"].grad, split.gate_up["2"].grad
    assert busy is not None and busy.abs().sum() > 0
    assert idle is not None and idle.abs().sum() == 0


def test_autocast_computes_in_bfloat16_and_keeps_fp32_gradients() -> None:
    split = split_experts(fused_experts(), (0, 3))
    x, index, weights = batch()
    exact = split(x, index, weights)
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), split.gate_up["3"])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = split(x, index, weights)
    (grad,) = torch.autograd.grad(rounded.float().square().sum(), split.gate_up["3"])
    assert rounded.dtype == torch.bfloat16
    assert grad.dtype == torch.float32
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    assert (grad - exact_grad).norm() < 0.03 * exact_grad.norm()


def test_a_bf16_store_gives_the_bits_of_an_fp32_one_when_products_are_bf16() -> None:
    fused = fused_experts()
    outputs = []
    for kind in ("fp32", "bf16"):
        split = split_experts(fused, (1,), ComputeSettings(frozen=kind))
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(split(*batch()))
    assert torch.equal(*outputs)


def test_weights_changed_before_the_backward_are_noticed() -> None:
    split = split_experts(fused_experts(), (0,))
    y = split(*batch())
    with torch.no_grad():
        split.gate_up["0"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_ownership_changes_keep_all_values(kind: StoreKind) -> None:
    fused = fused_experts()
    split = split_experts(fused, (0, 3), ComputeSettings(frozen=kind))
    for owned in [(1,), (), (0, 1, 2, 3), (3, 2), (0, 3)]:
        before = [split.weights(expert) for expert in range(E)]
        kept = {expert: split.gate_up[str(expert)] for expert in split.owned if expert in owned}
        split.own(owned)
        assert split.owned == tuple(sorted(owned))
        assert all(parameter.requires_grad for parameter in split.parameters())
        assert all(split.gate_up[str(expert)] is parameter for expert, parameter in kept.items())
        assert split.frozen.experts == set(range(E)) - set(owned)
        for expert, values in enumerate(before):
            for new, old in zip(split.weights(expert), values, strict=True):
                bound = RELATIVE_ERROR[kind] * old.abs().amax(-1, keepdim=True)
                assert ((new - old).abs() <= bound).all()


def test_a_state_dict_would_lose_the_frozen_experts() -> None:
    with pytest.raises(RuntimeError, match="model.export"):
        torch.nn.Sequential(split_experts(fused_experts(), (0,))).state_dict()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_one_expert_is_unpacked_at_a_time(kind: StoreKind) -> None:
    """Beside a store that has to be unpacked, a step takes one expert more than beside one that has not."""
    peaks = {}
    for frozen in ("fp32", kind):
        wide = SplitExperts(E, D, 100 * F, (), compute=ComputeSettings(frozen=frozen))
        meter = Meter()
        with meter:
            x, index, weights = batch()
            wide(x, index, weights).sum().backward()
            before = meter.mark()
            wide(x, index, weights).sum().backward()
        peaks[frozen] = meter.peak - before
    expert = 4 * 3 * D * 100 * F
    assert peaks[kind] - peaks["fp32"] <= 1.05 * expert


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_expert_that_does_not_exist_is_refused(wrong: int) -> None:
    with pytest.raises(UserError, match=f"expert {wrong} does not exist: this model has experts 0 to 3"):
        SplitExperts(E, D, F, (0, wrong))
    split = SplitExperts(E, D, F, (1,))
    with pytest.raises(UserError, match="does not exist"):
        split.own((0, wrong))
    assert split.owned == (1,)


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_rounds_within_its_bound_and_takes_its_bytes(kind: StoreKind) -> None:
    store = FrozenStore(kind)
    torch.manual_seed(0)
    gate_up, down = torch.randn(2 * F, D) * torch.logspace(-3, 3, 2 * F)[:, None], torch.randn(D, F)
    gate_up[3] = 0
    store.put(7, gate_up, down)
    for values, kept in zip((gate_up, down), store.get(7, torch.float32), strict=True):
        assert ((values - kept).abs() <= RELATIVE_ERROR[kind] * values.abs().amax(-1, keepdim=True) * 1.0001).all()
    width, scales = {"fp32": (4, 0), "bf16": (2, 0), "int8": (1, 4)}[kind]
    assert sum(buffer.nbytes for buffer in store.buffers()) == 3 * D * F * width + (2 * F + D) * scales
    store.put(7, gate_up * 2, down)
    assert torch.equal(store.get(7, torch.float32)[0], 2 * store_copy(kind, gate_up, down))
    store.drop(7)
    assert not [*store.buffers()] and not store.experts


def store_copy(kind: StoreKind, gate_up: Tensor, down: Tensor) -> Tensor:
    store = FrozenStore(kind)
    store.put(0, gate_up, down)
    return store.get(0, torch.float32)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [False, True])
def test_a_change_of_the_model_leaves_the_store_as_it_is(kind: StoreKind, offload: bool) -> None:
    store = FrozenStore(kind, offload=offload)
    gate_up, down = torch.randn(2 * F, D), torch.randn(D, F)
    store.put(5, gate_up, down)
    before = {name: buffer.clone() for name, buffer in store.named_buffers()}
    torch.nn.Sequential(store).to(torch.bfloat16).half().double()
    for name, buffer in store.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])
    store.to("meta", torch.bfloat16)
    for name, buffer in store.named_buffers():
        assert buffer.device.type == ("cpu" if offload else "meta") and buffer.dtype == before[name].dtype


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_experts_are_the_stored_ones(kind: StoreKind) -> None:
    store = FrozenStore(kind, offload=True)
    for expert in range(5):
        store.put(expert, torch.randn(2 * F, D), torch.randn(D, F))
    wanted = [3, 0, 4]
    streamed = [*store.stream(wanted, torch.bfloat16, torch.device("cpu"))]
    for expert, matrices in zip(wanted, streamed, strict=True):
        for streamed_matrix, matrix in zip(matrices, store.get(expert, torch.bfloat16), strict=True):
            assert torch.equal(streamed_matrix, matrix)


def test_the_store_keeps_a_copy() -> None:
    for kind in KINDS:
        store = FrozenStore(kind)
        gate_up, down = torch.zeros(2 * F, D), torch.zeros(D, F)
        store.put(0, gate_up, down)
        gate_up.add_(1)
        assert store.get(0, torch.float32)[0].abs().sum() == 0
