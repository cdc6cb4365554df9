"""The engine equals the plain transformers model, for every family and every way to save memory."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from model.architecture import FAMILIES, build_config
from model.engine import Engine
from model.initial import initial_values
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings, StoreKind

FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen3_moe": {"norm_topk_prob": True, "head_dim": 12},
    "mixtral": {"norm_topk_prob": True},
}
STORES: list[StoreKind] = ["fp32", "bf16", "int8"]
SAVINGS = {"plain": {}, "recompute": {"recompute": True}, "checkpoint": {"checkpoint": True}}
SAVINGS["both"] = SAVINGS["recompute"] | SAVINGS["checkpoint"]
OWNED = {0: (0, 3), 1: (2,), 2: ()}
"""Another set in each layer."""
LOSS = LossSettings()
SGD = OptimizerSettings(kind="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=0.0)


def settings_of(family: str, experts_per_token: int = 2) -> ModelSettings:
    return ModelSettings.model_validate(
        {
            "family": family,
            "vocab_size": 259,
            "hidden_size": 32,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "expert_size": 16,
            "num_experts": 4,
            "experts_per_token": experts_per_token,
            "max_length": 64,
            "init_std": 0.1,
            **FAMILY_SETTINGS[family],
        }
    )


def build(settings: ModelSettings, compute: ComputeSettings) -> Engine:
    engine = Engine(settings, LOSS, SGD, experts=OWNED, compute=compute)
    for shard, values in initial_values(settings, seed=0):
        engine.load(shard.name, values)
    return engine


def plain_model(engine: Engine, settings: ModelSettings, **config: Any) -> PreTrainedModel:
    """transformers' own model with the values that the engine computes with."""
    plain_config = build_config(settings)
    for key, value in config.items():
        setattr(plain_config, key, value)
    model = FAMILIES[settings.family].model(plain_config)
    with torch.no_grad():
        for shard in engine.shards:
            for piece, part in zip(shard.pieces, shard.split(engine.read(shard.name)), strict=True):
                model.get_parameter(piece.parameter)[piece.start : piece.stop] = torch.from_numpy(part)
    return model


@cache
def tokens() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 259, (4, 33)))


def training_loss(model: PreTrainedModel) -> Tensor:
    """The whole training loss, written out plainly."""
    output = model(tokens()[:, :-1], output_router_logits=True)
    logits = output.logits.flatten(0, 1).float()
    total: Tensor = (
        F.cross_entropy(logits, tokens()[:, 1:].flatten()) + LOSS.output_z * logits.logsumexp(-1).square().mean()
    )
    for router in output.router_logits:
        probability = router.float().softmax(-1)
        chosen = F.one_hot(probability.topk(model.config.num_experts_per_tok).indices, 4).sum((0, 1))
        balance = 4 / chosen.sum() * (chosen * probability.mean(0)).sum()
        z = router.float().logsumexp(-1).square().mean()
        total = total + (LOSS.load_balancing * balance + LOSS.router_z * z) / len(output.router_logits)
    return total


