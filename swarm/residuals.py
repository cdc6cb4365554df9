"""What lossy encodings have rounded away, kept on the disk until it is sent with the next round: error feedback."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

Role = Literal["handed-in", "averaged"]
"""Whose rounding it was: an owner's of its contribution, or a reducer's of the average."""


class Residuals:
    """One fp32 file for each shard and role; a residual counts once the commit that sent the rest of it is adopted."""

    def __init__(self, folder: Path) -> None:
        """Keep them in `folder`, which is made if need be."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, role: Role, name: str) -> Path | None:
        """The residual of a shard; None when nothing was rounded away."""
        path = self._path(role, name)
        return path if path.exists() else None

    def replace(self, role: Role, name: str, new: Path) -> None:
        """Put the file `new` in the place of a shard's residual."""
        os.replace(new, self._path(role, name))

    def keep_only(self, role: Role, names: Collection[str]) -> None:
        """Forget the residuals of all other shards: this node does not train or average them any more."""
        for path in self._folder.glob(f"{role}.*"):
            if path.name.removeprefix(f"{role}.") not in names:
                path.unlink()

    def _path(self, role: Role, name: str) -> Path:
        return self._folder / f"{role}.{name}"
