"""What a round needs from whoever trains: the node's trainer process, or a small stand-in in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One round's training on this node."""

    round: int
    shards: Mapping[str, tuple[str, Path]]
    """Digest and file of every shard of the state this round starts from."""
    carried: frozenset[str]
    """Shards whose last contribution by this node was not counted: their owner keeps its own values."""
    experts: tuple[int, ...]
    blocks: Sequence[int]
    """Block ids in the order of use."""
    heldout: tuple[int, int]
    """Half-open range of held-out blocks, of `heldout_blocks` in all."""
    local_steps: int
    seconds: float
    """Training ends after this time."""
    folder: Path
    """Where the contributions go, each named by its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What came out of a task."""

    tokens: int
    steps: int
    used_blocks: int
    loss: float
    """Mean cross-entropy over the steps, nats per token."""
    heldout_nats: float
    heldout_tokens: int
    seconds: float
    """Of the training steps."""
    shards: Mapping[str, str]
    """Digest of every trained shard's values."""


class Trainer(Protocol):
    """Trains one task at a time."""

    async def train(self, task: Task) -> Work:
        """Load the task's state, train, and write the contributions."""

    def stop(self) -> None:
        """End the current training after the step it is in; `train` then returns what was reached."""
