"""The shard store: the committed state of the model on this node's disk.

    objects/ab/<sha256>    one file per shard version, raw little-endian fp32, named by its content
    commits/<round>        the signed commits
    HEAD                   digest of the last commit whose shards are all here
    residuals/             what encodings have rounded away, see `swarm.residuals`
    scratch/<round>/       contributions and results of a round in progress; never part of the state
    exports/               links to objects that a reader holds, see `swarm.held_state`

A file becomes visible by a rename after its bytes are on the disk; HEAD moves last.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from model.errors import UserError
from swarm.documents import Commit, Signed, open_document
from swarm.manifest import Manifest

KEPT_COMMITS = 2
"""Commits whose shards stay on the disk: peers that are a round behind still fetch the one before."""
SPARE_BYTES = 64 << 20
"""Left free beside what is known to be needed: documents, logs, the system's own."""
INHERITED = "inherited"
"""Scratch folder of what was taken over from nodes that left."""
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


def object_path(folder: Path, digest: str) -> Path:
    """Where the store in `folder` has the object with this digest, or would have it."""
    return folder / "objects" / digest[:2] / digest


def read_commit(folder: Path, run_id: str, number: int) -> Signed[Commit] | None:
    """A commit that the store in `folder` has adopted, if it is still there. Raises ValueError when it is damaged."""
    path = folder / "commits" / str(number)
    if not path.exists():
        return None
    signed = open_document(path.read_bytes(), run_id)
    if not isinstance(signed.document, Commit):
        raise ValueError(f"{path} holds a {signed.document.kind}")
    return Signed(signed.document, signed.signer, signed.digest, signed.wire)


def read_head(folder: Path, run_id: str) -> Signed[Commit] | None:
    """The last complete commit of the store in `folder`; None when there is none yet. Raises UserError when the store
    is damaged; whether the objects are there is not looked at."""
    head = folder / "HEAD"
    if not head.exists():
        return None
    try:
        digest, number = head.read_text().split()
        commit = read_commit(folder, run_id, int(number))
        if commit is None or commit.digest != digest:
            raise ValueError("HEAD names a commit that is not there")
        return commit
    except ValueError as error:
        raise damaged(folder, str(error)) from None


def damaged(folder: Path, reason: str) -> UserError:
    """What to tell about a store that cannot be used."""
    return UserError(f"{folder}: the shard store is damaged ({reason}). Move it away; it is fetched again")


def map_values(path: Path) -> np.ndarray:
    """The values of a shard file, fp32 [numel], memory-mapped read-only."""
    return np.memmap(path, dtype="<f4", mode="r")


class HashingFile:
    """A file that knows the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        """Append bytes."""
        self._hash.update(chunk)
        self._file.write(chunk)

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes so far, hexadecimal."""
        return self._hash.hexdigest()


