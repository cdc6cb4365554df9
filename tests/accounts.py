"""What tests of whole rounds hold against a swarm: which bits its nodes had, and which blocks these contain."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from bench.marking_trainer import marks
from bench.participants import Node, Swarm
from swarm import blocks
from swarm.documents import Commit, Signed, state_digest
from swarm.shard_names import trained
from swarm.store import file_digest, map_values, read_commit

LEFT_TO_THE_COLLECTOR = [
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed resource <UnixTransport:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:loop is closed:ResourceWarning"),
]
"""hivemind leaves the streams of calls that break off to it."""


class Accounts:
    """Everything that nodes have adopted. `note` is a swarm's `on_commit`."""

    def __init__(self) -> None:
        self.commits: dict[str, Signed[Commit]] = {}
        self.states: dict[str, dict[str, np.ndarray]] = {}
        """Values of every shard, by digest of the commit."""
        self.holders: dict[str, list[Node]] = {}

    def note(self, node: Node, commit: Signed[Commit]) -> None:
        """A node has adopted a commit: the bytes on its disk are the state that the commit names (I1)."""
        paths = {name: node.store.path(shard.digest) for name, shard in commit.document.shards.items()}
        assert state_digest({name: file_digest(path) for name, path in paths.items()}) == commit.document.state
        self.holders.setdefault(commit.digest, []).append(node)
        if commit.digest not in self.states:
            self.commits[commit.digest] = commit
            self.states[commit.digest] = {name: np.array(map_values(path)) for name, path in paths.items()}

    def chain(self, swarm: Swarm) -> list[Signed[Commit]]:
        """The commits from the genesis to the head of the running nodes that is furthest, oldest first."""
        genesis = swarm.genesis.head
        assert genesis is not None
        self.states[genesis.digest] = {name: np.array(swarm.genesis.values(name)) for name in genesis.document.shards}
        heads = [node.commits[-1] for node in swarm.running]
        chain = [max(heads, key=lambda head: head.document.round)]
        while chain[0].digest != genesis.digest:
            parent = chain[0].document.parent
            if parent != genesis.digest and parent not in self.commits:
                self._recover(swarm, chain[0].document.round - 1)
            chain.insert(0, genesis if parent == genesis.digest else self.commits[parent])
        return chain

    def _recover(self, swarm: Swarm, number: int) -> None:
        """A node that was ended while it adopted a commit told nobody; its disk has it."""
        for node in swarm.nodes:
            if (commit := read_commit(node.folder, swarm.manifest.digest, number)) is not None:
                self.commits.setdefault(commit.digest, commit)

    def gain(self, name: str, after: Signed[Commit], before: Signed[Commit]) -> np.ndarray:
        """What a shard has gained between two commits."""
        difference: np.ndarray = self.states[after.digest][name] - self.states[before.digest][name]
        return difference


def used(commit: Commit, node: Node) -> list[int]:
    """The blocks of a node that a commit counts, by the records of its trainer."""
    if node.id not in commit.shares:
        return []
    work, trained = node.trainer.works[commit.round]
    assert commit.shares[node.id].tokens == work.tokens and commit.shares[node.id].steps == work.steps
    return trained


def require_every_block_once(chain: Sequence[Signed[Commit]], nodes: Iterable[Node]) -> None:
    """I8: every block below the cursor is counted in exactly one commit, or is returned or reserved."""
    counted = [block for commit in chain for node in nodes for block in used(commit.document, node)]
    ledger = chain[-1].document.ledger
    left = [*ledger.returned, *(block for ranges in ledger.reserved.values() for block in ranges)]
    assert sorted([*counted, *blocks.ids(left)]) == list(range(ledger.cursor))


def require_marks(gain: np.ndarray, counted: Sequence[int], within: float = 1e-4) -> None:
    """A shard that only one node trains has the mark of every block that was counted, once."""
    np.testing.assert_allclose(gain, marks(counted, gain.size), atol=within)


def require_means(
    accounts: Accounts, chain: Sequence[Signed[Commit]], nodes: Sequence[Node], within: float = 2e-7
) -> None:
    """Every changed shard is the mean of what its owners trained, weighted by tokens: by default but for the last
    bit, which may be rounded where progress was moved to another base."""
    for before, after in pairwise(chain):
        for name in after.document.updates:
            base = accounts.states[before.digest][name]
            mean = np.zeros(base.size)
            counted = {node.id: used(after.document, node) for node in nodes if after.document.counts(node.id, name)}
            mine = {node: ids for node, ids in counted.items() if trained([name], after.document.owners[node])}
            weights = {node: after.document.shares[node].tokens for node in mine}
            for node, ids in sorted(mine.items()):
                values = base.copy()
                for block in ids:
                    values += marks([block], base.size)
                mean += weights[node] / sum(weights.values()) * values.astype("<f8")
            expected = np.asarray(mean, dtype="<f4")
            np.testing.assert_allclose(accounts.states[after.digest][name], expected, rtol=0, atol=within, err_msg=name)
