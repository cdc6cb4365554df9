"""The real trainer process, without a network: it plans before it allocates, and contributes what was committed."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from bootstrap.run_file import read_preset
from model.errors import UserError
from model.frozen import FrozenStore
from model.initial import initial_values
from model.memory_plan import INT8_STORE, Device, MemoryPlan
from model.optimizer import has_adam_8bit
from model.settings import ComputeSettings, ModelSettings, OptimizerSettings
from node.planning import describe_memory, plan_for
from node.trainer_process import TrainerProcess, TrainerSettings
from swarm.manifest import DataSettings, Manifest
from swarm.shard_names import expert_of, trained
from swarm.trainer import Task, Work

State = dict[str, tuple[str, Path]]
T = TypeVar("T")


@pytest.fixture
def run(small_manifest: Manifest) -> Manifest:
    """A run with a few MB of experts, which trains at a rate that moves no weight."""
    changes = {
        "model": ModelSettings(
            vocab_size=259,
            hidden_size=96,
            num_layers=3,
            num_heads=4,
            num_kv_heads=4,
            expert_size=256,
            num_experts=6,
            experts_per_token=2,
            max_length=32,
        ),
        "optimizer": OptimizerSettings(learning_rate=1e-30, weight_decay=0.0),
        "data": DataSettings(source="own", block_tokens=32),
        "round": small_manifest.round.model_copy(update={"heldout_blocks": 2, "local_steps": 2}),
    }
    return small_manifest.model_copy(update=changes)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Some text to train on, again and again. " * 200)
    return path


@pytest.fixture
def state(run: Manifest, tmp_path: Path) -> State:
    """The committed state: a file for each shard, named by its digest."""
    (tmp_path / "objects").mkdir()
    shards = {}
    for shard, values in initial_values(run.model, run.seed):
        data = values.astype("<f4").tobytes()
        digest = hashlib.sha256(data).hexdigest()
        (tmp_path / "objects" / digest).write_bytes(data)
        shards[shard.name] = digest, tmp_path / "objects" / digest
    return shards


def int8_plan(run: Manifest, experts: int) -> MemoryPlan:
    """With the most memory for which frozen experts are kept in int8, on a CPU."""
    device = Device(memory=10**15, gpu=False, compute=ComputeSettings(), adam_8bit=has_adam_8bit())
    while INT8_STORE not in (made := plan_for(run, device, experts)).savings:
        device = replace(device, memory=made.needed - 1)
    return made


def with_trainer(
    run: Manifest, settings: TrainerSettings, use: Callable[[TrainerProcess], Coroutine[Any, Any, T]]
) -> T:
    """What `use` makes of a trainer, which ends with it."""

    async def main() -> T:
        trainer = await TrainerProcess.start(run, settings, lambda step, loss: None)
        try:
            return await use(trainer)
        finally:
            await trainer.close()

    return asyncio.run(main())


def settings_for(text: Path, **others: Any) -> TrainerSettings:
    return TrainerSettings(data=[text], device="cpu", threads=1, **others)


def refusal(run: Manifest, settings: TrainerSettings) -> str:
    """The one line with which a trainer refuses to start."""

    async def nothing(trainer: TrainerProcess) -> None:
        raise AssertionError("it has started")

    with pytest.raises(UserError) as refused:
        with_trainer(run, settings, nothing)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_who_begins_to_train_an_expert_starts_from_its_committed_values(
    run: Manifest, state: State, text: Path, tmp_path: Path
) -> None:
    """While others train an expert it is rounded to int8 here; nothing of that may reach a contribution."""
    plan = int8_plan(run, 2)
    owners: list[tuple[int, ...]] = [(0,), (1,), (0,), (1, 2)]

    async def rounds(trainer: TrainerProcess) -> list[Work]:
        assert f"{INT8_STORE.what}: {INT8_STORE.cost}" in trainer.savings
        works = []
        for number, experts in enumerate(owners, start=1):
            folder = tmp_path / str(number)
            folder.mkdir()
            task = Task(
                round=number,
                shards=state,
                references={},
                counted=True,
                experts=experts,
                moments={},
                blocks=range(4 * number, 4 * number + 4),
                heldout=(0, 2),
                steps=2,
                first_step=2 * number - 2,
                seconds=60.0,
                folder=folder,
            )
            works.append(await trainer.train(task))
            assert {path.name for path in folder.iterdir()} == set(works[-1].shards.values())
        return works

    works = with_trainer(run, settings_for(text, experts=2, memory=plan.device.memory), rounds)
    for experts, work in zip(owners, works, strict=True):
        assert (work.steps, work.tokens, work.used_blocks) == (2, 2 * 2 * 32, 4)
        assert work.shards == {name: state[name][0] for name in trained(state, experts)}
        assert work.heldout_tokens == 64 and 4 < work.loss < 7


def test_int8_would_be_seen_in_the_digests(run: Manifest, state: State) -> None:
    """The test above says something: an expert that was rounded has other values."""
    width, inner = run.model.hidden_size, run.model.expert_size
    _, path = next(entry for name, entry in state.items() if expert_of(name) == 1)
    values = torch.from_numpy(np.fromfile(path, "<f4"))
    gate_up, down = values[: 2 * inner * width].view(2 * inner, width), values[2 * inner * width :].view(width, inner)
    store = FrozenStore("int8")
    store.put(1, gate_up, down)
    assert not torch.equal(store.get(1, torch.float32)[0], gate_up)


def test_a_trainer_that_is_ready_tells_what_it_chose_and_why(run: Manifest, text: Path) -> None:
    plan = int8_plan(run, 1)

    async def told(trainer: TrainerProcess) -> dict[str, Any]:
        return {
            name: getattr(trainer, name)
            for name in ("device", "dtype", "reason", "capacity", "capacity_reason", "memory", "savings")
        }

    tight = with_trainer(run, settings_for(text, experts=1, memory=plan.device.memory), told)
    assert tight == {
        "device": "cpu",
        "dtype": "fp32",
        "reason": "the CPU was asked for",
        "capacity": 1,
        "capacity_reason": "--experts 1",
        "memory": describe_memory(plan),
        "savings": [f"{saving.what}: {saving.cost}" for saving in plan.savings],
    }
    ample = with_trainer(run, settings_for(text), told)
    assert (ample["capacity"], ample["capacity_reason"], ample["savings"]) == (6, "all of them fit", [])


def test_more_experts_than_the_model_has_are_refused(run: Manifest, text: Path) -> None:
    assert "cannot train 7 experts: this model has 6 in each layer" in refusal(run, settings_for(text, experts=7))


def test_too_little_memory_is_refused_before_anything_is_allocated(run: Manifest, tmp_path: Path) -> None:
    """Before the text is even looked for, and for a model that no box of ours would hold."""
    nowhere = settings_for(tmp_path / "nowhere.txt", memory=4 * 10**9)
    big = read_preset("9b").manifest(author=run.author, fingerprint="", num_blocks=0)
    assert "2 of 8 experts need" in refusal(big, nowhere)
    assert "GB and there are 0.1 GB" in refusal(run, replace(nowhere, memory=10**8))
    assert "nowhere.txt" in refusal(run, replace(nowhere, memory=None))
