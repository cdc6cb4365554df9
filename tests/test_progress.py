"""What of a node's training a new commit contains: the values that the rest is measured from."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from swarm.documents import Commit, Share, Signed, seal
from swarm.identity import Identity
from swarm.progress import HandedIn, Utilisation, references
from swarm.trainer import Work
from tests import examples
from tests.nodes import Node

PLAN = examples.digest("plan")
EXPERT = "layer.0.expert.1"
VALUES = {"embed": b"old!", EXPERT: b"old?", "layer.0.expert.2": b"frozen ."}
SNAPSHOT = {"embed": b"new!", EXPERT: b"new?"}


class Trained:
    """A node that has handed in two of three shards, in the round after the genesis."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self.node = Node(identity, folder, VALUES, examples.manifest())
        self.base = self.node.head
        shards = {name: self.node.keep(data).digest for name, data in SNAPSHOT.items()}
        work = Work(
            tokens=8, steps=1, used_blocks=1, loss=1.0, heldout_nats=0.0, heldout_tokens=0,
            seconds=1.0, busy_seconds=1.0, seconds_per_step=1.0, shards=shards,
        )  # fmt: skip
        self.last = HandedIn(PLAN, self.base.digest, self.base.document, work)

    def commit(
        self,
        *,
        parent: str = "",
        plan: str = PLAN,
        shares: Iterable[str] | None = None,
        changed: Iterable[str] = SNAPSHOT,
        without: Iterable[str] = (),
    ) -> Signed[Commit]:
        """The commit of the round, with this node's share in all that it handed in unless something else is said."""
        return seal(
            self.node.identity,
            examples.commit(
                round=1,
                parent=parent or self.base.digest,
                plan=plan,
                leader=self.node.me,
                shares=dict.fromkeys((self.node.me,) if shares is None else shares, Share(tokens=8, steps=1)),
                updates={
                    name: examples.update(self.node.me, without=(self.node.me,) if name in without else ())
                    for name in changed
                },
            ),
        )

    def contents(self, head: Signed[Commit], last: HandedIn | None) -> tuple[dict[str, bytes], bool]:
        """The values behind the references, and whether the contribution counted."""
        paths, counted = references(last, head, self.node.me, self.node.store)
        return {name: path.read_bytes() for name, path in paths.items()}, counted


@pytest.fixture
def trained(identities: list[Identity], tmp_path: Path) -> Trained:
    return Trained(identities[0], tmp_path / "store")


BEFORE = {name: VALUES[name] for name in SNAPSHOT}


def test_a_node_that_has_handed_in_nothing_has_nothing_to_keep(trained: Trained) -> None:
    assert trained.contents(trained.base, None) == ({}, False)


def test_after_a_round_that_led_nowhere_everything_is_still_to_be_counted(trained: Trained) -> None:
    assert trained.contents(trained.base, trained.last) == (BEFORE, False)


def test_whoever_has_missed_a_commit_keeps_nothing(trained: Trained) -> None:
    later = trained.commit(parent=trained.commit().digest)
    assert trained.contents(later, trained.last) == ({}, False)
    elsewhere = trained.commit(parent=examples.digest("another chain"))
    assert trained.contents(elsewhere, trained.last) == ({}, False)


def test_a_contribution_that_did_not_count_is_still_to_be_counted(trained: Trained) -> None:
    late = trained.commit(shares=[examples.NODES[1]])
    assert trained.contents(late, trained.last) == (BEFORE, False)
    other_plan = trained.commit(plan=examples.digest("another plan"))
    assert trained.contents(other_plan, trained.last) == (BEFORE, False), "its share is one of other blocks"


def test_what_counted_is_measured_from_the_snapshot(trained: Trained) -> None:
    assert trained.contents(trained.commit(), trained.last) == (SNAPSHOT, True)


def test_each_shard_has_its_own_answer(trained: Trained) -> None:
    carried = trained.commit(changed=["embed"])
    assert trained.contents(carried, trained.last) == ({"embed": b"new!", EXPERT: b"old?"}, True)
    left_out = trained.commit(without=["embed"])
    assert trained.contents(left_out, trained.last) == ({"embed": b"old!", EXPERT: b"new?"}, True)


def test_the_files_are_there_when_the_next_round_begins(trained: Trained) -> None:
    """The state before and the round's snapshots outlive the adoption of its commit."""
    new = {**VALUES, "embed": b"mean"}
    head = trained.commit(changed=["embed"]).document.model_copy(update={"shards": examples.states(new, version=1)})
    commit = seal(trained.node.identity, head)
    trained.node.adopt(commit, new)
    assert trained.contents(commit, trained.last) == ({"embed": b"new!", EXPERT: b"old?"}, True)


# how much of its time a node trains


def test_utilisation_is_the_share_of_the_time_since_the_last_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr("swarm.progress.time.monotonic", lambda: next(clock))
    utilisation = Utilisation()
    assert utilisation.since_last(5.0) == 0.0, "nobody knows since when"
    assert utilisation.since_last(8.0) == utilisation.last == pytest.approx(0.8)
    assert utilisation.since_last(50.0) == utilisation.last == 1.0


def test_utilisation_is_a_share_when_no_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.progress.time.monotonic", lambda: 100.0)
    utilisation = Utilisation()
    assert [utilisation.since_last(seconds) for seconds in (0.0, 0.0, 1.0)] == [0.0, 0.0, 1.0]
