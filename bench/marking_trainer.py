"""A stand-in for the trainer process that learns nothing and forgets nothing: every block it trains leaves a mark.

A block adds 1 to one value of every shard that is trained, so the weights tell which blocks they contain, and how
often. It keeps the whole protocol of `swarm.trainer`, with progress ahead of the next task, and takes as long as it is
told.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from swarm.manifest import Manifest
from swarm.shard_names import expert_of, trained
from swarm.trainer import Task, Work

NATS = 3.0
"""Loss of every block, nats per token."""


def marks(blocks: Sequence[int], numel: int) -> np.ndarray:
    """What training these blocks adds to a shard, fp32 [numel]."""
    counts: np.ndarray = np.bincount(np.asarray(blocks, dtype=np.int64) % numel, minlength=numel).astype("<f4")
    return counts


def moments_of(node: str, name: str) -> bytes:
    """What stands for the moments that a node has for a shard."""
    return f"{node}:{name}".encode()


class MarkingTrainer:
    """Trains in this event loop. Implements `swarm.trainer.Trainer`."""

    def __init__(self, manifest: Manifest, node: str, step_seconds: float) -> None:
        """Args:
        manifest: the run.
        node: whose trainer it is.
        step_seconds: how long a batch takes.
        """
        self.step_seconds = step_seconds
        self.tasks: list[Task] = []
        self.began: dict[int, float] = {}
        """When the task of a round came, on the event loop's clock."""
        self.works: dict[int, tuple[Work, list[int]]] = {}
        """By round: what came out of it, and the blocks that it names as used."""
        self.counted: list[int] = []
        """Blocks that a commit contains, as the tasks have told."""
        self.inherited: dict[str, bytes] = {}
        """Moments that came from others, by shard."""
        self._rounds, self._block_tokens = manifest.round, manifest.data.block_tokens
        self._node = node
        self._values: dict[str, np.ndarray] = {}
        """Of the shards that are trained, fp32 [numel]."""
        self._known: dict[str, set[str]] = {}
        """Digests that progress can be measured against: of the last base and of the last snapshot."""
        self._blocks: Sequence[int] = ()
        self._done = 0
        """Batches of these blocks that are in the values."""
        self._in_snapshot = 0
        self._stopped = asyncio.Event()
        self._turn = asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None

    async def train(self, task: Task) -> Work:
        """See `swarm.trainer.Trainer`."""
        async with self._turn:
            await self.close()
            self._stopped.clear()
            self._take_up(task)
            loop = asyncio.get_running_loop()
            started, before = loop.time(), self._done
            self.began[task.round] = started
            while self._done < task.steps and loop.time() - started < task.seconds and await self._step():
                continue
            work = self._snapshot(task, loop.time() - started, (self._done - before) * self.step_seconds)
            if not self._stopped.is_set():
                self._ahead = asyncio.create_task(self._go_on())
            return work

    def stop(self) -> None:
        """See `swarm.trainer.Trainer`."""
        self._stopped.set()

    async def moments(self, experts: Collection[int], folder: Path) -> dict[str, str]:
        """See `swarm.trainer.Trainer`."""
        async with self._turn:
            mine = [name for name in self._values if expert_of(name) in experts]
            return {name: _write(folder, moments_of(self._node, name)) for name in mine}

    async def close(self) -> None:
        """End what is trained ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
            self._ahead = None

    def _take_up(self, task: Task) -> None:
        batch = self._rounds.batch_blocks
        self.tasks.append(task)
        self.inherited |= {name: path.read_bytes() for name, path in task.moments.items()}
        first = self._in_snapshot if task.counted else 0
        if task.counted:
            self.counted += self._blocks[: first * batch]
        ahead = self._blocks[first * batch : self._done * batch]
        keep = self._can_measure(task.references) and [*task.blocks[: len(ahead)]] == [*ahead]
        names = trained(task.shards, task.experts)
        self._values = {name: self._taken_up(name, task, keep) for name in names}
        self._known = {name: {task.shards[name][0]} for name in names}
        self._blocks, self._done = task.blocks, self._done - first if keep else 0

    def _can_measure(self, references: Mapping[str, Path]) -> bool:
        mine = [name for name in references if name in self._known]
        return bool(mine) and all(references[name].name in self._known[name] for name in mine)

    def _taken_up(self, name: str, task: Task, keep: bool) -> np.ndarray:
        base = np.fromfile(task.shards[name][1], dtype="<f4")
        if not keep or name not in task.references or name not in self._values:
            return base
        progress = self._values[name] - np.fromfile(task.references[name], dtype="<f4")
        taken_up: np.ndarray = base + progress
        return taken_up

    async def _step(self) -> bool:
        """Train the next batch; False when there is none, or training is to end."""
        batch = self._rounds.batch_blocks
        blocks = self._blocks[self._done * batch : (self._done + 1) * batch]
        if self._stopped.is_set() or len(blocks) < batch:
            return False
        await asyncio.sleep(self.step_seconds)
        for values in self._values.values():
            values += marks(blocks, values.size)
        self._done += 1
        return True

    async def _go_on(self) -> None:
        while await self._step():
            continue

    def _snapshot(self, task: Task, seconds: float, busy_seconds: float) -> Work:
        digests = {name: _write(task.folder, x.tobytes()) for name, x in self._values.items()} if self._done else {}
        for name, digest in digests.items():
            self._known[name].add(digest)
        self._in_snapshot = self._done
        used = self._done * self._rounds.batch_blocks
        heldout_tokens = (task.heldout[1] - task.heldout[0]) * self._block_tokens
        work = Work(
            tokens=used * self._block_tokens,
            steps=self._done,
            used_blocks=used,
            loss=NATS,
            heldout_nats=NATS * heldout_tokens,
            heldout_tokens=heldout_tokens,
            seconds=seconds,
            busy_seconds=busy_seconds,
            seconds_per_step=self.step_seconds,
            shards=digests,
        )
        self.works[task.round] = work, list(task.blocks[:used])
        return work


def _write(folder: Path, data: bytes) -> str:
    """Write a file named by its digest; returns that."""
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    return digest
