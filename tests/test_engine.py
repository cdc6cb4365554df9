"""The engine trains like the plain transformers model, restricted to its own experts."""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import OlmoeForCausalLM

from model.architecture import build_config
from model.device import choose_device
from model.engine import Engine
from model.errors import UserError
from model.initial import initial_values
from model.optimizer import learning_rate_at
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings

SETTINGS = ModelSettings(
    vocab_size=259,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    expert_size=16,
    num_experts=4,
    experts_per_token=2,
    max_length=64,
    init_std=0.1,
)
LOSS = LossSettings()
ADAMW = OptimizerSettings(learning_rate=3e-3)
OWNED = [(), (1,), (0, 3), (0, 1, 2, 3)]


def build(experts: tuple[int, ...], optimizer: OptimizerSettings = ADAMW, loss: LossSettings = LOSS) -> Engine:
    engine = Engine(SETTINGS, loss, optimizer, experts=experts)
    for shard, values in initial_values(SETTINGS, seed=0):
        engine.load(shard.name, values)
    return engine


def reference(engine: Engine) -> OlmoeForCausalLM:
    """The plain model of transformers with the same weights."""
    model = OlmoeForCausalLM(build_config(SETTINGS))
    with torch.no_grad():
        for shard in engine.shards:
            for piece, part in zip(shard.pieces, shard.split(engine.read(shard.name)), strict=True):
                model.get_parameter(piece.parameter)[piece.start : piece.stop] = torch.from_numpy(part)
    return model


def batch(seed: int = 0, rows: int = 4, length: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SETTINGS.vocab_size, (rows, length + 1))


def text_batches(count: int) -> list[np.ndarray]:
    """Windows of the bytes of a Python module."""
    data = np.frombuffer(Path(tomllib.__file__).with_name("_parser.py").read_bytes(), np.uint8) + np.uint16(3)
    starts = np.random.default_rng(0).integers(0, len(data) - 65, (count, 8))
    return [np.stack([data[start : start + 65] for start in row]) for row in starts]


def snapshot(engine: Engine) -> dict[str, bytes]:
    return {shard.name: engine.read(shard.name).tobytes() for shard in engine.shards}


