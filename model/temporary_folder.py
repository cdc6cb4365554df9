"""Temporary folders that tell whether their maker lives: it holds a lock on each, which ends with its process."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}
"""What file systems without such locks answer. Nobody can lock anything there, so nothing is cleared away either."""


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """A new folder in `parent`, removed in the end; abandoned ones are cleared away first. Raises OSError."""
    clear_abandoned(parent, prefix)
    folder, descriptor = _make(parent, prefix)
    try:
        yield folder
    finally:
        # Under the lock, so nobody else removes it. What cannot be removed now is cleared away the next time.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        folder = Path(mkdtemp(prefix=prefix, dir=parent))
        try:
            descriptor = _open(folder)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                folder.rmdir()
                raise
        if folder.is_dir():
            return folder, descriptor
        # Without a lock it was taken for abandoned. Another one, then.
        os.close(descriptor)


def clear_abandoned(parent: Path, prefix: str = "") -> None:
    """Remove the folders in `parent` whose name begins with `prefix` and whose maker is gone."""
    for folder in [entry for entry in _entries(parent) if entry.name.startswith(prefix)]:
        # Gone meanwhile, no folder, in use, or somebody else's.
        with contextlib.suppress(OSError):
            descriptor = _open(folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _entries(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except OSError:  # one can write into a folder that one cannot list
        return []


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
