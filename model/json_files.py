"""JSON files that somebody else has written, and what messages show of their contents: always one short line."""

import json
from pathlib import Path
from typing import Any

_SHOWN = 200
"""Characters of a value, at most."""


def read_table(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises ValueError when there is none in it, and OSError."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it is not a table")
    return table


def shown(value: object) -> str:
    """A value that was read, as JSON."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "(nested too deeply)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def shown_name(name: str) -> str:
    """A name that was read: as it is, unless it would break the line."""
    return name if name.isprintable() and len(name) <= _SHOWN else shown(name)
