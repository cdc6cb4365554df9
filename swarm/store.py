"""The shard store: the committed state of the model on this node's disk.

    objects/ab/<sha256>    one file per shard version, raw little-endian fp32, named by its content
    commits/<round>        the signed commits
    HEAD                   digest of the last commit whose shards are all here
    scratch/<round>/       contributions and results of a round in progress; never part of the state

A file becomes visible by a rename after its bytes are on the disk; HEAD moves last.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from model.errors import UserError
from swarm.documents import Commit, Signed, open_document
from swarm.manifest import Manifest

KEPT_COMMITS = 2
"""Commits whose shards stay on the disk: peers that are a round behind still fetch the one before."""
SPARE_BYTES = 64 << 20
"""Left free beside what is known to be needed: documents, logs, the system's own."""
_BUFFER = 1 << 20


def run_folder(home: Path, manifest: Signed[Manifest]) -> Path:
    """Where a node keeps a run."""
    return home / "runs" / f"{manifest.document.name}-{manifest.digest[:12]}"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file so that after a crash either the old or the new content is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_values(path: Path) -> np.ndarray:
    """The values of a shard file, fp32 [numel], memory-mapped read-only."""
    return np.memmap(path, dtype="<f4", mode="r")


class ObjectWriter:
    """Receives one object and puts it into the store if, and only if, its digest is right."""

    def __init__(self, final: Path, digest: str, size: int, *, durable: bool, place: Callable[[Path], None]) -> None:
        self._final = final
        self._place = place
        self._digest = digest
        self._size = size
        self._durable = durable
        self._temporary = final.with_name(f".{digest}.{os.getpid()}.{id(self)}.part")

    def __enter__(self) -> Self:
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary, "wb", buffering=_BUFFER)
        self._hash = hashlib.sha256()
        self.missing = self._size
        return self

    def write(self, chunk: bytes) -> None:
        """Take the next bytes. Raises ValueError when they are more than the object's size."""
        self.missing -= len(chunk)
        if self.missing < 0:
            raise ValueError(f"{self._digest[:12]}: more than {self._size} bytes")
        self._hash.update(chunk)
        self._file.write(chunk)

    def finish(self) -> None:
        """Check size and digest and give the object its name. Raises ValueError when they are wrong."""
        if self.missing or self._hash.hexdigest() != self._digest:
            raise ValueError(f"{self._digest[:12]}: the bytes do not match the digest")
        self._file.flush()
        if self._durable:
            os.fsync(self._file.fileno())
        os.replace(self._temporary, self._final)
        self._place(self._final)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # closing flushes, and on a full disk that fails a second time; the first error is the one to tell
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardStore:
    """The committed state of one run on one node."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        self.head: Signed[Commit] | None = None
        self._places: dict[str, Path] = {}
        """Where each object is: rounds ask for hundreds of them, again and again."""
        for name in ("objects", "commits", "scratch"):
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def read_only(cls, folder: Path, run_id: str) -> Self:
        """Open the store at its last complete commit, which a daemon may be using at the same time."""
        store = cls(folder, run_id)
        store._load_head()
        return store

    @classmethod
    def open(cls, folder: Path, run_id: str) -> Self:
        """Open the store at its last complete commit; `head` is None in a new one.

        Leftovers of an interrupted write are removed. Raises UserError when the store is damaged.
        """
        store = cls(folder, run_id)
        for unfinished in ("objects/*/.*.part", "commits/.*.new", ".HEAD.*.new"):
            for path in folder.glob(unfinished):
                path.unlink()
        shutil.rmtree(folder / "scratch")
        (folder / "scratch").mkdir(mode=0o700)
        store._load_head()
        for path in folder.glob("objects/*/*"):
            store.place(path)
        return store

    def _load_head(self) -> None:
        head = self.folder / "HEAD"
        if not head.exists():
            return
        try:
            digest, number = head.read_text().split()
            self.head = self._read_commit(int(number))
            if self.head is None or self.head.digest != digest:
                raise ValueError("HEAD names a commit that is not there")
            lost = [name for name, shard in self.head.document.shards.items() if not self.has(shard.digest)]
            if lost:
                raise ValueError(f"{len(lost)} shards of the last commit are gone, {lost[0]} first")
        except ValueError as error:
            raise UserError(
                f"{self.folder}: the shard store is damaged ({error}). Move it away; it is fetched again"
            ) from None

    def _read_commit(self, number: int) -> Signed[Commit] | None:
        path = self.folder / "commits" / str(number)
        if not path.exists():
            return None
        signed = open_document(path.read_bytes(), self.run_id)
        if not isinstance(signed.document, Commit):
            raise ValueError(f"{path} holds a {signed.document.kind}")
        return Signed(signed.document, signed.signer, signed.digest, signed.wire)

    def require_space(self, size: int) -> None:
        """Raise UserError when the disk has not `size` bytes and a little more."""
        free = shutil.disk_usage(self.folder).free
        if free < size + SPARE_BYTES:
            raise UserError(
                f"{self.folder}: {(size + SPARE_BYTES) / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free. "
                "Free some space, or choose another disk: --home DIR"
            )

    def commit_wire(self, number: int) -> bytes | None:
        """The envelope of a commit this node has adopted, if it still has it."""
        path = self.folder / "commits" / str(number)
        return path.read_bytes() if path.exists() else None

    def path(self, digest: str) -> Path:
        """Where the object with this digest is, or would be."""
        return self.folder / "objects" / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the object is here; content was checked when it was written."""
        return self.path(digest).exists()

    def writer(self, digest: str, size: int) -> ObjectWriter:
        """A writer for one object of `size` bytes of the state; it is on the disk when it has its name."""
        return ObjectWriter(self.path(digest), digest, size, durable=True, place=self.place)

    def scratch_writer(self, number: int, digest: str, size: int) -> ObjectWriter:
        """A writer for one object that is needed in this round only; it need not survive a power cut."""
        path = self.scratch(number) / digest
        return ObjectWriter(path, digest, size, durable=False, place=self.place)

    def place(self, path: Path) -> None:
        """Note an object that has just been written, here or by the trainer; its name is its digest."""
        self._places[path.name] = path

    def find(self, digest: str) -> Path | None:
        """Where an object is, committed or not; None when it is not here."""
        return self._places.get(digest)

    def discard(self, digest: str) -> None:
        """Remove an object that must not become part of the state."""
        if (path := self._places.pop(digest, None)) is not None:
            path.unlink()

    def put(self, data: bytes | memoryview) -> str:
        """Store bytes; returns their digest."""
        digest = hashlib.sha256(data).hexdigest()
        with self.writer(digest, len(data)) as writer:
            writer.write(bytes(data))
            writer.finish()
        return digest

    def take_in(self, path: Path) -> None:
        """Make a scratch object part of the state; no bytes are copied, its digest was checked when it was written."""
        final = self.path(path.name)
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(path, final)
        self.place(final)

    def scratch(self, number: int) -> Path:
        """Folder for contributions and results of a round; its files are named by their digest."""
        folder = self.folder / "scratch" / str(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def values(self, name: str) -> np.ndarray:
        """Committed values of a shard, fp32 [numel], memory-mapped read-only."""
        assert self.head is not None
        return map_values(self.path(self.head.document.shards[name].digest))

    def adopt(self, commit: Signed[Commit]) -> None:
        """Make `commit` the head; all its objects must be here. Older objects and scratch folders are removed."""
        shards = commit.document.shards.values()
        for folder in {self.path(shard.digest).parent for shard in shards}:
            sync_folder(folder)
        write_durably(self.folder / "commits" / str(commit.document.round), commit.wire)
        write_durably(self.folder / "HEAD", f"{commit.digest} {commit.document.round}\n".encode())
        self.head = commit
        self._collect()

    def _collect(self) -> None:
        """Remove objects that no kept commit names, and the scratch of finished rounds."""
        assert self.head is not None
        number = self.head.document.round
        kept: set[str] = set()
        for past in range(max(0, number - KEPT_COMMITS + 1), number + 1):
            commit = self._read_commit(past)
            kept |= {shard.digest for shard in commit.document.shards.values()} if commit is not None else set()
        for path in self.folder.glob("objects/*/*"):
            if path.name not in kept and not path.name.startswith("."):
                path.unlink()
        for folder in (self.folder / "scratch").iterdir():
            if int(folder.name) < number:
                shutil.rmtree(folder)
        self._places = {digest: path for digest, path in list(self._places.items()) if path.exists()}