def expected_loss(model: OlmoeForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The whole training loss, written out plainly."""
    output = model(tokens[:, :-1], output_router_logits=True)
    logits = output.logits.flatten(0, 1)
    total: torch.Tensor = (
        F.cross_entropy(logits, tokens[:, 1:].flatten()) + LOSS.output_z * logits.logsumexp(-1).square().mean()
    )
    for router in output.router_logits:
        probability = router.softmax(-1)
        chosen = F.one_hot(probability.topk(2).indices, 4).sum((0, 1))
        balance = 4 / chosen.sum() * (chosen * probability.mean(0)).sum()
        total = total + (LOSS.load_balancing * balance + LOSS.router_z * router.logsumexp(-1).square().mean()) / 2
    return total


@pytest.mark.parametrize("owned", OWNED)
def test_logits_equal_the_plain_model(owned: tuple[int, ...]) -> None:
    engine = build(owned)
    tokens = torch.from_numpy(batch())
    with torch.no_grad():
        expected = reference(engine)(tokens).logits
        actual = engine.model(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("owned", OWNED)
def test_one_sgd_step_follows_the_gradient_of_the_plain_model(owned: tuple[int, ...]) -> None:
    sgd = OptimizerSettings(kind="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=0.0)
    engine = build(owned, sgd)
    model = reference(engine)
    tokens = batch()
    expected_loss(model, torch.from_numpy(tokens)).backward()  # type: ignore[no-untyped-call]
    before = {shard.name: engine.read(shard.name) for shard in engine.shards}
    step = engine.train_step(tokens, step=0)
    squares = 0.0
    for shard in engine.shards:
        change = before[shard.name] - engine.read(shard.name)
        if shard.name not in engine.trained_shards():
            assert not change.any()
            continue
        for piece, part in zip(shard.pieces, shard.split(change), strict=True):
            grad = model.get_parameter(piece.parameter).grad
            assert grad is not None
            torch.testing.assert_close(torch.from_numpy(part), grad[piece.start : piece.stop], rtol=0, atol=1e-6)
            squares += grad[piece.start : piece.stop].square().sum().item()
    assert step.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_frozen_experts_keep_their_bits_and_everything_else_is_trained() -> None:
    engine = build((0, 3))
    before = snapshot(engine)
    for step, tokens in enumerate(text_batches(5)):
        engine.train_step(tokens, step)
    after = snapshot(engine)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(engine.trained_shards())
    assert [name for name in engine.trained_shards() if "expert" in name] == [
        f"layer.{layer}.expert.{expert}" for layer in (0, 1) for expert in (0, 3)
    ]


def test_training_reduces_the_loss() -> None:
    engine = build((0, 1))
    held_out = np.concatenate(text_batches(4))
    before, count, _ = engine.evaluate(held_out)
    for step, tokens in enumerate(text_batches(30)):
        last = engine.train_step(tokens, step)
    after, *_ = engine.evaluate(held_out)
    assert count == held_out.shape[0] * 64
    assert before / count == pytest.approx(math.log(259), rel=0.1)
    assert after / count < 0.75 * before / count
    assert last.load_balancing == pytest.approx(1, abs=0.5)


def test_evaluation_in_batches_equals_the_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build((1,))
    tokens = torch.from_numpy(batch(rows=5))
    monkeypatch.setattr("model.engine.EVALUATION_TOKENS", 64)
    total, count, choices = engine.evaluate(tokens)
    with torch.no_grad():
        output = reference(engine)(tokens[:, :-1], output_router_logits=True)
        logits, routers = output.logits, torch.stack(output.router_logits)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert count == 5 * 32
    assert total == pytest.approx(expected.item(), rel=1e-6)
    chosen = routers.topk(SETTINGS.experts_per_token).indices
    assert choices.tolist() == [[int((layer == e).sum()) for e in range(SETTINGS.num_experts)] for layer in chosen]


def test_bfloat16_compute_keeps_fp32_weights() -> None:
    exact = build((0, 1))
    rounded = Engine(SETTINGS, LOSS, ADAMW, experts=(0, 1), compute=ComputeSettings(dtype="bf16"))
    for shard in exact.shards:
        rounded.load(shard.name, exact.read(shard.name))
    tokens = text_batches(1)[0]
    expected, actual = exact.train_step(tokens, 0), rounded.train_step(tokens, 0)
    assert actual != expected
    assert actual.cross_entropy == pytest.approx(expected.cross_entropy, rel=0.01)
    assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=0.05)
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}


def test_load_copies_read_only_values(tmp_path: Path) -> None:
    engine = build(())
    np.full(engine.read("embed").shape, 0.5, dtype="<f4").tofile(tmp_path / "embed")
    values = np.memmap(tmp_path / "embed", dtype="<f4", mode="r")
    engine.load("embed", values)
    engine.train_step(batch(), 0)
    assert (values == 0.5).all()
    assert not (engine.read("embed") == 0.5).all()
    assert not np.shares_memory(engine.read("embed"), engine.read("embed"))


def test_ownership_round_trip_keeps_values_and_moments() -> None:
    """The moments are seen in the steps that follow: a kept expert goes on exactly as if nothing had happened."""
    batches = text_batches(4)
    still, moved = build((0, 3)), build((0, 3))
    for engine in (still, moved):
        for step in (0, 1, 2):
            engine.train_step(batches[step], step)
    before = snapshot(moved)
    moved.own((3, 1))
    assert moved.experts == (frozenset({1, 3}),) * 2
    assert snapshot(moved) == before
    moved.own([0, 1, 3])
    assert snapshot(moved) == before
    still.train_step(batches[3], 3)
    moved.train_step(batches[3], 3)
    # Not to the bit: expert 1 adds to the norm that clips.
    for name in ("layer.0.expert.3", "layer.1.expert.3", "layer.0.shared", "embed"):
        change = still.read(name) - np.frombuffer(before[name], "<f4")
        difference = still.read(name) - moved.read(name)
        assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(change)
    returned = "layer.0.expert.0"
    assert not np.allclose(still.read(returned), moved.read(returned), atol=1e-5)


@pytest.mark.parametrize("name", ["embed", "layer.0.shared", "layer.1.expert.3"])
def test_a_fold_moves_the_training_onto_other_values_and_keeps_the_moments(name: str) -> None:
    engine = build((0, 3))
    reference = engine.read(name)
    engine.train_step(batch(), 0)
    trained, others = engine.read(name), snapshot(engine)
    values = np.random.default_rng(1).standard_normal(len(reference), dtype=np.float32)
    moments = {parameter: dict(state) for parameter, state in engine.optimizer.state.items()}
    engine.fold(name, values, reference)
    assert (engine.read(name) == values + (trained - reference)).all()
    after = snapshot(engine)
    assert {other for other in others if after[other] != others[other]} == {name}
    for parameter, state in moments.items():
        assert all(engine.optimizer.state[parameter][kind] is state[kind] for kind in state)


def test_an_expert_with_the_moments_of_its_last_owner_goes_on_as_if_it_had_stayed() -> None:
    batches = text_batches(3)
    still, moved = build((0, 3)), build((0, 3))
    for engine in (still, moved):
        assert engine.moments("layer.1.expert.3") is None
        for step in (0, 1):
            engine.train_step(batches[step], step)
    handed = {name: still.moments(name) for name in ("layer.0.expert.3", "layer.1.expert.3")}
    moved.own((0,))
    moved.own((0, 3))
    for name, moments in handed.items():
        assert moments is not None and moments.step == 2
        assert moved.moments(name) is None and moved.load_moments(name, moments)
    for engine in (still, moved):
        engine.train_step(batches[2], 2)
    assert snapshot(still) == snapshot(moved)


@pytest.mark.parametrize(
    ("optimizer", "adam_8bit"), [(OptimizerSettings(kind="sgd", learning_rate=0.1), False), (ADAMW, True)]
)
def test_other_optimisers_neither_give_moments_nor_take_them(optimizer: OptimizerSettings, adam_8bit: bool) -> None:
    donor = build((1,))
    donor.train_step(batch(), 0)
    moments = donor.moments("layer.0.expert.1")
    assert moments is not None
    engine = Engine(SETTINGS, LOSS, optimizer, experts=(1,), compute=ComputeSettings(adam_8bit=adam_8bit))
    assert not engine.load_moments("layer.0.expert.1", moments)
    assert not engine.optimizer.state
    engine.train_step(batch(), 0)
    assert engine.moments("layer.0.expert.1") is None


@pytest.mark.parametrize("adam_8bit", [False, True])
def test_kept_experts_keep_their_moments_and_new_ones_start_without(adam_8bit: bool) -> None:
    engine = Engine(SETTINGS, LOSS, ADAMW, experts=(0, 3), compute=ComputeSettings(adam_8bit=adam_8bit))
    for shard, values in initial_values(SETTINGS, seed=0):
        engine.load(shard.name, values)
    for step, tokens in enumerate(text_batches(3)):
        engine.train_step(tokens, step)
    layer = engine.layers[0]
    embedding = engine.model.model.embed_tokens.weight
    state = engine.optimizer.state
    kept = {parameter: dict(state[parameter]) for parameter in (layer.down["3"], layer.gate_up["3"], embedding)}
    engine.own({0: (1, 2, 3)})
    for parameter, before in kept.items():
        assert state[parameter].keys() == before.keys()
        assert all(state[parameter][name] is before[name] for name in before)
    assert layer.down["1"] not in state and len(state) < len(list(engine.model.parameters()))
    engine.train_step(batch(), 3)
    assert len(state) == len(list(engine.model.parameters()))
    assert (state[layer.down["3"]]["step"], state[layer.down["1"]]["step"]) == (4, 1)
    assert engine.experts == (frozenset({1, 2, 3}), frozenset())


def test_8bit_moments_train_nearly_as_fp32_ones() -> None:
    final = []
    for adam_8bit in (False, True):
        engine = Engine(SETTINGS, LOSS, ADAMW, experts=(0, 1), compute=ComputeSettings(adam_8bit=adam_8bit))
        for shard, values in initial_values(SETTINGS, seed=0):
            engine.load(shard.name, values)
        losses = [engine.train_step(tokens, step).cross_entropy for step, tokens in enumerate(text_batches(30))]
        final.append(sum(losses[-5:]) / 5)
    assert final[1] < 4.5
    assert final[1] == pytest.approx(final[0], rel=0.02)


def test_8bit_moments_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.optimizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        Engine(SETTINGS, LOSS, ADAMW, compute=ComputeSettings(adam_8bit=True))


@pytest.mark.parametrize("name", ["embed", "layer.1.shared", "layer.0.expert.1", "layer.0.expert.2", "head"])
def test_not_a_number_is_an_error_and_changes_nothing(name: str) -> None:
    engine = build((1,))
    engine.train_step(batch(), 0)
    values = engine.read(name)
    values[:] = np.nan
    engine.load(name, values)
    before = snapshot(engine)
    with pytest.raises(FloatingPointError, match="step 1 was not taken"):
        engine.train_step(batch(), 1)
    assert snapshot(engine) == before
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_a_step_that_fails_leaves_no_gradient() -> None:
    engine = Engine(SETTINGS, LOSS, ADAMW, experts=(1,), compute=ComputeSettings(micro_blocks=1))
    for shard, values in initial_values(SETTINGS, seed=0):
        engine.load(shard.name, values)
    bad = batch()
    bad[-1, 3] = SETTINGS.vocab_size  # seen in the last micro-batch
    before = snapshot(engine)
    with pytest.raises(IndexError):
        engine.train_step(bad, 0)
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    assert snapshot(engine) == before


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ({0: (1,), 1: (9,)}, "expert 9 does not exist"),
        ({0: (1,), 7: (0,)}, "layer 7 does not exist"),
        ((-1,), "expert -1"),
    ],
)
def test_ownership_that_cannot_be_changes_nothing(experts: Any, reason: str) -> None:
    engine = build((0, 3))
    with pytest.raises(UserError, match=reason):
        engine.own(experts)
    assert engine.experts == (frozenset({0, 3}),) * 2
    with pytest.raises(UserError, match=reason):
        build(experts)


def test_the_model_takes_masks_and_positions_as_ever() -> None:
    """Only the engine's own steps go without: padded, packed and cached sequences are the model's business."""
    engine = build((0, 3))
    plain = reference(engine)
    tokens = torch.from_numpy(batch())
    engine.train_step(tokens[:, :2], 0)
    plain = reference(engine)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    positions = torch.cat([torch.arange(10), torch.arange(tokens.shape[1] - 10)]).expand(len(tokens), -1)
    for options in ({"attention_mask": mask}, {"position_ids": positions}):
        with torch.no_grad():
            actual, expected = (model(tokens, **options).logits for model in (engine.model, plain))
        visible = mask.bool() if "attention_mask" in options else torch.ones_like(mask, dtype=torch.bool)
        torch.testing.assert_close(actual[visible], expected[visible], rtol=0, atol=1e-5)


def test_clipping_bounds_the_step() -> None:
    sgd = OptimizerSettings(kind="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=0.01)
    engine = build((0,), sgd)
    before = {name: engine.read(name) for name in engine.trained_shards()}
    norm = engine.train_step(batch(), 0).gradient_norm
    moved = math.sqrt(sum(np.square(values - engine.read(name)).sum() for name, values in before.items()))
    assert norm > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_weight_decay_is_decoupled_for_both_optimizers() -> None:
    """Rows of the embedding that the batch does not use have no gradient: decay alone shrinks them by lr * wd."""
    tokens = np.full((2, 9), 7)
    for kind in ("adamw", "sgd"):
        engine = build((), OptimizerSettings(kind=kind, learning_rate=0.01, weight_decay=0.1))
        before = engine.read("embed").reshape(259, 32)
        engine.train_step(tokens, 0)
        after = engine.read("embed").reshape(259, 32)
        np.testing.assert_allclose(after[8:], before[8:] * (1 - 0.001), rtol=1e-6)


def test_learning_rate_schedule() -> None:
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=4, decay_steps=100)
    assert learning_rate_at(settings, 0) == pytest.approx(0.5, rel=1e-3)
    assert learning_rate_at(settings, 50) == 2.0 * (1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 50 / 100))))
    assert learning_rate_at(settings, 100) == pytest.approx(0.2)
    assert learning_rate_at(settings, 1000) == pytest.approx(0.2)
    constant = OptimizerSettings(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate_at(constant, step) for step in (0, 1, 3, 1000)] == [0.5, 1.0, 2.0, 2.0]


def test_device_choice_gives_its_reason() -> None:
    assert choose_device("cpu") == (torch.device("cpu"), "fp32", "the CPU was asked for")
    device, dtype, reason = choose_device()
    assert reason and (device.type == "cuda" or dtype == "fp32")
    for unknown in ("cuda:4096", "tpu", "cuda:x"):
        with pytest.raises(UserError):
            choose_device(unknown)
