"""The run file: the TOML in which a person describes a run, and the presets to start one from."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bootstrap.model_section import with_model
from model.errors import UserError
from model.settings import LossSettings, ModelSettings, OptimizerSettings, Settings
from swarm.manifest import DataSettings, EncodingSettings, Manifest, MergeSettings, RoundSettings

FILLED_IN = ("data.fingerprint", "data.num_blocks")
"""Keys of the manifest that follow from the text itself, so nobody writes them."""


class RunSection(Settings):
    """The run's own section; the manifest holds the bounds of both keys."""

    name: str
    seed: int


class RunFile(Settings):
    """A run as a person describes it: the manifest without its author and without what follows from the text."""

    run: RunSection
    model: ModelSettings
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings
    data: DataSettings
    round: RoundSettings
    encoding: EncodingSettings = EncodingSettings()
    merge: MergeSettings = MergeSettings()

    def manifest(self, author: str, fingerprint: str, num_blocks: int, initial_state: str = "") -> Manifest:
        """The manifest of this run, started by the node id `author` on the text that `fingerprint` and `num_blocks`
        tell of, from the weights of `initial_state` if it is not empty."""
        return Manifest(
            name=self.run.name,
            author=author,
            seed=self.run.seed,
            initial_state=initial_state,
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            data=self.data.model_copy(update={"fingerprint": fingerprint, "num_blocks": num_blocks}),
            round=self.round,
            encoding=self.encoding,
            merge=self.merge,
        )


def read_run_file(path: Path) -> RunFile:
    """Read and check a run file, its sections against each other too.

    Raises UserError for the first mistake, with its dotted key and its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read the run file {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    lines = _key_lines(text)

    def mistake(key: str, problem: str) -> UserError:
        line = lines.get(key) or lines.get(key.rpartition(".")[0])  # a missing key: its section's
        where = f"{path} line {line}" if line else str(path)
        return UserError(f"{key}: {problem} ({where})" if key else f"{problem} ({where})")

    known = list(_known_keys())
    for key in _dotted_keys(table):
        if key in FILLED_IN:
            raise mistake(key, "filled in when the run is started, leave it out")
        if key not in known:
            raise mistake(key, f"unknown key, {_suggestion(key, known)}")
    try:
        run_file = RunFile.model_validate(table)
        run_file.manifest(author="unknown yet", fingerprint="", num_blocks=0)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise mistake({"name": "run.name", "seed": "run.seed"}.get(key, key), _problem(first)) from error
    return run_file


def preset_names() -> tuple[str, ...]:
    """Names of the run files that come with the package, sorted."""
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir()))


def read_preset(name: str) -> RunFile:
    """The run of a preset. Raises UserError if there is no such preset."""
    if name.lower() not in preset_names():
        raise UserError(f"{name} is no file and no preset; the presets are {', '.join(preset_names())}")
    with resources.as_file(_presets() / f"{name.lower()}.toml") as path:
        return read_run_file(path)


def write_preset(name: str, path: Path, model: ModelSettings | None = None) -> None:
    """Write the preset to the new file `path`, to be edited there; with `model`, for that model instead of its own.
    Case does not matter: `2B` is `2b`.

    Raises UserError if there is no such preset, or if `path` exists or cannot be written.
    """
    if name.lower() not in preset_names():
        raise UserError(f"no preset is called {name!r}; the presets are {', '.join(preset_names())}")
    text = (_presets() / f"{name.lower()}.toml").read_text(encoding="utf-8")
    if model is not None:
        text = with_model(text, model)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} is there already; name another file or remove it first") from error
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from error


def change_settings(path: Path, changes: Mapping[str, object]) -> None:
    """Change settings of the run file `path` as a person would, in place and with the comments left alone.

    Args:
        path: the run file.
        changes: new values by dotted key, such as `{"round.total": 4}`; what is not in the file yet is added.
    """
    left = {tuple(key.split(".")): json.dumps(value) for key, value in changes.items()}
    lines, section = list[str](), ""

    def add_rest(of: str) -> None:
        lines.extend(f"{name} = {left.pop((of, name))}" for where, name in list(left) if where == of)

    for line in path.read_text(encoding="utf-8").splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            add_rest(section)
            section = header[1]
        elif (setting := re.match(r'(\w+) = (?:"[^"]*"|\S+)(.*)', line)) and (section, setting[1]) in left:
            line = f"{setting[1]} = {left.pop((section, setting[1]))}{setting[2]}"
        lines.append(line)
    add_rest(section)
    for section in dict.fromkeys(where for where, _ in left):
        lines.append(f"[{section}]")
        add_rest(section)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _presets() -> Traversable:
    return resources.files("bootstrap") / "presets"


def _known_keys() -> Iterator[str]:
    for section, field in RunFile.model_fields.items():
        yield section
        settings = field.annotation
        assert isinstance(settings, type) and issubclass(settings, Settings)
        yield from (key for name in settings.model_fields if (key := f"{section}.{name}") not in FILLED_IN)


def _suggestion(key: str, known: list[str]) -> str:
    section, _, name = key.rpartition(".")
    # Names without their section, so that a key in the wrong section is recognised; no name is in two of them.
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in known}
    if similar := get_close_matches(name, by_name, n=1):
        return f"did you mean {by_name[similar[0]]}?"
    siblings = [name for name, candidate in by_name.items() if candidate.rpartition(".")[0] == section]
    return f"the keys here are {', '.join(siblings)}"


def _dotted_keys(table: dict[str, Any]) -> Iterator[str]:
    for section, content in table.items():
        yield section
        if isinstance(content, dict):
            yield from (f"{section}.{key}" for key in content)


def _key_lines(text: str) -> dict[str, int]:
    """The line of each section and dotted key, from 1: tomllib keeps none. Keys of inline tables are not found."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header[1]
            lines.setdefault(section, number)
        elif assignment := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(f"{section}.{assignment[1]}" if section else assignment[1], number)
    return lines


def _problem(error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            return "missing, add it"
        case "model_type":
            return "must be a section with keys of its own"
        case "value_error":
            return str(error["ctx"]["error"])
        case _:
            return f"{re.sub('^(Input|String) should', 'must', error['msg'])}, not {error['input']!r}"
