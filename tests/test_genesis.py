"""A run begins with random weights or with a checkpoint, and its id tells which."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bootstrap.genesis import prepare_run
from bootstrap.run_file import RunFile, RunSection, preset_names, read_run_file, write_preset
from bootstrap.warm_start import WarmStart, open_warm_start
from model.checkpoint import Checkpoint
from model.errors import UserError
from model.export import export_checkpoint
from model.initial import initial_values
from model.settings import ModelSettings
from node.console import describe_run
from swarm.documents import Signed
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.store import ShardStore

Prepared = tuple[Signed[Manifest], ShardStore]


@pytest.fixture
def run_file(small_manifest: Manifest) -> RunFile:
    return RunFile(
        run=RunSection(name="small", seed=1),
        model=small_manifest.model,
        optimizer=small_manifest.optimizer,
        data=small_manifest.data,
        round=small_manifest.round,
    )


def write_checkpoint(settings: ModelSettings, folder: Path, seed: int = 9) -> Path:
    values = {shard.name: values for shard, values in initial_values(settings, seed)}
    export_checkpoint(settings, values.__getitem__, folder)
    return folder


@pytest.fixture
def checkpoint(run_file: RunFile, tmp_path: Path) -> Path:
    return write_checkpoint(run_file.model, tmp_path / "checkpoint")


def prepare(run_file: RunFile, identity: Identity, home: Path, start: WarmStart | None = None) -> Prepared:
    return prepare_run(run_file, identity, home, fingerprint="", num_blocks=0, start=start, say=lambda text: None)


def test_the_first_commit_has_the_checkpoints_values(
    run_file: RunFile, identities: list[Identity], checkpoint: Path, tmp_path: Path
) -> None:
    start = open_warm_start(checkpoint, run_file.model)
    manifest, store = prepare(run_file, identities[0], tmp_path / "home", start)
    assert store.head is not None and store.head.document.round == 0
    assert manifest.document.initial_state == start.state == store.head.document.state
    for shard, values in Checkpoint.open(checkpoint).values():
        assert np.array_equal(store.values(shard.name), values)
    assert start.state[:12] in describe_run(manifest.document)


def test_other_weights_are_another_run_and_the_same_weights_are_the_same(
    run_file: RunFile, identities: list[Identity], checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(run_file.model, tmp_path / "other", seed=10)
    starts = [None, *(open_warm_start(folder, run_file.model) for folder in (checkpoint, other, checkpoint))]
    ids = [prepare(run_file, identities[0], tmp_path / "home", start)[0].digest for start in starts]
    assert len(set(ids)) == 3 and ids[1] == ids[3]


def test_going_on_needs_the_checkpoint_again(
    run_file: RunFile, identities: list[Identity], checkpoint: Path, tmp_path: Path
) -> None:
    start = open_warm_start(checkpoint, run_file.model)
    first, _ = prepare(run_file, identities[0], tmp_path / "home", start)
    told: list[str] = []
    again, _ = prepare_run(
        run_file, identities[0], tmp_path / "home", fingerprint="", num_blocks=0, start=start, say=told.append
    )
    assert again.digest == first.digest and told == ["going on with run small at round 0"]
    with pytest.raises(UserError, match="--init DIR"):
        prepare(run_file, identities[0], tmp_path / "home")
    prepare(run_file.model_copy(update={"run": RunSection(name="new", seed=1)}), identities[0], tmp_path / "home")


def test_a_checkpoint_that_changes_meanwhile_begins_no_run(
    run_file: RunFile, identities: list[Identity], checkpoint: Path, tmp_path: Path
) -> None:
    start = open_warm_start(checkpoint, run_file.model)
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, checkpoint / "model.safetensors")
    changed = WarmStart(Checkpoint.open(checkpoint), start.state)
    with pytest.raises(UserError, match="was changed"):
        prepare(run_file, identities[0], tmp_path / "home", changed)
    assert not list(tmp_path.glob("home/runs/*/HEAD"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_size": 64}, "model.expert_size: the run file has 64 and the checkpoint"),
        ({"norm_eps": 1e-5}, "model.norm_eps: the run file has 1e-05"),
        ({"head_dim": 20, "family": "qwen3_moe"}, "model.family: the run file has 'qwen3_moe'"),
        ({"max_length": 4096}, "model.max_length: the run file has 4096"),
        ({"max_length": 32, "init_std": 0.5}, ""),
        ({"head_dim": 16}, ""),
    ],
)
def test_run_file_and_checkpoint_must_agree(
    run_file: RunFile, checkpoint: Path, changes: dict[str, Any], words: str
) -> None:
    model = ModelSettings.model_validate(run_file.model.model_dump() | changes)
    if not words:
        open_warm_start(checkpoint, model)
        return
    with pytest.raises(UserError) as refusal:
        open_warm_start(checkpoint, model)
    assert str(refusal.value).startswith(words) and "\n" not in str(refusal.value)


def test_values_that_are_no_numbers_begin_no_run(run_file: RunFile, checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match="model.norm.weight has values that are not finite"):
        open_warm_start(checkpoint, run_file.model)


def without_model(text: str) -> list[str]:
    """The lines of a run file outside its [model] section."""
    before, _, rest = text.partition("[model]")
    return [*before.splitlines(), *rest[rest.index("\n[") :].splitlines()]


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_is_written_for_a_checkpoint(run_file: RunFile, tmp_path: Path, preset: str) -> None:
    model = run_file.model.model_copy(update={"max_length": 24, "init_std": 0.3})
    write_preset(preset, tmp_path / "plain.toml")
    write_preset(preset, tmp_path / "run.toml", model)
    plain, written = read_run_file(tmp_path / "plain.toml"), read_run_file(tmp_path / "run.toml")
    assert written.model == model and written.data.block_tokens == 24
    assert (written.run, written.loss, written.optimizer, written.round) == (
        plain.run, plain.loss, plain.optimizer, plain.round,
    )  # fmt: skip
    plain_text, text = ((tmp_path / name).read_text() for name in ("plain.toml", "run.toml"))
    for before, after in zip(without_model(plain_text), without_model(text), strict=True):
        assert before == after or (before.partition("#")[2], after[:18]) == (
            after.partition("#")[2],
            "block_tokens = 24 ",
        )
    assert all("#" in line for line in text.splitlines() if "=" in line)


def test_manifests_written_before_have_no_initial_state(small_manifest: Manifest) -> None:
    fields = small_manifest.model_dump()
    del fields["initial_state"]
    assert Manifest.model_validate(fields).initial_state == ""
    assert json.loads(small_manifest.model_dump_json())["initial_state"] == ""
