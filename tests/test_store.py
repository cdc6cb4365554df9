"""The shard store: whatever happens, what is in it is whole, and it opens at the last complete commit."""

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from model.errors import UserError
from swarm.documents import Commit, Signed, digest_of, seal
from swarm.identity import Identity
from swarm.store import SPARE_BYTES, ShardStore
from tests import examples
from tests.examples import RUN

VALUES = np.arange(100, dtype="<f4")


def commit(identity: Identity, number: int, shards: dict[str, bytes]) -> Signed[Commit]:
    document = examples.commit(round=number, leader=identity.node_id, shards=examples.states(shards, version=number))
    return seal(identity, document)


def adopt(store: ShardStore, identity: Identity, number: int, **shards: bytes) -> Signed[Commit]:
    for data in shards.values():
        store.put(data)
    signed = commit(identity, number, shards)
    store.adopt(signed)
    return signed


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore.open(tmp_path / "run", RUN)


@pytest.fixture
def me(identities: list[Identity]) -> Identity:
    return identities[0]


# one object


def test_an_object_appears_when_it_is_finished(store: ShardStore) -> None:
    digest = digest_of(b"abcdef")
    with store.writer(digest, 6) as writer:
        writer.write(b"abc")
        assert writer.missing == 3
        writer.write(b"def")
        assert not store.has(digest) and store.find(digest) is None
        writer.finish()
    assert store.has(digest) and store.path(digest).read_bytes() == b"abcdef"
    assert files(store.folder) == {f"objects/{digest[:2]}/{digest}"}


def test_wrong_bytes_leave_nothing(store: ShardStore) -> None:
    with pytest.raises(ValueError, match="do not match the digest"), store.writer(digest_of(b"right"), 5) as writer:
        writer.write(b"wrong")
        writer.finish()
    assert not files(store.folder)


def test_too_few_bytes_leave_nothing(store: ShardStore) -> None:
    with pytest.raises(ValueError, match="do not match"), store.writer(digest_of(b"righ"), 5) as writer:
        writer.write(b"righ")
        writer.finish()
    assert not files(store.folder)


def test_too_many_bytes_are_refused_before_they_are_written(store: ShardStore) -> None:
    with pytest.raises(ValueError, match="more than 5 bytes"), store.writer(digest_of(b"right!"), 5) as writer:
        writer.write(b"right!")
    assert not files(store.folder)


def test_an_interrupted_write_leaves_nothing(store: ShardStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.writer(digest_of(b"right"), 5) as writer:
        writer.write(b"rig")
        raise KeyboardInterrupt
    assert not files(store.folder)


def test_two_writers_of_one_object_do_not_disturb_each_other(store: ShardStore) -> None:
    digest = digest_of(b"both")
    with store.writer(digest, 4) as first, store.writer(digest, 4) as second:
        first.write(b"bo")
        second.write(b"both")
        second.finish()
        first.write(b"th")
        first.finish()
    assert store.path(digest).read_bytes() == b"both"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "../../HEAD", "/etc/passwd", "AB" * 32, "ab" * 32 + "\n", "ab" * 31]
)
def test_only_digests_are_found(store: ShardStore, name: str) -> None:
    (store.folder / "HEAD").write_text("secret")
    store.scratch(1)
    assert store.find(name) is None


def test_objects_are_found_in_the_state_and_in_the_scratch(store: ShardStore) -> None:
    state = store.put(b"state")
    with store.scratch_writer(3, digest_of(b"result"), 6) as writer:
        writer.write(b"result")
        writer.finish()
    result = digest_of(b"result")
    assert store.find(state) == store.path(state)
    assert store.find(result) == store.scratch(3) / result and not store.has(result)
    assert store.find(digest_of(b"nothing")) is None


def test_a_result_is_taken_in_without_a_copy(store: ShardStore) -> None:
    digest = digest_of(b"result")
    scratch = store.scratch(3) / digest
    scratch.write_bytes(b"result")
    store.take_in(scratch)
    store.take_in(scratch)
    assert store.path(digest).samefile(scratch) and store.path(digest).read_bytes() == b"result"


def test_what_is_no_part_of_the_state_can_be_discarded(store: ShardStore, me: Identity) -> None:
    adopt(store, me, 0, embed=b"state")
    poison = store.put(b"poison")
    for digest in (poison, digest_of(b"state"), digest_of(b"nothing")):
        store.discard(digest)
    assert store.find(poison) is None and not store.has(poison)
    assert store.has(digest_of(b"state")), "whoever names it in a lie must not make this node lose it"


# commits


