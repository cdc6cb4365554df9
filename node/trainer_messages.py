"""Tasks and what comes out of them as plain values, for the channel between the daemon and its trainer process."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarm.trainer import Task, Work


def encode_task(task: Task) -> dict[str, Any]:
    """The task in plain values."""
    return {
        "round": task.round,
        "shards": {name: (digest, str(path)) for name, (digest, path) in task.shards.items()},
        "references": _names(task.references),
        "counted": task.counted,
        "experts": task.experts,
        "moments": _names(task.moments),
        "blocks": list(task.blocks),
        "heldout": task.heldout,
        "steps": task.steps,
        "first_step": task.first_step,
        "seconds": task.seconds,
        "folder": str(task.folder),
    }


def decode_task(values: dict[str, Any]) -> Task:
    """The task of `encode_task`."""
    start, stop = values["heldout"]
    return Task(
        **values
        | {
            "shards": {name: (digest, Path(path)) for name, (digest, path) in values["shards"].items()},
            "references": _paths(values["references"]),
            "experts": tuple(values["experts"]),
            "moments": _paths(values["moments"]),
            "heldout": (start, stop),
            "folder": Path(values["folder"]),
        }
    )


def encode_work(work: Work) -> dict[str, Any]:
    """The work in plain values."""
    return asdict(work)


def decode_work(values: dict[str, Any]) -> Work:
    """The work of `encode_work`."""
    return Work(**values | {"choices": tuple(map(tuple, values["choices"]))})


def _names(files: Any) -> dict[str, str]:
    return {name: str(path) for name, path in files.items()}


def _paths(names: dict[str, str]) -> dict[str, Path]:
    return {name: Path(path) for name, path in names.items()}
