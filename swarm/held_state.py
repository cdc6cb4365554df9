"""A committed state that stays readable while a daemon goes on, commits new rounds and deletes what is old.

exports/<name>/        hard links to the objects of one commit; locked as long as its reader lives
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.errors import UserError
from model.temporary_folder import temporary_folder
from swarm.documents import Commit, Signed
from swarm.store import damaged, map_values, object_path, read_head


@dataclass(frozen=True, slots=True)
class HeldState:
    """One commit and links to all of its objects."""

    commit: Signed[Commit]
    folder: Path

    def values(self, name: str) -> np.ndarray:
        """Committed values of a shard, fp32 [numel], memory-mapped read-only."""
        return map_values(self.folder / self.commit.document.shards[name].digest)


@contextlib.contextmanager
def hold_head(store: Path, run_id: str) -> Iterator[HeldState]:
    """Hold the last complete commit of the shard store in the folder `store`, which a daemon may be using.

    No bytes are copied. What a reader that was killed has left is cleared away first. Raises UserError when the store
    has no complete state, is damaged, or does not let this user make links.
    """
    exports = store / "exports"
    with contextlib.ExitStack() as held:
        try:
            exports.mkdir(exist_ok=True, mode=0o700)
            folder = held.enter_context(temporary_folder(exports))
            commit = _link_head(store, run_id, folder)
        except OSError as error:
            raise UserError(
                f"{exports}: the state cannot be held ({(error.strerror or str(error)).lower()}): run this as the user "
                "of the node, on a file system with hard links"
            ) from None
        yield HeldState(commit, folder)


def _link_head(store: Path, run_id: str, folder: Path) -> Signed[Commit]:
    """Link every object of the head into `folder`; starts again when the head moves on and takes objects with it."""
    while True:
        commit = read_head(store, run_id)
        if commit is None:
            raise UserError(f"{store} has no complete state yet. Let the node finish its first synchronisation")
        try:
            for digest in {shard.digest for shard in commit.document.shards.values()}:
                with contextlib.suppress(FileExistsError):  # of an earlier try, or two shards with the same values
                    os.link(object_path(store, digest), folder / digest)
        except FileNotFoundError:
            newer = read_head(store, run_id)
            if newer is not None and newer.digest != commit.digest:
                continue
            raise damaged(store, "an object of the last commit is gone") from None
        return commit
