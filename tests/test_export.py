"""An exported folder is an ordinary Hugging Face checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig

from model.checkpoint import Checkpoint
from model.engine import Engine
from model.errors import UserError
from model.export import export_checkpoint, generate
from model.initial import initial_values
from model.settings import LossSettings, ModelSettings, OptimizerSettings
from model.shards import Piece, Shard, layout

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "expert_size": 16,
    "num_experts": 4,
    "experts_per_token": 2,
    "max_length": 64,
    # Large enough that a wrong expert shows in the logits.
    "init_std": 0.2,
}
SETTINGS = ModelSettings(**SHAPE)
FAMILIES = [
    SETTINGS,
    ModelSettings(family="qwen3_moe", **SHAPE, head_dim=12, norm_topk_prob=True, rope_theta=1e6),
    ModelSettings(family="mixtral", **SHAPE, norm_topk_prob=True, norm_eps=1e-5),
]


def filled(settings: ModelSettings) -> Engine:
    """An engine with random weights."""
    engine = Engine(settings, LossSettings(), OptimizerSettings(learning_rate=1e-3), experts=(1, 2))
    for shard, values in initial_values(settings, seed=0):
        engine.load(shard.name, values)
    return engine


@pytest.fixture
def engine() -> Engine:
    return filled(SETTINGS)


def random_tokens() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 259, (2, 40)))


@pytest.mark.parametrize("settings", FAMILIES, ids=lambda settings: settings.family)
@pytest.mark.parametrize("file_bytes", [2**32, 20_000])
def test_the_loaded_model_gives_the_same_logits(
    settings: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    engine = filled(settings)
    monkeypatch.setattr("model.checkpoint_writer.FILE_BYTES", file_bytes)
    export_checkpoint(settings, engine.read, tmp_path / "out" / "model")
    files = list((tmp_path / "out" / "model").glob("*.safetensors"))
    assert (len(files) == 1) == (file_bytes > 20_000)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    tokens = random_tokens()
    with torch.no_grad():
        # Two experts for each token, so the order in which they are added changes nothing.
        assert torch.equal(model(tokens).logits, engine.model(tokens).logits)
    assert model.generate(tokens[:, :8], max_new_tokens=4, do_sample=False).shape[1] <= 12


@pytest.mark.parametrize("settings", FAMILIES, ids=lambda settings: settings.family)
def test_an_export_can_be_begun_with(settings: ModelSettings, tmp_path: Path) -> None:
    engine = filled(settings)
    export_checkpoint(settings, engine.read, tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.settings == settings
    for shard, values in checkpoint.values():
        assert np.array_equal(values, engine.read(shard.name)), shard.name


def test_bf16_halves_the_weights_and_rounds_them(engine: Engine, tmp_path: Path) -> None:
    export_checkpoint(SETTINGS, engine.read, tmp_path / "fp32")
    export_checkpoint(SETTINGS, engine.read, tmp_path / "bf16", dtype="bf16")
    sizes = [(tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("fp32", "bf16")]
    assert 0.5 <= sizes[1] / sizes[0] < 0.6
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.bfloat16
    rounded = torch.from_numpy(engine.read("layer.0.expert.1")).bfloat16().float().numpy()
    assert np.array_equal(Checkpoint.open(tmp_path / "bf16").read("layer.0.expert.1"), rounded)


def test_a_shared_parameter_in_several_shards_is_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FAMILIES[1]
    export_checkpoint(settings, filled(settings).read, tmp_path / "whole")

    def in_parts(settings: ModelSettings) -> tuple[Shard, ...]:
        return layout(settings, max_numel=1000)

    for module in ("engine", "export", "initial"):
        monkeypatch.setattr(f"model.{module}.layout", in_parts)
    monkeypatch.setattr("model.initial._values", values_of(tmp_path / "whole"))
    export_checkpoint(settings, filled(settings).read, tmp_path / "parts")
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def values_of(folder: Path) -> Callable[[Piece, float, int], Tensor]:
    """Random values are drawn for each piece; these come from an exported folder instead."""
    checkpoint = Checkpoint.open(folder)
    whole = {
        (piece.parameter, row): values
        for shard in layout(checkpoint.settings)
        for piece, rows in zip(shard.pieces, shard.split(checkpoint.read(shard.name)), strict=True)
        for row, values in enumerate(rows, start=piece.start)
    }
    return lambda piece, std, seed: torch.from_numpy(
        np.concatenate([whole[piece.parameter, row].ravel() for row in range(piece.start, piece.stop)])
    )


def test_experts_are_apart_on_disk(engine: Engine, tmp_path: Path) -> None:
    export_checkpoint(SETTINGS, engine.read, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        gate, up, down = (
            file.get_tensor(f"model.layers.1.mlp.experts.3.{matrix}_proj.weight") for matrix in ("gate", "up", "down")
        )
    assert np.array_equal(np.concatenate([gate.ravel(), up.ravel(), down.ravel()]), engine.read("layer.1.expert.3"))


def test_a_given_tokenizer_and_card_are_written(engine: Engine, tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer(extra_ids=0, bos_token="a", model_max_length=64)
    export_checkpoint(SETTINGS, engine.read, tmp_path / "model", tokenizer=tokenizer, card="# Card\n")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, ord("a") + 3, 1)
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.bos_token_id, generation.eos_token_id) == (ord("a") + 3, 1)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").bos_token == "a"
    assert (tmp_path / "model" / "README.md").read_text() == "# Card\n"
    with pytest.raises(UserError, match="384 tokens and the model 259"):
        export_checkpoint(SETTINGS, engine.read, tmp_path / "other", tokenizer=ByT5Tokenizer())
    assert not (tmp_path / "other").exists()


def test_without_a_tokenizer_there_are_no_special_tokens(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"vocab_size": 100})
    export_checkpoint(settings, filled(settings).read, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert AutoConfig.from_pretrained(tmp_path / "model").eos_token_id is None


def test_the_tokenizer_is_bytes(engine: Engine, tmp_path: Path) -> None:
    export_checkpoint(SETTINGS, engine.read, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == 259
    assert tokenizer.encode("aé", add_special_tokens=False) == [byte + 3 for byte in "aé".encode()]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_generate_depends_on_the_seed_alone(engine: Engine, tmp_path: Path) -> None:
    export_checkpoint(SETTINGS, engine.read, tmp_path / "model")
    first = generate(tmp_path / "model", "Once", 30, seed=1)
    torch.manual_seed(99)
    assert generate(tmp_path / "model", "Once", 30, seed=1) == first
    assert generate(tmp_path / "model", "Once", 30, seed=2) != first
    assert isinstance(generate(tmp_path / "model", "", 5, seed=1), str)


def test_nothing_is_overwritten_and_nothing_half_done_remains(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep").touch()
    with pytest.raises(UserError, match="not empty"):
        export_checkpoint(SETTINGS, engine.read, tmp_path / "full")

    def broken(name: str) -> np.ndarray:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        export_checkpoint(SETTINGS, broken, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    with pytest.raises(UserError, match=r"config\.json"):
        generate(tmp_path / "full", "", 1, seed=0)

    (tmp_path / "empty").mkdir()
    export_checkpoint(SETTINGS, engine.read, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
