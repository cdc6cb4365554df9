"""The real trainer process goes on between two tasks, and nothing that it trains is lost, counted twice or rounded."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from model.engine import Engine
from model.errors import SpesError
from model.initial import initial_values
from model.moments import Moments
from model.settings import OptimizerSettings
from node.corpus import load_corpus
from node.trainer_process import TrainerProcess, TrainerSettings
from swarm.manifest import DataSettings, Manifest
from swarm.trainer import Task

State = dict[str, tuple[str, Path]]
T = TypeVar("T")

BATCH = 2
"""Blocks of one step."""


@pytest.fixture
def run(small_manifest: Manifest) -> Manifest:
    """A run whose every local step has a learning rate of its own."""
    changes = {
        "optimizer": OptimizerSettings(learning_rate=1e-2, warmup_steps=100),
        "data": DataSettings(source="own", block_tokens=32),
        "round": small_manifest.round.model_copy(update={"heldout_blocks": 2, "batch_blocks": BATCH}),
    }
    return small_manifest.model_copy(update=changes)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} sheep went over the fence, and then came the next. " for number in range(400)))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are added in the order in which a trainer with one thread adds them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Disk:
    """Stands in for the node's store: states and contributions are files named by their digest."""

    folder: Path
    tasks: int = 0

    def state(self, values: Iterable[tuple[str, np.ndarray]]) -> State:
        """A committed state."""
        return {name: self._put(flat.astype("<f4").tobytes()) for name, flat in values}

    def _put(self, data: bytes) -> tuple[str, Path]:
        path = self.folder / hashlib.sha256(data).hexdigest()
        path.write_bytes(data)
        return path.name, path

    def task(self, base: State, *, blocks: Sequence[int], steps: int, **others: Any) -> Task:
        """The next task from `base` on."""
        self.tasks += 1
        folder = self.folder / f"round {self.tasks}"
        folder.mkdir()
        defaults: dict[str, Any] = {
            "round": self.tasks,
            "references": {},
            "counted": True,
            "experts": (0, 1),
            "moments": {},
            "heldout": (0, 2),
            "first_step": blocks[0] // BATCH if blocks else 0,
            "seconds": 60.0,
            "folder": folder,
        }
        return Task(shards=base, blocks=blocks, steps=steps, **defaults | others)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    return Disk(tmp_path / "disk")


