"""What a round needs from whoever trains: the node's trainer process, or a small stand-in in tests.

A trainer may go on with the rest of a task's blocks while the swarm synchronises. What it has trained since a state
that the commit accounts for is its *progress*: the next task says which state that is, and its base gets it on top.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One round's training on this node. Files of values are flat fp32 and named by their digest."""

    round: int
    shards: Mapping[str, tuple[str, Path]]
    """Digest and file of every shard of the base, the commit that this round starts from."""
    references: Mapping[str, Path]
    """Values R that the base already accounts for, of shards whose progress is kept: the weights x become
    base + (x - R). R is this trainer's last snapshot where the commit counted it, else the base of its last task. A
    shard without an entry is loaded; with no entry, or one that is neither, all progress is given up."""
    counted: bool
    """Whether a commit has counted this trainer's last Work. Its progress then begins at that Work's snapshot, else at
    the base of its last task. It is kept only if its blocks are the first of `blocks`; else it is given up, too: every
    shard is loaded, and training starts at the first block."""
    experts: tuple[int, ...]
    moments: Mapping[str, Path]
    """Files from another trainer's `moments`, used for the shards of experts that become owned with this task."""
    blocks: Sequence[int]
    """Block ids in the order of use. What is left of them after the snapshot is trained ahead."""
    heldout: tuple[int, int]
    """Half-open range of held-out blocks, of `heldout_blocks` in all; the base itself is evaluated on them."""
    steps: int
    """Train until so many batches of `blocks` are done, those of the progress included, which may be more."""
    first_step: int
    """Number of the local step, for the learning rate, that takes the first batch of `blocks`."""
    seconds: float
    """Training ends after this time."""
    folder: Path
    """Where the snapshot goes, each shard in a file named by its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What came out of a task. Counts are from the start of its blocks: they include what was trained ahead of it."""

    tokens: int
    steps: int
    used_blocks: int
    loss: float
    """Mean cross-entropy over the steps, nats per token."""
    heldout_nats: float
    heldout_tokens: int
    choices: tuple[tuple[int, ...], ...] = ()
    """How often each expert of each layer was chosen on these tokens, [L][E]."""
    seconds: float
    """Of this task's training, up to the snapshot."""
    busy_seconds: float
    """In training steps since the Work before, those ahead of the task included."""
    seconds_per_step: float
    """Mean over recent steps; 0 before the first one."""
    shards: Mapping[str, str]
    """Digest of the snapshot of every trained shard; empty when there was no step, or the last one failed."""


class Trainer(Protocol):
    """Trains one task at a time, and ahead of the next one on the blocks that are left."""

    async def train(self, task: Task) -> Work:
        """Take up the base and the progress, train, and write the snapshot. Training ends when this is cancelled."""

    def stop(self) -> None:
        """End the current training after the step it is in, until the next task; `train` then returns what was reached.
        What was trained ahead stays progress."""

    async def moments(self, experts: Collection[int], folder: Path) -> dict[str, str]:
        """Write the AdamW moments of these experts, each shard's to a file (`model.moments`) in `folder` named by its
        digest; returns the digests. Experts without fp32 moments are left out. Waits for the end of a task."""
