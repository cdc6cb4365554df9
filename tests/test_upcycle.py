"""An upcycled checkpoint computes what the dense one computes, until noise makes its experts differ."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model.checkpoint import Checkpoint
from model.errors import UserError
from model.upcycle import upcycle

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def dense_model(kind: str) -> PreTrainedModel:
    """A dense model with random weights."""
    torch.manual_seed(0)
    match kind:
        case "wide heads, tied":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=True)).eval()
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False)).eval()
        case _:
            return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A Llama-style checkpoint in bf16, with a tokenizer."""
    dense_model("llama").bfloat16().save_pretrained(tmp_path / "dense")
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize("router", ["normal", "zeros"])
@pytest.mark.parametrize("kind", ["wide heads, tied", "qwen3", "llama"])
def test_without_noise_the_logits_are_the_dense_models(tmp_path: Path, kind: str, router: str) -> None:
    model = dense_model(kind)
    model.save_pretrained(tmp_path / "dense")
    settings = upcycle(tmp_path / "dense", tmp_path / "moe", {"experts": 4, "noise_std": 0.0, "router": router})
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert mixture.config.model_type == settings.family == ("mixtral" if kind == "llama" else "qwen3_moe")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (2, 40)))
    with torch.no_grad():
        expected, logits = model(tokens).logits, mixture(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert Checkpoint.open(tmp_path / "moe").settings == settings


def experts(tensors: dict[str, Tensor], key: str) -> list[Tensor]:
    return [tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.{key}.weight"] for expert in range(4)]


def test_every_expert_has_noise_of_its_own_in_half_of_its_weights(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", {"experts": 4, "noise_std": 0.5})
    before, after = load_file(dense / "model.safetensors"), load_file(tmp_path / "moe" / "model.safetensors")
    noises = []
    for key, matrix in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        for values in experts(after, key):
            assert values.dtype == torch.bfloat16
            noise = values.float() - before[f"model.layers.1.mlp.{matrix}.weight"].float()
            assert 0.42 < (noise != 0).float().mean() < 0.55
            assert 0.45 < noise[noise != 0].std() < 0.55 and abs(noise.mean()) < 0.04
            noises.append(noise.flatten())
    correlations = torch.corrcoef(torch.stack(noises))
    assert (correlations - torch.eye(12)).abs().max() < 0.12
    gate = after["model.layers.1.block_sparse_moe.gate.weight"]
    assert gate.shape == (4, 32) and 0.15 < gate.float().std() < 0.25
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert torch.equal(before[name], after[name])


def test_the_result_depends_on_the_arguments_alone(dense: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    first = upcycle_bytes(dense, tmp_path / "first", {"experts": 4})
    torch.manual_seed(6)
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        assert upcycle_bytes(dense, tmp_path / "again", {"experts": 4}) == first
    finally:
        torch.set_num_threads(threads)
    assert upcycle_bytes(dense, tmp_path / "other", {"experts": 4, "seed": 1}) != first


def upcycle_bytes(dense: Path, folder: Path, options: dict[str, Any]) -> bytes:
    upcycle(dense, folder, options)
    return (folder / "model.safetensors").read_bytes()


def test_zeros_and_fractions_mean_what_they_say(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "none", {"experts": 4, "noise_fraction": 0.0, "router": "zeros"})
    tensors = load_file(tmp_path / "none" / "model.safetensors")
    assert not tensors["model.layers.0.block_sparse_moe.gate.weight"].any()
    assert all(torch.equal(values, experts(tensors, "w2")[0]) for values in experts(tensors, "w2"))
    upcycle(dense, tmp_path / "all", {"experts": 4, "noise_fraction": 1.0, "noise_std": 0.5})
    noisy = experts(load_file(tmp_path / "all" / "model.safetensors"), "w2")[3]
    assert (noisy != experts(tensors, "w2")[3]).float().mean() > 0.95  # some noise is below what bf16 can show


def test_tokenizer_and_token_ids_come_along(dense: Path, tmp_path: Path) -> None:
    upcycle(dense, tmp_path / "moe", {"experts": 2})
    name = "tokenizer_config.json"
    assert (tmp_path / "moe" / name).read_bytes() == (dense / name).read_bytes()
    config = json.loads((tmp_path / "moe" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["dtype"]) == (1, 2, "bfloat16")
    generation = json.loads((tmp_path / "moe" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("key", "found", "expected"),
    [
        ("pad_token_id", -1, None),  # as in early conversions of LLaMA
        ("pad_token_id", 100, None),
        ("pad_token_id", 99, 99),
        ("eos_token_id", 10**30, None),
        ("eos_token_id", [2, -1, 3, 100], [2, 3]),
        ("eos_token_id", [], None),
        ("bos_token_id", None, None),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_none(
    dense: Path, tmp_path: Path, key: str, found: object, expected: object
) -> None:
    edit_config(dense, {key: found})
    (dense / "generation_config.json").unlink()
    upcycle(dense, tmp_path / "moe", {"experts": 2})
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "moe" / name).read_text()).get(key) == expected
    AutoModelForCausalLM.from_pretrained(tmp_path / "moe")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 1}, "--experts 1: must be greater than or equal to 2"),
        ({"experts": 5000}, "--experts 5000"),
        ({"experts": 4, "top_k": 5}, "--top-k 5 is more than --experts 4"),
        ({"top_k": 0}, "--top-k 0"),
        ({"noise_std": -0.1}, "--noise-std -0.1"),
        ({"noise_std": float("nan")}, "--noise-std nan"),
        ({"noise_fraction": 1.5}, "--noise-fraction 1.5"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_wrong_options_are_named(dense: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    refused(dense, tmp_path, options, words)


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: edit_config(d, {"model_type": "mixtral"}), 'model_type "mixtral" is not supported'),
        (lambda d: edit_config(d, {"attention_bias": True}), "attention_bias = true"),
        (lambda d: edit_config(d, {"mlp_bias": True}), "mlp_bias = true"),
        (lambda d: edit_config(d, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}), "rope_parameters = "),
        (lambda d: edit_config(d, {"model_type": "mistral", "sliding_window": 32}), "sliding_window = 32"),
        (lambda d: edit_config(d, {"intermediate_size": 40}), "mlp.gate_proj.weight has shape [48, 32]"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
        (lambda d: shutil.rmtree(d), "config.json is missing"),
        (lambda d: edit_config(d, {"eos_token_id": "2"}), 'eos_token_id = "2"'),
        (lambda d: edit_config(d, {"eos_token_id": [2, 1.5]}), "eos_token_id = [2, 1.5]"),
        (lambda d: edit_config(d, {"bos_token_id": [1]}), "bos_token_id = [1]"),
        (lambda d: edit_config(d, {"pad_token_id": True}), "pad_token_id = true"),
        (lambda d: edit_config(d, {"pad_token_id": {"a": 1}}), 'pad_token_id = {"a": 1}'),
        (lambda d: edit_config(d, {"num_attention_heads": None, "head_dim": 8}), "num_attention_heads = null"),
        (lambda d: edit_config(d, {"tie_word_embeddings": []}), "tie_word_embeddings = []"),
    ],
)
def test_wrong_checkpoints_are_named(dense: Path, tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(dense)
    refused(dense, tmp_path, {}, words)


def test_nothing_is_overwritten(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        upcycle(dense, tmp_path / "moe", {})
    with pytest.raises(UserError, match="not empty"):
        upcycle(dense, dense, {})


def refused(dense: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        upcycle(dense, tmp_path / "moe", options)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "moe").exists()
