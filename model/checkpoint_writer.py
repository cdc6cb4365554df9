"""Writes a Hugging Face checkpoint tensor by tensor; the folder appears complete or not at all."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from model.errors import UserError
from model.temporary_folder import clear_abandoned, temporary_folder
from model.weight_files import INDEX, SINGLE

FILE_BYTES = 4 << 30
"""Most bytes of a weight file, unless one tensor alone is larger; one file's tensors are in memory at a time."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class CheckpointWriter:
    """A checkpoint folder in the making: `add` tensors, write other files into `partial`, and leave the context.

    Without an error the folder then gets its name, or the files are moved into the empty folder of that name, which may
    be a mount point or the current folder; `config.json` comes last. With an error nothing is left, and what a writer
    that was killed has left is cleared away by the next one for the same folder.

    Raises UserError on entering when `folder` exists and is not empty, or when nothing can be written there, and
    afterwards when the disk is full or something has taken the folder's name meanwhile.
    """

    def __init__(self, folder: Path, *, file_bytes: int | None = None) -> None:
        self._folder = folder
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._tensors: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        """Names of the tensors in each file that is written."""
        self._total_bytes = 0
        self._temporary: Path | None = None

    def __enter__(self) -> Self:
        with self._refusals(), contextlib.ExitStack() as held:
            # Without links and dots: what is renamed in the end, and where its parent is.
            self._target = Path(os.path.realpath(self._folder))
            prefix = f".{self._target.name}.partial-"
            clear_abandoned(self._target.parent, prefix)
            self._exists = self._target.is_dir()
            if os.path.lexists(self._target) and not self._exists:
                raise UserError(f"{self._folder} exists and is no folder: choose another folder with -o")
            # Inside a folder that exists: its parent may be of another file system, or of another user.
            place = self._target if self._exists else self._target.parent
            place.mkdir(parents=True, exist_ok=True)
            clear_abandoned(place, prefix)
            self._make_sure_that_it_is_empty()
            self._temporary = held.enter_context(temporary_folder(place, prefix))
            self.partial = self._temporary / "partial"
            self.partial.mkdir()
            self._held = held.pop_all()
        return self

    def _make_sure_that_it_is_empty(self) -> None:
        if self._exists and any(entry != self._temporary for entry in self._target.iterdir()):
            raise UserError(f"{self._folder} exists and is not empty: choose another folder with -o")

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the system refuses becomes a line about the folder."""
        try:
            yield
        except OSError as error:
            raise self._refusal((error.strerror or str(error)).lower(), full=error.errno in _FULL) from None

    def _refusal(self, reason: str, *, full: bool) -> UserError:
        remedy = "free some space, or choose" if full else "choose"
        return UserError(f"{self._folder} cannot be written ({reason}): {remedy} another folder with -o")

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a copy of the next tensor, of any dtype and device. Each name comes once."""
        if self._tensors and self._pending_bytes() + tensor.nbytes > self._file_bytes:
            self._write_file()
        # A copy, dense and of its own memory: safetensors refuses tensors that share theirs, and callers reuse buffers.
        copy = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, requires_grad=False)
        self._tensors[name] = copy.copy_(tensor.detach())

    def _pending_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _write_file(self) -> None:
        path = self.partial / f"{len(self._files)}.part"
        try:
            save_file(self._tensors, path, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:  # a full disk is the former
            raise self._refusal(str(error), full=True) from None
        with contextlib.suppress(OSError):  # some file systems have no modes
            path.chmod(0o644)  # safetensors writes for its user alone; the other files are for everybody
        self._total_bytes += self._pending_bytes()
        self._files.append(list(self._tensors))
        self._tensors.clear()

    def _name_files(self) -> None:
        """Give the files their names, which tell how many there are, and write the index of several."""
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, tensors in enumerate(self._files):
            name = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self.partial / f"{number}.part", self.partial / name)
            weight_map |= dict.fromkeys(tensors, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held, self._refusals():
            if error is None:
                if self._tensors:
                    self._write_file()
                self._name_files()
                self._publish()
            elif isinstance(error, OSError) and self._is_of_writing(error):
                raise error

    def _publish(self) -> None:
        if not self._exists:
            os.rename(self.partial, self._target)
            return
        self._make_sure_that_it_is_empty()
        names = sorted(os.listdir(self.partial), key=lambda name: name == "config.json")
        try:
            for name in names:
                os.rename(self.partial / name, self._target / name)
        except BaseException:
            for name in names:
                if not (self.partial / name).exists():
                    os.rename(self._target / name, self.partial / name)
            raise

    def _is_of_writing(self, error: OSError) -> bool:
        """Whether it comes from a file of the new folder, and not from what its contents are read from."""
        return error.errno in _FULL or str(error.filename).startswith(str(self._temporary))
