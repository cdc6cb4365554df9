"""A checkpoint folder appears complete or not at all, wherever it is; what a killed writer leaves is cleared away."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint_writer import CheckpointWriter
from model.errors import UserError


def write(folder: Path) -> None:
    with CheckpointWriter(folder, file_bytes=1) as writer:
        (writer.partial / "config.json").write_text("{}")
        writer.add("a", torch.ones(2))
        writer.add("b", torch.ones(2))


def assert_complete(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as refusal:
        write(folder)
    message = str(refusal.value)
    assert message.startswith(f"{folder} ") and message.endswith("another folder with -o") and "\n" not in message
    return message


def test_a_file_ends_before_it_is_too_large(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((10,), float(number)) for number in range(7)} | {"large": torch.ones(100)}
    with CheckpointWriter(tmp_path / "out", file_bytes=100) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    assert index["metadata"]["total_size"] == 4 * 170
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])


def test_tensors_that_share_memory_and_other_dtypes_are_written(tmp_path: Path) -> None:
    both = torch.arange(8.0).reshape(2, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("first", both[:, :2])
        writer.add("second", both)
        writer.add("half", both.bfloat16())
        both.zero_()  # callers go on with their buffers
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["first"].tolist() == [[0, 1], [4, 5]] and stored["second"].tolist()[1] == [4, 5, 6, 7]
    assert stored["half"].dtype == torch.bfloat16


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="midway"), CheckpointWriter(tmp_path / "out", file_bytes=1) as writer:
        writer.add("a", torch.ones(2))
        writer.add("b", torch.ones(2))
        assert not (tmp_path / "out").exists()
        raise RuntimeError("midway")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="choose another folder"), CheckpointWriter(place):
            pass


@pytest.mark.parametrize("place", ["link", "dangling", ".", "sub/..", "sub/../new", "sub/../sub"])
def test_every_name_of_an_empty_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if place == "link":
        (tmp_path / "elsewhere").mkdir()
    if place in ("link", "dangling"):
        Path(place).symlink_to("../elsewhere")
    if place in ("sub/../new", "sub/../sub"):
        Path("sub").mkdir()
    write(Path(place))
    assert_complete(Path(os.path.realpath(place)))
    assert not list(tmp_path.rglob(".*"))


def test_an_empty_folder_stays_the_folder_that_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a mount point, which cannot be replaced and whose parent is of another file system."""
    (tmp_path / "out").mkdir()
    before = (tmp_path / "out").stat()
    moved = []

    def record(source: Path, target: Path) -> None:
        assert source.is_relative_to(tmp_path / "out") and target.is_relative_to(tmp_path / "out")
        moved.append(target)
        os.replace(source, target)

    monkeypatch.setattr("model.checkpoint_writer.os.rename", record)
    write(tmp_path / "out")
    assert_complete(tmp_path / "out")
    assert (tmp_path / "out").stat().st_ino == before.st_ino
    assert moved[-1].name == "config.json", "without it, nobody takes the folder for complete"


def test_what_cannot_be_written_is_found_on_entering(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in ("file", "file/below", "loop", "x" * 300, "."):
        with pytest.raises(UserError, match="choose another folder with -o"), CheckpointWriter(tmp_path / place):
            pytest.fail(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


@pytest.mark.parametrize("exists", [False, True])
def test_what_takes_the_name_meanwhile_is_left_alone(tmp_path: Path, *, exists: bool) -> None:
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(UserError, match="another folder with -o"), CheckpointWriter(out) as writer:
        writer.add("a", torch.ones(2))
        out.mkdir(exist_ok=True)
        (out / "mine").touch()
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_move_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()

    def fail(source: Path, target: Path) -> None:
        if target == tmp_path / "out" / "config.json":
            raise OSError(errno.EIO, "Input/output error")
        os.replace(source, target)

    monkeypatch.setattr("model.checkpoint_writer.os.rename", fail)
    assert "input/output error" in refused(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_full_disk_and_a_broken_source_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="out cannot be written .no space.*: free some space"), CheckpointWriter(out):
        raise OSError(errno.ENOSPC, "No space left on device")  # has no file name
    with pytest.raises(UserError, match="out cannot be written .no such"), CheckpointWriter(out) as writer:
        (writer.partial / "gone" / "file").touch()
    with pytest.raises(FileNotFoundError), CheckpointWriter(out):
        (tmp_path / "source").read_bytes()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_writer_left_is_cleared_and_a_living_one_goes_on(tmp_path: Path, *, exists: bool) -> None:
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(RuntimeError), CheckpointWriter(out) as writer:
        place = writer.partial.parent
        raise RuntimeError
    left = [place.with_name(place.name + "1"), tmp_path / (place.name + "2")]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "half").touch()
    foreign = tmp_path / ".out.backup"
    foreign.mkdir()
    with CheckpointWriter(out) as first:
        assert not any(folder.exists() for folder in left) and foreign.exists()
        if exists:
            assert "not empty" in refused(out)
        else:
            write(out)
            assert_complete(out)
            os.rename(out, tmp_path / "kept")
        assert first.partial.exists()
        first.add("a", torch.ones(2))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
