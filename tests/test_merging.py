"""Merging a committed state: donors and values from the files of a store, and when it happens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from model.merge import merge_experts, select_donors
from model.shards import layout
from swarm import merging
from swarm.documents import Commit, Merge, canonical
from swarm.identity import Identity
from swarm.manifest import Manifest, MergeSettings
from swarm.merging import choose_donors, is_fit, merge_state
from swarm.shard_names import expert_of, expert_shards
from swarm.store import map_values
from swarm.warmup import Warmup, strength, warmup
from tests import examples
from tests.nodes import Node

MODEL = examples.manifest().model
GATE = MODEL.expert_size * MODEL.hidden_size
ALPHA, DONORS = 0.25, 2


def state(seed: int = 0) -> dict[str, bytes]:
    """Random values for every shard of the model."""
    random = np.random.default_rng(seed)
    return {shard.name: random.standard_normal(shard.numel, dtype=np.float32).tobytes() for shard in layout(MODEL)}


@pytest.fixture
def node(identities: list[Identity], tmp_path: Path) -> Node:
    return Node(identities[0], tmp_path / "store", state(), examples.manifest())


def experts_of(node: Node, commit: Commit, layer: int) -> torch.Tensor:
    """[E, numel]"""
    names = expert_shards(layer, MODEL.num_experts)
    return torch.from_numpy(np.stack([map_values(node.store.locate(commit.shards[name].digest)) for name in names]))


def test_an_experts_shard_begins_with_its_gate_projection() -> None:
    first = {shard.pieces[0].parameter.rpartition(".")[2] for shard in layout(MODEL) if shard.expert is not None}
    assert first == {"gate_up_proj"}
    assert {s.pieces[0].shape for s in layout(MODEL) if s.expert is not None} == {
        (1, 2 * MODEL.expert_size, MODEL.hidden_size)
    }


@pytest.mark.parametrize("chunk", [1, 1000, 64 << 20])
def test_a_state_is_merged_layer_by_layer(node: Node, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(merging, "CHUNK_BYTES", chunk if chunk > 1 else 4 * 4 * 100)
    head = node.head.document
    donors = choose_donors(node.store, head, MODEL, DONORS)
    merged = merge_state(node.store, head, ALPHA, donors)
    for layer in range(MODEL.num_layers):
        before = experts_of(node, head, layer)
        gates = before[:, :GATE].view(MODEL.num_experts, MODEL.expert_size, MODEL.hidden_size)
        assert select_donors(gates, DONORS).tolist() == [list(row) for row in donors[layer]]
        assert torch.equal(experts_of(node, merged, layer), merge_experts(before, donors[layer], ALPHA))
    shared = [name for name in head.shards if expert_of(name) is None]
    assert all(merged.shards[name] == head.shards[name] for name in shared)
    assert all(merged.shards[name].version == head.shards[name].version for name in head.shards)
    assert merged.shards["layer.0.expert.0"].digest != head.shards["layer.0.expert.0"].digest


def test_the_only_expert_has_no_donors(identities: list[Identity], tmp_path: Path) -> None:
    alone = MODEL.model_copy(update={"num_experts": 1})
    values = {name: data for name, data in state().items() if expert_of(name) in (None, 0)}
    node = Node(identities[0], tmp_path / "store", values, examples.manifest())
    donors = choose_donors(node.store, node.head.document, alone, DONORS)
    assert donors == (((),), ((),))
    merged = merge_state(node.store, node.head.document, ALPHA, donors)
    assert merged.shards == node.head.document.shards
    digests = [shard.digest for shard in merged.shards.values()]
    assert all(node.store.locate(digest) == node.store.path(digest) for digest in digests), "nothing moved"


# what a plan may ask for


def merge(alpha: float = ALPHA, donors: merging.Donors | None = None) -> Merge:
    rows = (((1, 2), (0, 2), (3, 0), (0, 1)),) * 2
    return Merge(alpha=alpha, donors=rows if donors is None else donors, state=examples.digest("merged"))


def test_a_plan_merges_when_the_run_says_so_and_as_it_says() -> None:
    assert is_fit(None, 0.0, MODEL, DONORS)
    assert is_fit(merge(), ALPHA, MODEL, DONORS)
    assert is_fit(merge(donors=(((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)),) * 2), ALPHA, MODEL, 9)


@pytest.mark.parametrize(
    ("asked", "alpha"),
    [
        (None, ALPHA),
        (merge(), 0.0),
        (merge(alpha=0.5), ALPHA),
        (merge(donors=()), ALPHA),
        (merge(donors=merge().donors[:1]), ALPHA),
        (merge(donors=(((1, 2), (0, 2), (3, 0)),) * 2), ALPHA),
        (merge(donors=(((1, 2), (0, 2), (3, 0), (0, 0)),) * 2), ALPHA),
        (merge(donors=(((1, 2), (0, 2), (3, 0), (0, 3)),) * 2), ALPHA),
        (merge(donors=(((1, 2), (0, 2), (3, 0), (0, 4)),) * 2), ALPHA),
        (merge(donors=(((1, 2), (0, 2), (3, 0), (0,)),) * 2), ALPHA),
    ],
    ids=["none", "uncalled", "alpha", "empty", "layers", "experts", "twice", "itself", "unknown", "few"],
)
def test_nothing_else_is_fit(asked: Merge | None, alpha: float) -> None:
    assert not is_fit(asked, alpha, MODEL, DONORS)


# when


def run(total: int = 0, **fields: Any) -> Manifest:
    """A run of 4 local steps a round."""
    settings = MergeSettings.model_validate({"alpha": 0.1, "every_steps": 8, "first_steps": 40, **fields})
    rounds = examples.ROUND.model_copy(update={"total": total})
    return examples.manifest(round=rounds, merge=settings)


def test_the_strength_falls_linearly_and_is_0_between_merges() -> None:
    strengths = [strength(run(), number) for number in range(14)]
    assert strengths == pytest.approx([0, 0, 0.08, 0, 0.06, 0, 0.04, 0, 0.02, 0, 0, 0, 0, 0])


def test_the_phase_says_what_comes_next() -> None:
    def told(number: int, **fields: int) -> tuple[str, float, int]:
        stage = warmup(run(**fields), number)
        assert stage.round == number and Warmup.open(canonical(stage), run(**fields)) == stage
        return stage.phase, round(stage.alpha, 6), stage.next_round

    assert [told(number) for number in (0, 1, 2, 3)] == [("warmup", a, r) for a, r in [(0.08, 3)] * 3 + [(0.06, 5)]]
    assert told(8) == ("warmup", 0.02, 9) and told(9) == told(99) == ("steady", 0.0, 0)
    assert told(2, total=3) == ("warmup", 0.08, 3) and told(2, total=2) == ("steady", 0.0, 0), "a merge is trained upon"
    assert told(0, alpha=0) == ("steady", 0.0, 0)


def test_the_phase_of_a_run_is_merged_when_it_says_so() -> None:
    for number in range(30):
        stage = warmup(run(), number)
        coming = [later for later in range(number, 40) if strength(run(), later)]
        assert stage.next_round == (coming[0] + 1 if coming else 0)
        assert stage.alpha == (strength(run(), coming[0]) if coming else 0.0)


@pytest.mark.parametrize("change", [{"round": 5}, {"alpha": 0.09}, {"next_round": 4}, {"phase": "steady"}])
def test_a_phase_that_does_not_follow_from_the_manifest_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, ValidationError)):
        Warmup.open(canonical(warmup(run(), 2).model_copy(update=change)), run())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"alpha": 1.1}, "less than or equal to 1"),
        ({"alpha": -0.1}, "greater than or equal to 0"),
        ({"donors": 0}, "greater than 0"),
        ({"every_steps": 6}, "merge.every_steps 6 is not a multiple of round.local_steps 4"),
    ],
)
def test_other_schedules_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        run(**fields)


def test_without_a_merge_the_interval_does_not_matter() -> None:
    assert run(alpha=0, every_steps=6).merge.every_steps == 6
