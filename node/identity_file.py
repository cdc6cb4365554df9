"""A node's key as a file: to look at, to keep a copy of, to bring to another box."""

import json
from pathlib import Path

from model.errors import UserError
from node.names import spoken_name
from swarm.identity import Identity, write_secret


def show(path: Path, *, as_json: bool) -> None:
    """Print whose key this is. Raises UserError when there is none."""
    identity = Identity.read(path)
    told = {"name": spoken_name(identity.node_id), "id": identity.node_id, "key": str(path)}
    print(json.dumps(told, indent=2) if as_json else "\n".join(f"{word:<5} {text}" for word, text in told.items()))


def copy(source: Path, target: Path) -> None:
    """Copy a key, readable by its owner only; what is there already stays. Raises UserError."""
    Identity.read(source)
    if target.exists():
        raise UserError(f"{target} is there already; nothing was changed. Move it away first")
    write_secret(target, source.read_bytes())
