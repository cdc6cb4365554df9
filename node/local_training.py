"""Training between two commits: the steps of a task, and those ahead of the next one while the swarm synchronises."""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from model.engine import Engine, Evaluation
from node.corpus import Corpus
from node.trained_state import TrainedState
from swarm.manifest import RoundSettings
from swarm.shard_names import expert_of
from swarm.trainer import Task, Work

PROGRESS_SECONDS = 0.5
"""The daemon hears of progress this often."""

RECENT_STEPS = 32
"""The time of a step is the mean over so many."""


class Listener(Protocol):
    """Whoever has given a task; `node.channel.BlockingChannel` is the daemon."""

    def send(self, message: dict[str, Any]) -> None:
        """Hear of progress, or of trouble."""

    def pending(self) -> bool:
        """Whether there is something else to do after the step in progress."""


class LocalTraining:
    """Trains one task at a time, and ahead of the next one; see `swarm.trainer` for what is kept in between."""

    def __init__(self, engine: Engine, corpus: Corpus, rounds: RoundSettings, channel: Listener) -> None:
        """channel: hears of progress and trouble; whatever comes in ends a task after the step it is in."""
        self._engine = engine
        self._corpus = corpus
        self._rounds = rounds
        self._channel = channel
        self._state = TrainedState(engine)
        self._blocks: Sequence[int] = ()
        """Of the last task."""
        self._first_step = 0
        self._losses: list[float] = []
        """Of the first batches of these blocks: those that were trained."""
        self._in_snapshot = 0
        """How many of these batches are in the last snapshot."""
        self._goes_on = False
        self._busy_seconds = 0.0
        self._recent = deque[float](maxlen=RECENT_STEPS)

    def train(self, task: Task) -> tuple[Work, str]:
        """One task; and why its last step failed, if it did. Raises OSError and torch.OutOfMemoryError."""
        try:
            self._take_up(task)
            heldout = self._evaluate(task)
            started = time.monotonic()
            failure = self._train(task)
            seconds = time.monotonic() - started
            shards = self._state.snapshot(task.folder) if self._losses else {}
        except BaseException:
            self._drop()
            raise
        self._in_snapshot = steps = len(self._losses)
        self._goes_on = not failure
        busy, self._busy_seconds = self._busy_seconds, 0.0
        work = Work(
            tokens=steps * self._rounds.batch_blocks * self._corpus.block_tokens,
            steps=steps,
            used_blocks=steps * self._rounds.batch_blocks,
            loss=sum(self._losses) / steps if steps else 0.0,
            heldout_nats=heldout.nats if heldout else 0.0,
            heldout_tokens=heldout.tokens if heldout else 0,
            choices=tuple(map(tuple, heldout.choices.tolist())) if heldout else (),
            seconds=seconds,
            busy_seconds=busy,
            seconds_per_step=sum(self._recent) / len(self._recent) if self._recent else 0.0,
            shards=shards,
        )
        return work, failure

    @property
    def has_ahead(self) -> bool:
        """Whether there is a batch to train before the next task comes."""
        return self._goes_on and self._has_batch()

    def step_ahead(self) -> None:
        """Train one batch of what the last task left. Raises torch.OutOfMemoryError."""
        try:
            self._step()
        except FloatingPointError as error:
            self._drop()
            self._warn(f"what was trained ahead is given up: {error}")
        except BaseException:
            self._drop()
            raise

    def stop_ahead(self) -> None:
        """Train nothing more before the next task."""
        self._goes_on = False

    def write_moments(self, experts: Collection[int], folder: Path) -> dict[str, str]:
        """See `swarm.trainer.Trainer.moments`. Raises OSError."""
        digests = {}
        for name in self._engine.trained_shards():
            if expert_of(name) in experts and (moments := self._engine.moments(name)) is not None:
                digests[name] = moments.write(folder)
        return digests

    def _take_up(self, task: Task) -> None:
        """Begin at the task's base, with what was trained ahead of it if that can be kept."""
        batch = self._rounds.batch_blocks
        first = self._in_snapshot if task.counted else 0
        ahead = self._blocks[first * batch : len(self._losses) * batch]
        keep = self._state.can_measure(task.references) and [*task.blocks[: len(ahead)]] == [*ahead]
        self._losses = self._losses[first:] if keep else []
        self._blocks, self._first_step = task.blocks, task.first_step
        self._state.begin(task, keep=keep, warn=self._warn)

    def _evaluate(self, task: Task) -> Evaluation | None:
        """The base on the task's held-out blocks; None where there are none, or nothing finite comes of it."""
        start, stop = task.heldout
        if start == stop:
            return None
        with self._state.at_base(task):
            blocks = self._corpus.heldout_blocks(self._rounds.heldout_blocks)[start:stop]
            found = self._engine.evaluate(blocks)
        return found if math.isfinite(found.nats) else None

    def _train(self, task: Task) -> str:
        """Train what is missing of the task's steps, while there is time; returns why a step failed."""
        started = told = time.monotonic()
        while len(self._losses) < task.steps and self._has_batch():
            if self._channel.pending() or time.monotonic() - started > task.seconds:
                break
            try:
                loss = self._step()
            except FloatingPointError as error:
                self._drop()  # whatever happened in there, the next task starts from the committed state
                return str(error)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                self._channel.send({"event": "progress", "step": len(self._losses), "loss": loss})
        return ""

    def _has_batch(self) -> bool:
        return (len(self._losses) + 1) * self._rounds.batch_blocks <= len(self._blocks)

    def _step(self) -> float:
        """Train the next batch; returns its loss. Raises FloatingPointError when that is not finite."""
        started = time.monotonic()
        done, batch = len(self._losses), self._rounds.batch_blocks
        tokens = self._corpus.blocks(self._blocks[done * batch : (done + 1) * batch])
        self._state.touch()
        loss = self._engine.train_step(tokens, self._first_step + done).cross_entropy
        self._losses.append(loss)
        seconds = time.monotonic() - started
        self._recent.append(seconds)
        self._busy_seconds += seconds
        return loss

    def _drop(self) -> None:
        """Give up all progress: the next task starts from the committed state."""
        self._goes_on = False
        self._losses, self._blocks, self._in_snapshot = [], (), 0
        self._state.forget()

    def _warn(self, text: str) -> None:
        self._channel.send({"event": "warning", "text": text})
