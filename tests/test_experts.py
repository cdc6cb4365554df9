"""Split experts compute what the fused ones compute, and never the gradient of a frozen expert."""

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from model.experts import FrozenStore, SplitExperts

E, D, F, T, K = 4, 16, 8, 40, 2
OWNED = [(), (1,), (0, 3), (0, 1, 2, 3)]


def fused_experts() -> OlmoeExperts:
    torch.manual_seed(0)
    experts = OlmoeExperts(OlmoeConfig(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def split_experts(fused: OlmoeExperts, owned: tuple[int, ...]) -> SplitExperts:
    split = SplitExperts(E, D, F, owned)
    for expert in range(E):
        split.write(expert, fused.gate_up_proj.detach()[expert], fused.down_proj.detach()[expert])
    return split


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    weights, index = torch.randn(T, E).softmax(-1).topk(K, dim=-1)
    return torch.randn(T, D, requires_grad=True), index, weights.requires_grad_()


@pytest.mark.parametrize("owned", OWNED)
def test_forward_and_gradients_equal_the_fused_experts(owned: tuple[int, ...]) -> None:
    fused = fused_experts()
    split = split_experts(fused, owned)
    x, index, weights = batch()
    direction = torch.randn(T, D)

    expected = fused(x, index, weights)
    expected_grads = torch.autograd.grad(expected, [x, weights, fused.gate_up_proj, fused.down_proj], direction)
    actual = split(x, index, weights)
    grads = torch.autograd.grad(actual, [x, weights, split.gate_up, split.down], direction)

    rows = list(owned)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(grads[0], expected_grads[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads[1], expected_grads[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads[2], expected_grads[2][rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads[3], expected_grads[3][rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("owned", OWNED)
def test_backward_multiplies_no_weight_gradient_of_a_frozen_expert(owned: tuple[int, ...]) -> None:
    split = split_experts(fused_experts(), owned)
    x, index, weights = batch()
    y = split(x, index, weights)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == 2 * E + 2 * len(owned)
    assert {name for name, parameter in split.named_parameters()} == {"gate_up", "down"}
    assert all(buffer.grad is None and not buffer.requires_grad for buffer in split.buffers())


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    split = split_experts(fused_experts(), (1, 2))
    x, _, weights = batch()
    split(x, torch.tensor([[0, 1]]).expand(T, K), weights).sum().backward()
    assert split.last_counts is not None
    assert split.last_counts.tolist() == [T, T, 0, 0]
    assert split.gate_up.grad is not None
    assert split.gate_up.grad[0].abs().sum() > 0
    assert split.gate_up.grad[1].abs().sum() == 0


def test_autocast_computes_in_bfloat16_and_keeps_fp32_gradients() -> None:
    split = split_experts(fused_experts(), (0, 3))
    x, index, weights = batch()
    exact = split(x, index, weights)
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), split.gate_up)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = split(x, index, weights)
    (grad,) = torch.autograd.grad(rounded.float().square().sum(), split.gate_up)
    assert rounded.dtype == torch.bfloat16
    assert grad.dtype == torch.float32
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    assert (grad - exact_grad).norm() < 0.03 * exact_grad.norm()


def test_weights_changed_before_the_backward_are_noticed() -> None:
    split = split_experts(fused_experts(), (0,))
    y = split(*batch())
    with torch.no_grad():
        split.gate_up.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_ownership_changes_keep_all_values() -> None:
    fused = fused_experts()
    split = split_experts(fused, (0, 3))
    for owned in [(1,), (), (0, 1, 2, 3), (3, 2), (0, 3)]:
        split.own(owned)
        assert split.owned == tuple(sorted(owned))
        assert split.gate_up.shape == (len(owned), 2 * F, D)
        assert split.gate_up.requires_grad and split.down.requires_grad
        assert split.frozen.experts == set(range(E)) - set(owned)
        for expert in range(E):
            gate_up, down = split.read(expert)
            assert torch.equal(gate_up, fused.gate_up_proj[expert])
            assert torch.equal(down, fused.down_proj[expert])


def test_a_dtype_change_of_the_model_leaves_the_store_as_it_is() -> None:
    store = FrozenStore()
    gate_up, down = torch.randn(2 * F, D), torch.randn(D, F)
    store.put(5, gate_up, down)
    torch.nn.Sequential(store).to(torch.bfloat16).half().double()
    kept = store.get(5, torch.float32)
    assert store.gate_up_5.dtype == torch.float32
    assert torch.equal(kept[0], gate_up) and torch.equal(kept[1], down)
    store.to("meta", torch.bfloat16)
    assert store.gate_up_5.device.type == "meta" and store.gate_up_5.dtype == torch.float32


def test_the_store_keeps_a_copy() -> None:
    store = FrozenStore()
    gate_up, down = torch.zeros(2 * F, D), torch.zeros(D, F)
    store.put(0, gate_up, down)
    gate_up.add_(1)
    assert store.get(0, torch.float32)[0].abs().sum() == 0
