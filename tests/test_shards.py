"""The layout covers the model exactly once, and genesis is a function of settings and seed."""

import hashlib
import math

import numpy as np
import pytest
import torch

from model.architecture import build_on_meta
from model.initial import initial_values
from model.settings import ModelSettings
from model.shards import layout

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


@pytest.mark.parametrize("max_numel", [1, 7, 100, 1000, 2**26])
def test_every_element_is_in_exactly_one_shard(max_numel: int) -> None:
    parameters = dict(build_on_meta(SETTINGS).named_parameters())
    seen = {name: np.zeros(len(parameter), dtype=int) for name, parameter in parameters.items()}
    for shard in layout(SETTINGS, max_numel):
        for piece in shard.pieces:
            assert piece.shape == (piece.stop - piece.start, *parameters[piece.parameter].shape[1:])
            seen[piece.parameter][piece.start : piece.stop] += 1
        row = max(math.prod(piece.shape[1:]) for piece in shard.pieces)
        assert shard.expert is not None or shard.numel <= max(max_numel, row)
    assert all((rows == 1).all() for rows in seen.values())


def test_canonical_order() -> None:
    layers = [[f"layer.{i}.shared", *(f"layer.{i}.expert.{e}" for e in range(4))] for i in range(2)]
    assert [shard.name for shard in layout(SETTINGS)] == ["embed", *layers[0], *layers[1], "head"]


def test_big_shared_shards_are_cut_between_rows() -> None:
    shards = {shard.name: shard for shard in layout(SETTINGS, max_numel=32 * 100)}
    assert [shards[f"embed.{part}"].numel for part in range(3)] == [3200, 3200, 59 * 32]
    assert [piece.parameter for piece in shards["head.0"].pieces] == ["model.norm.weight", "lm_head.weight"]
    assert shards["head.0"].pieces[1].stop == shards["head.1"].pieces[0].start == 99


def test_split_gives_views_in_the_shape_of_the_pieces() -> None:
    shard = next(shard for shard in layout(SETTINGS) if shard.name == "layer.1.expert.2")
    values = np.arange(shard.numel, dtype="<f4")
    gate_up, down = shard.split(values)
    assert gate_up.shape == (1, 32, 32) and down.shape == (1, 32, 16)
    assert np.shares_memory(gate_up, values)
    assert np.array_equal(np.concatenate([gate_up.ravel(), down.ravel()]), values)


def digest(seed: int) -> str:
    values = (shard_values.tobytes() for _, shard_values in initial_values(SETTINGS, seed))
    return hashlib.sha256(b"".join(values)).hexdigest()


def test_genesis_is_the_same_for_every_number_of_threads_and_generator_state() -> None:
    threads = torch.get_num_threads()
    first = digest(0)
    try:
        torch.set_num_threads(4)
        torch.manual_seed(123)
        assert digest(0) == first
    finally:
        torch.set_num_threads(threads)
    assert digest(1) != first


def test_genesis_is_normal_with_unit_norms() -> None:
    genesis = {shard.name: (shard, values) for shard, values in initial_values(SETTINGS, 0)}
    assert list(genesis) == [shard.name for shard in layout(SETTINGS)]
    for shard, values in genesis.values():
        assert values.dtype == np.dtype("<f4") and values.shape == (shard.numel,)
        for piece, part in zip(shard.pieces, shard.split(values), strict=True):
            if "norm" in piece.parameter:
                assert (part == 1).all()
            else:
                assert abs(part.mean()) < 0.005 and abs(part.std() - 0.02) < 0.005
    assert not np.array_equal(genesis["layer.0.expert.0"][1], genesis["layer.0.expert.1"][1])
    assert not np.array_equal(genesis["layer.0.expert.0"][1], genesis["layer.1.expert.0"][1])
