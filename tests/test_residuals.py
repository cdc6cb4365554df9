"""What encodings have rounded away stays on the disk until something newer takes its place."""

from pathlib import Path

import pytest

from swarm.residuals import Residuals


@pytest.fixture
def residuals(tmp_path: Path) -> Residuals:
    return Residuals(tmp_path / "run" / "residuals")


def written(folder: Path, text: str) -> Path:
    path = folder / "new"
    path.write_text(text)
    return path


def test_nothing_is_rounded_away_at_first(residuals: Residuals) -> None:
    assert residuals.find("handed-in", "embed") is None


def test_the_newer_one_counts_and_is_there_after_a_restart(residuals: Residuals, tmp_path: Path) -> None:
    for text in ("old", "new"):
        residuals.replace("averaged", "embed", written(tmp_path, text))
    assert not (tmp_path / "new").exists(), "it was moved, not copied"
    found = Residuals(tmp_path / "run" / "residuals").find("averaged", "embed")
    assert found is not None and found.read_text() == "new"


def test_an_owners_rounding_is_not_a_reducers(residuals: Residuals, tmp_path: Path) -> None:
    residuals.replace("averaged", "embed", written(tmp_path, "average"))
    assert residuals.find("handed-in", "embed") is None
    residuals.replace("handed-in", "embed", written(tmp_path, "contribution"))
    residuals.keep_only("handed-in", [])
    found = residuals.find("averaged", "embed")
    assert residuals.find("handed-in", "embed") is None
    assert found is not None and found.read_text() == "average"


def test_shards_whose_names_begin_alike_are_told_apart(residuals: Residuals, tmp_path: Path) -> None:
    names = ["layer.1.expert.1", "layer.1.expert.12", "layer.11.expert.1"]
    for name in names:
        residuals.replace("handed-in", name, written(tmp_path, name))
    residuals.keep_only("handed-in", {names[0], "head"})
    assert [residuals.find("handed-in", name) is not None for name in names] == [True, False, False]