def plain_gradients(engine: Engine, settings: ModelSettings, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient of transformers' own model by shard, flat."""
    model = plain_model(engine, settings).to(dtype)
    training_loss(model).backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for shard in engine.shards:
        parts = [model.get_parameter(p.parameter).grad[p.start : p.stop] for p in shard.pieces]
        gradients[shard.name] = torch.cat([part.flatten().float() for part in parts])
    return gradients


def own_gradients(engine: Engine) -> dict[str, Tensor]:
    """The engine's gradient by shard, seen in one step of SGD at a rate of 1."""
    before = {name: engine.read(name).astype(np.float64) for name in engine.trained_shards()}
    engine.train_step(tokens(), 0)
    return {name: torch.from_numpy((values - engine.read(name)).astype(np.float32)) for name, values in before.items()}


@pytest.mark.parametrize("savings", SAVINGS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_fp32_equals_the_plain_model(family: str, store: StoreKind, savings: str) -> None:
    settings = settings_of(family)
    engine = build(settings, ComputeSettings.model_validate({"frozen": store, **SAVINGS[savings]}))
    with torch.no_grad():
        assert torch.equal(engine.model(tokens()).logits, plain_model(engine, settings)(tokens()).logits)
    expected = plain_gradients(engine, settings, torch.float32)
    actual = own_gradients(engine)
    assert {name for name in actual if "expert" in name} == {
        f"layer.{layer}.expert.{expert}" for layer, experts in OWNED.items() for expert in experts
    }
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("savings", SAVINGS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_bf16_is_as_close_to_fp32_as_transformers_is(family: str, store: StoreKind, savings: str) -> None:
    """bf16 rounds, and rounds differently in every implementation: the distance to fp32 is what counts. Every token
    goes to every expert, so that rounding moves no token to another one."""
    settings = settings_of(family, experts_per_token=4)
    engine = build(settings, ComputeSettings.model_validate({"dtype": "bf16", "frozen": store, **SAVINGS[savings]}))
    exact = plain_gradients(engine, settings, torch.float32)
    theirs = plain_gradients(engine, settings, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours_logits = engine.model(tokens()).logits.float()
    with torch.no_grad():
        plain = plain_model(engine, settings)
        exact_logits = plain(tokens()).logits
        their_logits = plain.to(torch.bfloat16)(tokens()).logits.float()
    ours = own_gradients(engine)

    def distance(gradients: dict[str, Tensor]) -> float:
        return float(torch.cat([gradients[name] - exact[name] for name in ours]).norm())

    assert 0 < (ours_logits - exact_logits).norm() < 1.2 * (their_logits - exact_logits).norm()
    assert 0 < distance(ours) < 1.2 * distance(theirs)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_frozen_experts_have_no_byte_of_gradient(family: str, store: StoreKind) -> None:
    settings = settings_of(family)
    engine = build(settings, ComputeSettings(frozen=store))
    engine.backward(tokens())
    trained = sum(shard.numel for shard in engine.shards if shard.name in engine.trained_shards())
    gradients = [parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None]
    assert sum(gradient.untyped_storage().nbytes() for gradient in gradients) == 4 * trained
    assert all(buffer.grad is None for buffer in engine.model.buffers())


def test_more_than_two_experts_of_a_token_are_added_as_in_the_eager_path() -> None:
    settings = settings_of("olmoe", experts_per_token=3)
    engine = build(settings, ComputeSettings())
    with torch.no_grad():
        actual = engine.model(tokens()).logits
        eager = plain_model(engine, settings, _experts_implementation="eager")(tokens()).logits
        grouped = plain_model(engine, settings)(tokens()).logits
    assert torch.equal(actual, eager)
    torch.testing.assert_close(actual, grouped, rtol=0, atol=1e-6)


def test_int8_store_moves_the_logits_by_less_than_a_hundredth() -> None:
    settings = settings_of("olmoe")
    exact, rounded = (build(settings, ComputeSettings(frozen=kind)) for kind in ("fp32", "int8"))
    with torch.no_grad():
        expected, actual = exact.model(tokens()).logits, rounded.model(tokens()).logits
    assert 0 < (actual - expected).norm() < 0.01 * expected.norm()


def test_micro_batches_add_up_to_the_gradient_of_their_mean_loss() -> None:
    """Exactly, where no loss couples the sequences of a batch: the load-balancing loss sees each micro-batch alone."""
    settings = settings_of("olmoe")
    loss = LossSettings(load_balancing=0.0)
    steps = []
    for micro_blocks in (0, 1, 3):
        engine = Engine(settings, loss, SGD, experts=OWNED, compute=ComputeSettings(micro_blocks=micro_blocks))
        for shard, values in initial_values(settings, seed=0):
            engine.load(shard.name, values)
        steps.append((own_gradients(engine), engine.evaluate(tokens())))
    for gradients, evaluation in steps[1:]:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, steps[0][0][name], rtol=0, atol=1e-6)
        assert evaluation[:2] == pytest.approx(steps[0][1][:2], rel=1e-6)
        assert torch.equal(evaluation.choices, steps[0][1].choices)


def test_deterministic_mode_repeats_every_bit() -> None:
    settings = settings_of("olmoe")
    try:
        engines = [build(settings, ComputeSettings(deterministic=True)) for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
        losses = [[engine.train_step(tokens(), step) for step in range(3)] for engine in engines]
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]
    for shard in engines[0].shards:
        assert np.array_equal(engines[0].read(shard.name), engines[1].read(shard.name))
