"""A state that is held stays whole, whatever the daemon that owns the store does meanwhile."""

import hashlib
import itertools
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from swarm.documents import seal
from swarm.held_state import HeldState, hold_head
from swarm.identity import Identity
from swarm.store import ShardStore
from tests import examples
from tests.examples import RUN

SHARDS = [f"layer.0.expert.{number}" for number in range(8)]


class Daemon:
    """Adopts one commit after the other; all values of a round are its number."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.store = ShardStore.open(folder, RUN)
        self._identity = identity
        self._numbers = itertools.count()

    def commit(self) -> None:
        number = next(self._numbers)
        values = {name: examples.floats(number, place) for place, name in enumerate(SHARDS)}
        for data in values.values():
            self.store.put(data)
        document = examples.commit(
            round=number, leader=self._identity.node_id, shards=examples.states(values, version=number)
        )
        self.store.adopt(seal(self._identity, document))


@pytest.fixture
def daemon(tmp_path: Path, identities: list[Identity]) -> Daemon:
    daemon = Daemon(tmp_path, identities[0])
    daemon.commit()
    return daemon


def assert_whole(state: HeldState) -> None:
    """All shards have the digests of the commit and the values of its round."""
    for place, name in enumerate(SHARDS):
        values = state.values(name)
        assert hashlib.sha256(values.tobytes()).hexdigest() == state.commit.document.shards[name].digest
        assert values.tolist() == [state.commit.document.round, place]


def test_it_outlives_the_commit(daemon: Daemon, tmp_path: Path) -> None:
    with hold_head(tmp_path, RUN) as state:
        mapped = state.values(SHARDS[0])
        for _ in range(4):
            daemon.commit()
        assert not daemon.store.has(state.commit.document.shards[SHARDS[0]].digest)
        assert_whole(state)
    assert mapped.tolist() == [0, 0], "what is mapped stays readable"
    assert not list((tmp_path / "exports").iterdir())


def test_objects_that_vanish_meanwhile_mean_a_newer_head(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, calls = os.link, itertools.count()

    def link_while_commits_go_on(source: Path, target: Path) -> None:
        if next(calls) in (3, 9):
            for _ in range(3):
                daemon.commit()
        link(source, target)

    monkeypatch.setattr("swarm.held_state.os.link", link_while_commits_go_on)
    with hold_head(tmp_path, RUN) as state:
        assert state.commit.document.round == 6
        assert_whole(state)


def test_commits_go_on_all_the_time(daemon: Daemon, tmp_path: Path) -> None:
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            daemon.commit()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        rounds = [0]
        while rounds[-1] < 5:
            with hold_head(tmp_path, RUN) as state:
                assert_whole(state)
                rounds.append(state.commit.document.round)
    finally:
        stop.set()
        thread.join()
    assert rounds == sorted(rounds)


def test_what_a_killed_reader_left_is_cleared_and_what_others_hold_is_not(daemon: Daemon, tmp_path: Path) -> None:
    left = tmp_path / "exports" / "left"
    left.mkdir(parents=True)
    (left / "object").touch()
    with hold_head(tmp_path, RUN) as first:
        assert not left.exists()
        with hold_head(tmp_path, RUN) as second:
            assert first.folder != second.folder
            assert_whole(first)
            assert_whole(second)
        assert_whole(first)


def test_a_reader_that_comes_while_another_ends_does_not_disturb_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree
    states = []

    def read_and_remove(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", rmtree)
            with hold_head(tmp_path, RUN) as state:
                assert_whole(state)
                states.append(state)
        rmtree(*arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", read_and_remove)
    with hold_head(tmp_path, RUN) as state:
        pass
    monkeypatch.undo()
    assert states and not state.folder.exists()


def test_many_read_at_once(daemon: Daemon, tmp_path: Path) -> None:
    def read(number: int) -> None:
        for _ in range(30):
            with hold_head(tmp_path, RUN) as state:
                assert_whole(state)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(4)))
    assert not list((tmp_path / "exports").glob("*"))


def test_a_reader_that_fails_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold_head(tmp_path, RUN):
        raise RuntimeError
    assert daemon.store.head is not None
    daemon.store.path(daemon.store.head.document.shards[SHARDS[5]].digest).unlink()
    with pytest.raises(UserError, match="damaged"), hold_head(tmp_path, RUN):
        pass
    assert not list((tmp_path / "exports").iterdir())


def test_a_file_system_without_links_and_a_store_without_state(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError, match="no complete state yet"), hold_head(tmp_path / "new", RUN):
        pass

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("swarm.held_state.os.link", refuse)
    with pytest.raises(UserError, match="cannot be held .operation not permitted"), hold_head(tmp_path, RUN):
        pass