def test_what_is_adopted_is_there_after_opening_again(store: ShardStore, me: Identity) -> None:
    assert store.head is None
    data = VALUES.tobytes()
    signed = adopt(store, me, 0, embed=data)
    again = ShardStore.open(store.folder, RUN)
    assert again.head == signed
    assert again.commit_wire(0) == signed.wire and again.commit_wire(1) is None
    assert np.array_equal(again.values("embed"), VALUES)
    assert not again.values("embed").flags.writeable


def test_the_last_two_commits_keep_their_objects(store: ShardStore, me: Identity) -> None:
    kept = store.put(b"in every commit")
    for number in range(5):
        adopt(store, me, number, embed=b"in every commit", head=b"round %d" % number)
        store.scratch(number + 1)
    objects = {path.name for path in store.folder.glob("objects/*/*")}
    assert objects == {kept, digest_of(b"round 3"), digest_of(b"round 4")}
    assert {path.name for path in (store.folder / "scratch").iterdir()} == {"3", "4", "5"}


def test_a_write_in_progress_survives_the_collection(store: ShardStore, me: Identity) -> None:
    digest = digest_of(b"next")
    with store.writer(digest, 4) as writer:
        writer.write(b"ne")
        adopt(store, me, 0, embed=b"now")
        writer.write(b"xt")
        writer.finish()
    assert store.has(digest)


def test_leftovers_of_a_killed_daemon_are_removed(store: ShardStore, me: Identity) -> None:
    signed = adopt(store, me, 0, embed=b"state")
    whole = files(store.folder)
    digest = digest_of(b"half")
    store.path(digest).parent.mkdir(exist_ok=True)
    for leftover in (
        store.path(digest).with_name(f".{digest}.123.456.part"),
        store.folder / "commits" / ".1.123.new",
        store.folder / ".HEAD.123.new",
        store.scratch(1) / digest,
        store.scratch(1) / ".embed.part",
    ):
        leftover.write_bytes(b"ha")
    again = ShardStore.open(store.folder, RUN)
    assert again.head == signed and files(again.folder) == whole


def test_a_commit_whose_head_was_not_moved_does_not_count(store: ShardStore, me: Identity) -> None:
    signed = adopt(store, me, 0, embed=b"state")
    (store.folder / "commits" / "1").write_bytes(commit(me, 1, {"embed": b"lost"}).wire)
    assert ShardStore.open(store.folder, RUN).head == signed


def test_reading_leaves_a_running_daemons_files_alone(store: ShardStore, me: Identity) -> None:
    signed = adopt(store, me, 0, embed=b"state")
    (store.scratch(1) / digest_of(b"result")).write_bytes(b"result")
    (store.folder / "objects" / ".x.part").write_bytes(b"")
    before = files(store.folder)
    assert ShardStore.read_only(store.folder, RUN).head == signed
    assert files(store.folder) == before


# damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("object gone", "1 shards of the last commit are gone, embed first"),
        ("commit gone", "HEAD names a commit that is not there"),
        ("other commit", "HEAD names a commit that is not there"),
        ("commit cut", "not an envelope"),
        ("commit empty", "not an envelope"),
        ("HEAD empty", ""),
        ("HEAD nonsense", ""),
        ("HEAD binary", ""),
    ],
)
def test_a_damaged_store_says_so_in_one_line(store: ShardStore, me: Identity, damage: str, said: str) -> None:
    signed = adopt(store, me, 0, embed=b"state")
    path = store.folder / "commits" / "0"
    match damage:
        case "object gone":
            store.path(digest_of(b"state")).unlink()
        case "commit gone":
            path.unlink()
        case "other commit":
            path.write_bytes(commit(me, 0, {"head": b"state"}).wire)
        case "commit cut":
            path.write_bytes(signed.wire[:-1])
        case "commit empty":
            path.write_bytes(b"")
        case "HEAD empty":
            (store.folder / "HEAD").write_bytes(b"")
        case "HEAD nonsense":
            (store.folder / "HEAD").write_bytes(b"one two")
        case "HEAD binary":
            (store.folder / "HEAD").write_bytes(b"\xff\xfe\n")
    for opens in (ShardStore.open, ShardStore.read_only):
        with pytest.raises(UserError, match=r"the shard store is damaged.*Move it away") as refusal:
            opens(store.folder, RUN)
        assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_store_of_another_run_is_refused(store: ShardStore, me: Identity) -> None:
    adopt(store, me, 0, embed=b"state")
    with pytest.raises(UserError, match="another run"):
        ShardStore.open(store.folder, "cd" * 32)


def test_a_full_disk_is_known_before_anything_is_fetched(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, SPARE_BYTES + 1000))
    store.require_space(1000)
    with pytest.raises(UserError, match=r"0\.07 GB are needed and 0\.07 GB are free.*--home"):
        store.require_space(1001)
