"""The losses and the norm equal their plain forms, and the output loss never holds all logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from model import losses
from model.losses import load_balancing_loss, output_loss, own_share_factor, router_z_loss
from model.norm import RMSNorm
from model.settings import LossSettings


def test_chunked_output_loss_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_IN_MEMORY", 7 * 50)
    torch.manual_seed(0)
    hidden = torch.randn(33, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (33,))
    logits = hidden @ weight.t()
    cross_entropy, z = F.cross_entropy(logits, targets), logits.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(3 * (cross_entropy + 0.1 * z), [hidden, weight])
    output = output_loss(hidden, weight, targets, z_weight=0.1)
    actual = torch.autograd.grad(3 * output.total, [hidden, weight])
    torch.testing.assert_close(output.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(output.z, z.detach())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(16))
    direction = torch.randn(2, 5, 16)
    expected = F.rms_norm(x.float(), (16,), weight, eps=1e-6)
    actual = RMSNorm(weight, eps=1e-6)(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, [x, weight], direction), torch.autograd.grad(expected, [x, weight], direction)
    )


def test_load_balancing_sees_layers_that_collapse_on_different_experts() -> None:
    """Each of 4 layers sends all tokens to its own pair of 8 experts."""
    logits = torch.full((4, 100, 8), -20.0)
    counts = torch.zeros(4, 8, dtype=torch.int64)
    for layer in range(4):
        logits[layer, :, 2 * layer : 2 * layer + 2] = 20.0
        counts[layer, 2 * layer : 2 * layer + 2] = 100
    pooled_minimum = 2.0
    assert load_balancing_loss_func(tuple(logits), 8, 2) == pytest.approx(pooled_minimum, rel=1e-3)
    assert load_balancing_loss(logits, counts).item() == pytest.approx(8 / 2, rel=1e-3)
    balanced = torch.full_like(counts, 25)
    assert load_balancing_loss(torch.zeros(4, 100, 8), balanced).item() == pytest.approx(1)


def test_router_z_loss_is_the_mean_square_of_the_log_partition() -> None:
    assert router_z_loss(torch.zeros(3, 5, 8)).item() == pytest.approx(math.log(8) ** 2)


def test_the_factor_on_own_experts_rises_from_the_first_step() -> None:
    settings = LossSettings(own_share_start=0.7, own_share_steps=1000)
    assert [own_share_factor(settings, step) for step in (0, 500, 1000, 5000)] == pytest.approx([0.7, 0.85, 1, 1])
    assert own_share_factor(LossSettings(own_share_start=0.7), 0) == own_share_factor(LossSettings(), 0) == 1


def test_own_experts_weigh_less_in_the_balance() -> None:
    torch.manual_seed(0)
    logits, counts = torch.randn(2, 50, 4), torch.tensor([[40, 30, 20, 10], [10, 10, 40, 40]])
    factor = torch.ones(2, 4)
    factor[0, 1] = factor[1, 3] = 0.7
    mean = logits.softmax(-1).mean(1)
    expected = 4 * (counts / 100 * factor * mean).sum(-1).mean()
    torch.testing.assert_close(load_balancing_loss(logits, counts, factor), expected)
    assert load_balancing_loss(logits, counts, factor) < load_balancing_loss(logits, counts)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_large_logits_lose_no_digits(offset: float) -> None:
    """One constant column adds `offset` to all logits, which changes neither the cross entropy nor its gradient."""
    torch.manual_seed(0)
    hidden = torch.cat([torch.randn(20, 8), torch.full((20, 1), offset)], dim=1).requires_grad_()
    weight = torch.cat([torch.randn(300, 8), torch.ones(300, 1)], dim=1).requires_grad_()
    targets = torch.randint(0, 300, (20,))
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets)
    (expected,) = torch.autograd.grad(exact, hidden)
    output = output_loss(hidden, weight, targets, z_weight=0.0)
    (actual,) = torch.autograd.grad(output.total, hidden)
    # The logits themselves are rounded, by half of what fp32 can tell apart there.
    rounding = 1e-6 + 2**-23 * offset
    assert output.cross_entropy.item() == pytest.approx(exact.item(), abs=rounding)
    torch.testing.assert_close(actual[:, :8], expected[:, :8], rtol=0, atol=rounding)
