"""What a node has trained beyond the committed state, and what of it a new commit contains."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm.documents import Commit, Signed
from swarm.identity import NodeId
from swarm.store import ShardStore
from swarm.trainer import Work


@dataclass(frozen=True, slots=True)
class HandedIn:
    """The last contribution of this node."""

    plan: str
    """Digest of the plan it was for."""
    parent: str
    """Digest of the commit that the round followed."""
    base: Commit
    """What it started from."""
    work: Work


def references(
    last: HandedIn | None, head: Signed[Commit], me: NodeId, store: ShardStore
) -> tuple[Mapping[str, Path], bool]:
    """For each shard this node trains, the values up to which the state of `head` accounts for its training: what it
    has trained beyond them is added to that state.

    That is its snapshot where the contribution counted, else the state its training started from. Nothing can be kept
    when the node has missed a commit: its blocks are with others by then.

    Args:
        last: what was handed in last.
        head: the commit that training goes on from.
        me: this node.
        store: holds the values.

    Returns:
        File of the values by shard, and whether the contribution counted.
    """
    if last is None:
        return {}, False
    if last.parent not in (head.digest, head.document.parent):
        return {}, False
    before = {name: store.locate(last.base.shards[name].digest) for name in last.work.shards}
    if head.digest == last.parent:
        return before, False  # the round led nowhere
    commit = head.document
    if commit.plan != last.plan or me not in commit.shares:
        return before, False
    scratch = store.scratch(commit.round)
    counted = {name: scratch / digest for name, digest in last.work.shards.items() if commit.counts(me, name)}
    return {**before, **counted}, True


class Utilisation:
    """How much of its time a node trains."""

    def __init__(self) -> None:
        self.last = 0.0
        """Share of the time between the last two calls that was spent training; 0 before the second."""
        self._called: float | None = None

    def since_last(self, busy_seconds: float) -> float:
        """Note the seconds spent in training steps since the last call; returns their share of the time since then."""
        now = time.monotonic()
        if self._called is not None:
            self.last = min(1.0, busy_seconds / max(now - self._called, 1e-9))
        self._called = now
        return self.last
