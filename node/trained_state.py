"""What the trainer's weights are: the bits of a file, or the bits of a file with this node's training on top."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from model.engine import Engine
from model.moments import Moments
from model.shards import DTYPE
from swarm.shard_names import expert_of
from swarm.trainer import Task


class TrainedState:
    """Keeps an engine's weights in step with the commits. Never holds more than one shard beside them in memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numel = {shard.name: shard.numel for shard in engine.shards}
        self._held: dict[str, str] = {}
        """Digest of the values of a shard; none when it was trained since, or is in an unknown state."""
        self._references: dict[str, set[str]] = {}
        """Digests of base and snapshot of each shard that the last task trained, against which progress is measured."""

    def can_measure(self, references: Mapping[str, Path]) -> bool:
        """Whether the progress of shards that were trained can be measured against `references`."""
        known = self._references
        mine = [name for name in references if name in known]
        return bool(mine) and all(references[name].name in known[name] for name in mine)

    def begin(self, task: Task, *, keep: bool, warn: Callable[[str], None]) -> None:
        """Take up the task's experts, its base, and with `keep` the progress since its references, which can be
        measured. Raises OSError."""
        engine = self._engine
        new = frozenset(task.experts).difference(*engine.experts)
        engine.own(task.experts)
        trained = engine.trained_shards()
        # Frozen experts may be rounded where they are: who begins to train one starts from its committed values.
        kept = {name for name in trained if keep and name in task.references and expert_of(name) not in new}
        for name, (digest, path) in task.shards.items():
            if name in kept:
                self._rebase(name, digest, path, task.references[name])
            elif expert_of(name) in new or self._held.get(name) != digest:
                self._load(name, digest, path)
        self._references = {name: {task.shards[name][0]} for name in trained}
        for name, path in task.moments.items():
            if expert_of(name) in new:
                self._load_moments(name, path, warn)

    def _rebase(self, name: str, digest: str, path: Path, reference: Path) -> None:
        """Move the progress of a shard since `reference` onto the base. Arithmetic rounds, so there is none where there
        is nothing to add, or nothing to add it to."""
        if digest == reference.name:
            return
        if self._held.get(name) == reference.name:
            self._load(name, digest, path)
            return
        self._held.pop(name, None)
        self._engine.fold(name, _values(path), _values(reference))

    def _load(self, name: str, digest: str, path: Path) -> None:
        self._engine.load(name, _values(path))
        self._held[name] = digest

    def _load_moments(self, name: str, path: Path, warn: Callable[[str], None]) -> None:
        try:
            self._engine.load_moments(name, Moments.read(path, self._numel[name]))
        except (ValueError, OSError) as error:
            warn(f"the moments of {name} start at zero: those handed over cannot be used: {error}")

    @contextmanager
    def at_base(self, task: Task) -> Iterator[None]:
        """Inside, the weights are the base of the task that has begun; after that what they were, to the bit.

        What was trained waits in files. Raises OSError.
        """
        moved = [name for name in self._engine.trained_shards() if self._held.get(name) != task.shards[name][0]]
        with TemporaryDirectory(dir=task.folder, prefix=".progress-") as folder:
            for name in moved:
                self._engine.read(name).tofile(Path(folder, name))
                self._engine.load(name, _values(task.shards[name][1]))
            yield
            for name in moved:
                self._engine.load(name, _values(Path(folder, name)))

    def touch(self) -> None:
        """The trained shards are about to change."""
        for name in self._engine.trained_shards():
            self._held.pop(name, None)

    def snapshot(self, folder: Path) -> dict[str, str]:
        """Write the trained shards, each to a file named by its digest; returns the digest of each. Raises OSError."""
        digests = {}
        for name in self._engine.trained_shards():
            data = self._engine.read(name).astype(DTYPE, copy=False).data
            digests[name] = digest = hashlib.sha256(data).hexdigest()
            temporary = folder / f".{digest}.part"
            temporary.write_bytes(data)
            temporary.rename(folder / digest)
            self._references[name].add(digest)
        self._held |= digests
        return digests

    def forget(self) -> None:
        """The weights cannot be relied on: the next task loads every shard."""
        self._held.clear()
        self._references.clear()


def _values(path: Path) -> np.ndarray:
    return np.memmap(path, DTYPE, mode="r")
