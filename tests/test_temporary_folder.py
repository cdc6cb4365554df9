"""A temporary folder is cleared away when its maker is gone, and never before."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model import temporary_folder as module
from model.temporary_folder import clear_abandoned, temporary_folder


def test_only_folders_of_the_prefix_without_a_maker_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("kept", "left"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "left-file").touch()
    (tmp_path / "left-link").symlink_to("kept")
    with temporary_folder(tmp_path, "left") as first, temporary_folder(tmp_path, "left") as second:
        assert {path.name for path in tmp_path.iterdir()} == {
            "kept", "left-file", "left-link", first.name, second.name,
        }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "left-file", "left-link"}
    assert (tmp_path / "kept" / "file").exists()


def test_what_vanishes_while_it_is_looked_at_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left").mkdir()
    opened = os.open

    def too_late(path: Path, flags: int) -> int:
        path.rmdir()
        return opened(path, flags)

    monkeypatch.setattr("model.temporary_folder.os.open", too_late)
    clear_abandoned(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir()), "no file has taken its place"


@pytest.mark.parametrize("moment", ["_open", "fcntl.flock"])
def test_one_that_is_cleared_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    original: Callable[..., object] = fcntl.flock if moment == "fcntl.flock" else module._open
    cleared: list[Path] = []

    def clear_first(*arguments: Any) -> object:
        if not cleared:
            cleared.extend(tmp_path.iterdir())
            shutil.rmtree(cleared[0])
        return original(*arguments)

    monkeypatch.setattr(f"model.temporary_folder.{moment}", clear_first)
    with temporary_folder(tmp_path) as folder:
        assert cleared and folder.is_dir() and folder != cleared[0]
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("model.temporary_folder.fcntl.flock", refuse)
    with temporary_folder(tmp_path) as first, temporary_folder(tmp_path) as second:
        assert first.is_dir() and second.is_dir()
    assert not list(tmp_path.iterdir())
