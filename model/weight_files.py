"""The weight files of a checkpoint folder: which tensors are in them, and the tensors one by one.

Opening reads the headers alone; a tensor, or some rows of it, is read when it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.errors import UserError
from model.json_files import read_table, shown_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Stored dtypes that are read, by the name that safetensors has for them."""
COMPUTED = ".rotary_emb.inv_freq"
"""Ends the name of a table that old checkpoints hold and every model computes anew."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says about one tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of the safetensors files in `folder`."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], handles: Mapping[str, Any]) -> None:
        self.folder = folder
        self.tensors = tensors
        """Of all files, by name; `COMPUTED` ones are left out."""
        self._handles = handles

    @classmethod
    def open(cls, folder: Path) -> "WeightFiles":
        """Reads the headers of `model.safetensors`, or of all files that `model.safetensors.index.json` names.

        Raises UserError when a file is missing, is not a whole safetensors file, or lacks what the index promises, and
        when the index does not say which file of several has a tensor.
        """
        weight_map = _weight_map(folder)
        handles: dict[str, Any] = {}
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            handles[file] = _open(folder / file)
            for name in handles[file].keys():  # noqa: SIM118 - the handle is no mapping
                if weight_map.get(name, file) != file or name.endswith(COMPUTED):
                    continue
                if name in tensors:
                    raise UserError(
                        f"{folder}: {shown_name(name)} is in {tensors[name].file} and in {file}, and {INDEX} does not "
                        "say which is right: download the folder again"
                    )
                header = handles[file].get_slice(name)
                tensors[name] = StoredTensor(file, header.get_dtype(), tuple(header.get_shape()))
        for name, file in weight_map.items():
            if name not in tensors and not name.endswith(COMPUTED):
                raise UserError(
                    f"{folder / file} has no tensor {shown_name(name)}, which {INDEX} promises: "
                    "download the folder again"
                )
        return cls(folder, tensors, handles)

    def check(self, expected: Iterable[tuple[str, tuple[int, ...]]], stands_for: Callable[[str], str]) -> None:
        """Makes sure that the files hold exactly the tensors of `expected` in their shapes.

        `stands_for` gives the name under which a tensor is looked up. Raises UserError for the first tensor that is
        missing, has another shape or a dtype that cannot be read, and for the first one too many.
        """
        used = set()
        for name, shape in expected:
            place = stands_for(name)
            used.add(place)
            stored = self.tensors.get(place)
            if stored is None:
                raise UserError(f"{self.folder} has no tensor {name}: {self._remedy(name)}")
            if stored.shape != shape:
                raise UserError(
                    f"{self.folder / stored.file}: {name} has shape {list(stored.shape)}, "
                    f"and by config.json it has {list(shape)}: one of them is not of this model"
                )
            if stored.dtype not in DTYPES:
                raise UserError(
                    f"{self.folder / stored.file}: {name} is stored as {stored.dtype}: "
                    f"give a checkpoint in {', '.join(DTYPES)}"
                )
        if extra := [name for name in self.tensors if name not in used]:
            raise UserError(
                f"{self.folder / self.tensors[extra[0]].file}: {shown_name(extra[0])} is no tensor of the model in "
                f"config.json{f', and neither are {len(extra) - 1} more' if len(extra) > 1 else ''}: "
                "give a checkpoint of that model alone"
            )

    def _remedy(self, name: str) -> str:
        fused = [stored for stored in self.tensors if stored.endswith(".experts.gate_up_proj")]
        if ".experts." in name and fused:
            return (
                f"it has fused experts ({shown_name(fused[0])}); save it with one matrix for each expert, as "
                "transformers does"
            )
        return "download it again, or give a checkpoint of the model in its config.json"

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start:stop` of a tensor, all of them by default, in the dtype that is stored.

        Raises UserError when a value is not finite.
        """
        file = self.tensors[name].file
        rows: Tensor = self._handles[file].get_slice(name)[start:stop]
        if not torch.isfinite(rows).all():
            raise UserError(f"{self.folder / file}: {name} has values that are not finite: the checkpoint is broken")
        return rows

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        return DTYPES[self.tensors[name].dtype]


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty for a folder with one file."""
    if (folder / SINGLE).is_file():
        return {}
    path = folder / INDEX
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("*.bin")) if folder.is_dir() else []
        if others:
            raise UserError(
                f"{folder} has its weights in {shown_name(others[0])}, which is not safetensors: convert it with "
                "transformers (from_pretrained, then save_pretrained)"
            )
        raise UserError(f"{folder} has no {SINGLE} and no {INDEX}: give the folder of a checkpoint")
    try:
        weight_map = read_table(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(map(_is_file_name, weight_map.values())) or not weight_map:
            raise ValueError("its weight_map does not name files of this folder")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not the index of a checkpoint ({error}): download it again") from None
    return weight_map


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and name not in ("", "..") and Path(name).name == name


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except FileNotFoundError:
        raise UserError(f"{path} is missing, and {INDEX} names it: download it, too") from None
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} is not a whole safetensors file ({reason}): download it again") from None
