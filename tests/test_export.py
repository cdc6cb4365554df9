"""An exported folder is an ordinary Hugging Face checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.engine import Engine
from model.errors import UserError
from model.export import export_checkpoint, generate
from model.initial import initial_values
from model.settings import LossSettings, ModelSettings, OptimizerSettings

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
)


@pytest.fixture
def engine() -> Engine:
    engine = Engine(SETTINGS, LossSettings(), OptimizerSettings(learning_rate=1e-3), experts=(1, 2))
    for shard, values in initial_values(SETTINGS, seed=0):
        engine.load(shard.name, values)
    return engine


@pytest.mark.parametrize("file_numel", [2**30, 1])
def test_the_loaded_model_gives_the_same_logits(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_numel: int
) -> None:
    monkeypatch.setattr("model.export.FILE_NUMEL", file_numel)
    export_checkpoint(SETTINGS, engine.read, tmp_path / "out" / "model")
    files = list((tmp_path / "out" / "model").glob("*.safetensors"))
    assert len(files) == (1 if file_numel > 1 else 4)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 259, (2, 40)))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, engine.model(tokens).logits, rtol=0, atol=1e-5)


def test_experts_are_apart_on_disk(engine: Engine, tmp_path: Path) -> None:
    export_checkpoint(SETTINGS, engine.read, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        gate, up, down = (
            file.get_tensor(f"model.layers.1.mlp.experts.3.{matrix}_proj.weight") for matrix in ("gate", "up", "down")
        )
    assert np.array_equal(np.concatenate([gate.ravel(), up.ravel(), down.ravel()]), engine.read("layer.1.expert.3"))


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
