"""What a daemon has said, in files of its folder: what stood in the terminal, and the warnings beside it."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from model.errors import UserError

LOG_FORMAT = "%(asctime)s %(levelname).4s %(name)s: %(message)s"
MOST_BYTES = 10_000_000
KEPT = 5
"""Older files than these are removed."""
LOOK_SECONDS = 0.2
CONSOLE = logging.getLogger("spes.console")
"""What is printed; it goes nowhere but into the file."""
CONSOLE.propagate = False
CONSOLE.setLevel(logging.INFO)


def log_file(home: Path) -> Path:
    """The newest file of the daemon in a folder."""
    return home / "logs" / "node.log"


@contextmanager
def kept_log(home: Path) -> Iterator[None]:
    """Inside, keep what this process says. Raises OSError."""
    path = log_file(home)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handler = RotatingFileHandler(path, maxBytes=MOST_BYTES, backupCount=KEPT, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    loggers = (CONSOLE, logging.getLogger())
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def read_log(home: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """The last lines of a daemon's log, oldest first; with `follow` for ever those that come. Raises UserError."""
    path = log_file(home)
    if not path.exists():
        raise UserError(f"no node has written a log in {home}. Name the folder of the one that is meant: --home DIR")
    files = [*(path.with_name(f"{path.name}.{number}") for number in range(KEPT, 0, -1)), path]
    last = deque[str](maxlen=lines)
    for each in files:
        if each.exists():
            with each.open(encoding="utf-8", errors="replace") as file:
                last.extend(line.rstrip("\n") for line in file)
                end, number = file.tell(), path.stat().st_ino
    yield from last
    while follow:
        time.sleep(LOOK_SECONDS)
        with path.open(encoding="utf-8", errors="replace") as file:
            if path.stat().st_ino != number:  # a new one has been begun
                end, number = 0, path.stat().st_ino
            file.seek(end)
            for line in file:
                yield line.rstrip("\n")
            end = file.tell()
