"""The log of a daemon: what it keeps, and how it is read."""

import logging
from itertools import islice
from pathlib import Path

import pytest

from model.errors import UserError
from node import log_files
from node.console import Console
from node.log_files import kept_log, log_file, read_log


def test_what_is_printed_and_what_is_warned_of_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kept_log(tmp_path):
        Console().say("round 1 of 100 %")
        logging.getLogger("swarm.board").warning("something %s", "odd")
        logging.getLogger("swarm.board").debug("too much")
        first, second = read_log(tmp_path, 50, follow=False)
        assert first.endswith("INFO spes.console: round 1 of 100 %") and second.endswith(
            "WARN swarm.board: something odd"
        )
        assert log_file(tmp_path).parent.stat().st_mode & 0o077 == 0, "the log is for its owner alone"
        assert capsys.readouterr().out == "round 1 of 100 %\n"


def test_the_last_lines_are_read_over_several_files_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 500)
    with kept_log(tmp_path):
        for number in range(200):
            Console().say(f"line {number}")
        assert [line.rpartition(" ")[2] for line in read_log(tmp_path, 15, follow=False)] == [
            *map(str, range(185, 200))
        ]
        assert len([*log_file(tmp_path).parent.iterdir()]) == log_files.KEPT + 1


def test_what_comes_is_followed_into_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(log_files, "MOST_BYTES", 200)
    with kept_log(tmp_path):
        Console().say("before")
        following = read_log(tmp_path, 1, follow=True)
        assert next(following).endswith("before")
        for number in range(12):
            Console().say(f"line {number}")
            assert next(following).endswith(f"line {number}")


def test_where_no_node_was_there_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no node has written a log in .*--home DIR"):
        [*islice(read_log(tmp_path, 1, follow=False), 1)]