class Twin:
    """An engine in this process that is told step by step what the trainer should do by itself."""

    def __init__(self, run: Manifest, text: Path, experts: Collection[int]) -> None:
        self.engine = Engine(run.model, run.loss, run.optimizer, experts=experts)
        self.corpus = load_corpus(run.data, run.seed, [text])
        self._heldout = self.corpus.heldout_blocks(run.round.heldout_blocks)

    def load(self, state: State, names: Iterable[str] | None = None) -> None:
        for name in state if names is None else names:
            self.engine.load(name, read(state[name][1]))

    def fold(self, name: str, base: State, reference: State) -> None:
        self.engine.fold(name, read(base[name][1]), read(reference[name][1]))

    def train(self, blocks: Sequence[int]) -> list[float]:
        """Losses of the steps, the first of which has the number that a task with these blocks would give it."""
        return [
            self.engine.train_step(self.corpus.blocks(blocks[i : i + BATCH]), (blocks[0] + i) // BATCH).cross_entropy
            for i in range(0, len(blocks), BATCH)
        ]

    def heldout(self) -> float:
        return self.engine.evaluate(self._heldout)[0]

    def digests(self) -> dict[str, str]:
        read = self.engine.read
        return {name: hashlib.sha256(read(name).tobytes()).hexdigest() for name in self.engine.trained_shards()}


def read(path: Path) -> np.ndarray:
    return np.fromfile(path, "<f4")


def genesis(run: Manifest, disk: Disk) -> State:
    return disk.state((shard.name, values) for shard, values in initial_values(run.model, run.seed))


def shaken(state: State, disk: Disk, seed: int) -> State:
    """Another state, as if others had trained."""
    random = np.random.default_rng(seed)
    return disk.state(
        (name, (values := read(path)) + 0.01 * random.standard_normal(len(values))) for name, (_, path) in state.items()
    )


def contribution(task: Task, shards: Iterable[tuple[str, str]]) -> State:
    """The snapshot that came out of a task."""
    return {name: (digest, task.folder / digest) for name, digest in shards}


def files(state: State) -> dict[str, Path]:
    return {name: path for name, (_, path) in state.items()}


def with_trainer(run: Manifest, text: Path, use: Callable[[TrainerProcess], Coroutine[Any, Any, T]]) -> T:
    """What `use` makes of a trainer, which ends with it."""

    async def main() -> T:
        trainer = await TrainerProcess.start(run, TrainerSettings([text], "cpu", threads=1), lambda *_: None)
        try:
            return await use(trainer)
        finally:
            await trainer.close()

    return asyncio.run(main())


async def steps_taken(trainer: TrainerProcess, disk: Disk) -> int:
    """Optimiser steps on expert 0, asked of the trainer between two steps."""
    digests = await trainer.moments((0,), disk.folder)
    return Moments.read(disk.folder / digests["layer.0.expert.0"], 3 * 32 * 16).step


async def reached(steps: int, trainer: TrainerProcess, disk: Disk) -> None:
    """Wait until so many steps are taken."""
    while await steps_taken(trainer, disk) < steps:
        pass


@pytest.mark.usefixtures("one_thread")
def test_a_node_alone_that_trains_ahead_has_the_bits_of_plain_training(run: Manifest, text: Path, disk: Disk) -> None:
    everything = range(run.model.num_experts)
    twin = Twin(run, text, everything)
    base = genesis(run, disk)
    twin.load(base)

    async def rounds(trainer: TrainerProcess) -> None:
        snapshot: State = {}
        for number in range(4):
            start = 4 * number
            heldout = (0, 0) if number == 2 else (0, 2)
            kept = {"references": files(snapshot), "experts": tuple(everything), "heldout": heldout}
            task = disk.task(snapshot or base, blocks=range(start, start + 8), steps=2, **kept)
            work = await trainer.train(task)
            assert work.heldout_nats == (twin.heldout() if heldout[1] else 0)
            losses = twin.train(range(start, start + 4))
            assert (work.steps, work.used_blocks, work.tokens) == (2, 4, 4 * 32)
            assert work.loss == sum(losses) / 2
            assert work.shards == twin.digests()
            assert {path.name for path in task.folder.iterdir()} == set(work.shards.values())
            if number:
                assert work.seconds < work.busy_seconds, "all of it was trained ahead"
            assert work.seconds_per_step > 0
            snapshot = contribution(task, work.shards.items())
            await reached(2 * number + 4, trainer, disk)

    with_trainer(run, text, rounds)


@pytest.mark.usefixtures("one_thread")
def test_what_was_not_counted_comes_with_the_next_contribution(run: Manifest, text: Path, disk: Disk) -> None:
    """First a whole contribution, then that of one expert; another expert is not kept, and the rest was counted."""
    twin = Twin(run, text, (0, 1))
    trained = twin.engine.trained_shards()
    first = genesis(run, disk)
    second, third = shaken(first, disk, seed=1), shaken(first, disk, seed=2)

    async def rounds(trainer: TrainerProcess) -> None:
        twin.load(first)
        await trainer.train(disk.task(first, blocks=range(8), steps=2))
        await reached(4, trainer, disk)
        task = disk.task(second, blocks=range(12), steps=5, references=files(first), counted=False)
        work = await trainer.train(task)

        twin.load(second)
        assert work.heldout_nats == twin.heldout()
        twin.load(first)
        losses = twin.train(range(8))
        for name in trained:
            twin.fold(name, second, first)
        twin.load(second, set(second).difference(trained))
        losses += twin.train(range(8, 10))
        assert (work.steps, work.used_blocks, work.loss) == (5, 10, sum(losses) / 5)
        assert work.shards == twin.digests()

        await reached(6, trainer, disk)
        dropped, carried = "layer.1.expert.0", ("layer.0.expert.1", "layer.1.expert.1")
        snapshot = contribution(task, work.shards.items())
        references = snapshot | {name: second[name] for name in carried}
        del references[dropped]
        work = await trainer.train(disk.task(third, blocks=range(10, 14), steps=2, references=files(references)))

        losses = twin.train(range(10, 12))
        for name in references:
            twin.fold(name, third, references)
        twin.load(third, set(third).difference(references))
        losses += twin.train(range(12, 14))
        assert (work.steps, work.used_blocks, work.loss) == (2, 4, sum(losses) / 2)
        assert work.shards == twin.digests()

    with_trainer(run, text, rounds)


@pytest.mark.usefixtures("one_thread")
def test_what_does_not_fit_the_next_task_is_given_up_to_the_last_bit(run: Manifest, text: Path, disk: Disk) -> None:
    """Other blocks come first, nothing is to be kept, or it is to be measured against values that were never here."""
    twin = Twin(run, text, (0, 1))
    first = genesis(run, disk)
    second, others = shaken(first, disk, seed=1), shaken(first, disk, seed=2)

    async def rounds(trainer: TrainerProcess) -> None:
        for number in range(4):
            task = disk.task(first, blocks=range(8), steps=2)
            snapshot = contribution(task, (await trainer.train(task)).shards.items())
            await reached(6 * number + 4, trainer, disk)
            blocks = range(4, 8) if number else range(20, 24)
            references = [files(snapshot), files(first), {}, files(others)][number]
            next_task = disk.task(second, blocks=blocks, steps=2, references=references, counted=number != 1)
            work = await trainer.train(next_task)
            twin.load(first)
            twin.train(range(8))
            twin.load(second)
            assert work.heldout_nats == twin.heldout()
            twin.train(blocks)
            assert (work.steps, work.used_blocks) == (2, 4)
            assert work.shards == twin.digests()

    with_trainer(run, text, rounds)


@pytest.mark.usefixtures("one_thread")
def test_an_expert_handed_over_with_its_moments_goes_on_as_if_it_had_stayed(
    run: Manifest, text: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """The new owner has lost the expert's moments for a round; everything else is the same on both."""
    base = genesis(run, disk)

    async def stays(trainer: TrainerProcess) -> tuple[dict[str, Path], Mapping[str, str]]:
        assert await trainer.moments((0,), disk.folder) == {}
        await trainer.train(disk.task(base, blocks=range(4), steps=2))
        digests = await trainer.moments((0, 3), disk.folder)
        last = await trainer.train(disk.task(base, blocks=range(4, 6), steps=1))
        return {name: disk.folder / digest for name, digest in digests.items()}, last.shards

    async def takes_over(trainer: TrainerProcess, moments: dict[str, Path]) -> Mapping[str, str]:
        await trainer.train(disk.task(base, blocks=range(4), steps=2))
        await trainer.train(disk.task(base, blocks=(), steps=0, experts=(1,)))
        last = await trainer.train(disk.task(base, blocks=range(4, 6), steps=1, moments=moments))
        await trainer.train(disk.task(base, blocks=(), steps=0, experts=(1,)))
        assert not caplog.records
        damaged = disk.folder / "damaged"
        damaged.write_bytes(moments["layer.0.expert.0"].read_bytes()[:-1])
        moments = moments | {"layer.0.expert.0": damaged}
        await trainer.train(disk.task(base, blocks=range(6, 8), steps=1, moments=moments))
        assert await steps_taken(trainer, disk) == 1
        assert "the moments of layer.0.expert.0 start at zero" in caplog.text and "layer.1" not in caplog.text
        return last.shards

    moments, stayed = with_trainer(run, text, stays)
    assert moments.keys() == {"layer.0.expert.0", "layer.1.expert.0"}, "nobody can hand over what is another's"
    assert with_trainer(run, text, lambda trainer: takes_over(trainer, moments)) == stayed


def test_stopped_ahead_it_keeps_what_it_has_and_trains_no_more(run: Manifest, text: Path, disk: Disk) -> None:
    base = genesis(run, disk)

    async def rounds(trainer: TrainerProcess) -> None:
        task = disk.task(base, blocks=range(20_000), steps=1)
        work = await trainer.train(task)
        await reached(3, trainer, disk)
        trainer.stop()
        taken = [await steps_taken(trainer, disk) for _ in range(10)]
        assert len(set(taken)) == 1 and taken[0] < 10_000
        snapshot = contribution(task, work.shards.items())
        work = await trainer.train(disk.task(base, blocks=range(2, 20_000), steps=1, references=files(snapshot)))
        assert work.steps == taken[0] - 1, "more than it was asked for"

    with_trainer(run, text, rounds)


def test_a_task_that_is_cancelled_ends_and_its_answer_is_nobodys(run: Manifest, text: Path, disk: Disk) -> None:
    base = genesis(run, disk)

    async def rounds(trainer: TrainerProcess) -> None:
        await trainer.train(disk.task(base, blocks=range(2), steps=1))
        long = asyncio.create_task(trainer.train(disk.task(base, blocks=range(100_000), steps=50_000)))
        await asyncio.sleep(0)  # it has asked
        long.cancel()
        assert await steps_taken(trainer, disk) < 50_000
        work = await trainer.train(disk.task(base, blocks=range(2), steps=1))
        assert (work.steps, work.used_blocks) == (1, 2)

    with_trainer(run, text, rounds)


def test_while_ahead_it_ends_with_its_daemon_and_can_be_killed(run: Manifest, text: Path, disk: Disk) -> None:
    task = disk.task(genesis(run, disk), blocks=range(20_000), steps=1)

    async def killed(trainer: TrainerProcess) -> None:
        await trainer.train(task)
        await reached(3, trainer, disk)
        os.kill(trainer._process.pid, signal.SIGKILL)
        with pytest.raises(SpesError, match="killed"):
            await trainer.watch()
        with pytest.raises(SpesError, match="killed"):
            await trainer.train(task)

    async def orphaned(trainer: TrainerProcess) -> None:
        await trainer.train(task)
        await reached(3, trainer, disk)
        trainer._channel.close()
        assert await trainer._process.wait() == 0

    with_trainer(run, text, killed)
    with_trainer(run, text, orphaned)


@pytest.mark.usefixtures("one_thread")
def test_a_loss_ahead_that_is_not_finite_costs_what_was_trained_ahead(
    run: Manifest, text: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads a 7 stumbles."""
    twin = Twin(run, text, (0, 1))
    base = genesis(run, disk)
    embedding = read(base["embed"][1]).reshape(259, 32)
    seven = ord("7") + 3
    embedding[seven] = np.nan
    base |= disk.state([("embed", embedding.ravel())])
    with_seven = [seven in twin.corpus.block(block) for block in range(100)]
    good, bad = ([block for block in range(100) if with_seven[block] is kind] for kind in (False, True))
    twin.load(base)

    async def rounds(trainer: TrainerProcess) -> None:
        task = disk.task(base, blocks=[*good[:4], *bad[:4]], steps=1)
        work = await trainer.train(task)
        while "what was trained ahead is given up" not in caplog.text:
            await steps_taken(trainer, disk)
        references = files(contribution(task, work.shards.items()))
        work = await trainer.train(disk.task(base, blocks=good[2:4], steps=1, references=references))
        twin.train(good[:4])
        twin.load(base)
        twin.train(good[2:4])
        assert (work.steps, work.shards) == (1, twin.digests())
        work = await trainer.train(disk.task(base, blocks=[*good[:2], *bad[:2]], steps=2))
        assert (work.steps, work.tokens, work.shards) == (0, 0, {})
        assert "round not counted" in caplog.text

    with_trainer(run, text, rounds)