class ObjectWriter:
    """Receives one object, in any order, and puts it into the store if, and only if, its digest is right."""

    def __init__(self, final: Path, digest: str, size: int, *, durable: bool, place: Callable[[Path], None]) -> None:
        self.final = final
        """Where the object is once it is finished."""
        self.gaps = [(0, size)] if size else []
        """What is missing: from and to, in order."""
        self._place = place
        self._digest = digest
        self._size = size
        self._durable = durable
        self._temporary = final.with_name(f".{digest}.{os.getpid()}.{id(self)}.part")
        self._file: BinaryIO | None = None

    @property
    def missing(self) -> int:
        """Bytes that have not come yet."""
        return sum(end - start for start, end in self.gaps)

    def open(self) -> None:
        """Begin, with nothing received; what was received before is thrown away."""
        self.close()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary, "wb", buffering=_BUFFER)  # noqa: SIM115 - `close` closes it
        self._position = 0
        self.gaps = [(0, self._size)] if self._size else []
        self._start_hash()

    def _start_hash(self) -> None:
        self._hash = hashlib.sha256()
        self._hashed = 0
        """The hash covers the bytes before this one."""

    def write(self, chunk: bytes) -> None:
        """Take the first bytes that are missing. Raises ValueError when they are more than that."""
        self.write_at(self.gaps[0][0] if self.gaps else self._size, chunk)

    def write_at(self, offset: int, chunk: bytes) -> None:
        """Take the bytes from `offset` on. Raises ValueError when they are not missing."""
        end = offset + len(chunk)
        if end > self._size:
            raise ValueError(f"{self._digest[:12]}: more than {self._size} bytes")
        self._close_gap(offset, end)
        assert self._file is not None
        if offset != self._position:
            self._file.seek(offset)
        self._file.write(chunk)
        self._position = end
        if offset == self._hashed:
            self._hash.update(chunk)
            self._hashed = end

    def _close_gap(self, start: int, end: int) -> None:
        for index, (first, last) in enumerate(self.gaps):
            if first <= start and end <= last:
                self.gaps[index : index + 1] = [gap for gap in ((first, start), (end, last)) if gap[0] < gap[1]]
                return
        raise ValueError(f"{self._digest[:12]}: bytes {start} to {end} are here already")

    def forget(self, start: int, end: int) -> None:
        """Count received bytes as missing again: they are not trusted any more."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.gaps, (start, end)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            elif first < last:
                merged.append((first, last))
        self.gaps = merged
        if start < self._hashed:
            self._start_hash()

    def set_aside(self) -> Path:
        """Close the file with its wrong bytes and give it another name, which is returned; `open` begins again."""
        assert self._file is not None
        self._file.close()
        aside = self._temporary.with_suffix(".wrong.part")
        os.replace(self._temporary, aside)
        return aside

    def finish(self) -> None:
        """Check size and digest and give the object its name. Raises ValueError when they are wrong."""
        if self.gaps:
            raise ValueError(f"{self._digest[:12]}: the bytes do not match the digest, some are missing")
        assert self._file is not None
        self._file.flush()
        self._hash_rest()
        if self._hash.hexdigest() != self._digest:
            raise ValueError(f"{self._digest[:12]}: the bytes do not match the digest")
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.final)
        self._place(self.final)

    def _hash_rest(self) -> None:
        """Read again what did not come in order."""
        if self._hashed == self._size:
            return
        with open(self._temporary, "rb") as file:
            file.seek(self._hashed)
            while chunk := file.read(_BUFFER):
                self._hash.update(chunk)
        self._hashed = self._size

    def close(self) -> None:
        """Throw away what is not finished. Safe at any time."""
        if self._file is not None:
            # closing flushes, and on a full disk that fails a second time; the first error is the one to tell
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        self.head = read_head(self.folder, self.run_id)
        if self.head is None:
            return
        lost = [name for name, shard in self.head.document.shards.items() if not self.has(shard.digest)]
        if lost:
            raise damaged(self.folder, f"{len(lost)} shards of the last commit are gone, {lost[0]} first")

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
        return object_path(self.folder, digest)

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

    def inherited_writer(self, digest: str, size: int) -> ObjectWriter:
        """A writer for one object that this node takes over from a node that leaves."""
        path = self.folder / "scratch" / INHERITED / digest
        return ObjectWriter(path, digest, size, durable=False, place=self.place)

    def place(self, path: Path) -> None:
        """Note an object that has just been written, here or by the trainer; its name is its digest."""
        self._places[path.name] = path

    def find(self, digest: str) -> Path | None:
        """Where an object is, committed or not; None when it is not here."""
        return self._places.get(digest)

    def locate(self, digest: str) -> Path:
        """Where an object is that must be here, committed or not."""
        path = self.find(digest)
        assert path is not None, f"{digest[:12]} is not here"
        return path

    def discard(self, digest: str) -> None:
        """Remove an object that must not become part of the state; what is part of it stays, whoever names it."""
        if self.head is not None and any(shard.digest == digest for shard in self.head.document.shards.values()):
            return
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
        """Remove objects that no kept commit names, and the scratch of rounds before the last two."""
        assert self.head is not None
        number = self.head.document.round
        kept: set[str] = set()
        for past in range(max(0, number - KEPT_COMMITS + 1), number + 1):
            commit = read_commit(self.folder, self.run_id, past)
            kept |= {shard.digest for shard in commit.document.shards.values()} if commit is not None else set()
        for path in self.folder.glob("objects/*/*"):
            if path.name not in kept and not path.name.startswith("."):
                path.unlink()
        for folder in (self.folder / "scratch").iterdir():
            if folder.name != INHERITED and int(folder.name) < number - 1:  # peers a round behind still ask for it
                shutil.rmtree(folder)
        self._places = {digest: path for digest, path in list(self._places.items()) if path.exists()}
