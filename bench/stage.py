"""Where contestants run, a host or a process for each node, and how they are talked to."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.meter import Mark
from model.errors import SpesError
from node.lab.lab import Lab
from swarm.lifeline import die_with_parent

PATIENCE_SECONDS = 300.0
"""A process that says nothing for so long has failed."""
END_SECONDS = 60.0


class Actor:
    """A process that is told things and tells things, one line at a time."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream(self._process.stdout):
            self._lines.put(line)
        self._lines.put(None)

    def _stream(self, stream: IO[str] | None) -> IO[str]:
        assert stream is not None, "its streams are pipes"
        return stream

    def tell(self, text: str) -> None:
        """Say one line."""
        stream = self._stream(self._process.stdin)
        stream.write(text + "\n")
        stream.flush()

    def hear(self) -> dict[str, Any]:
        """What it says next. Raises SpesError with its last words when that is nothing."""
        try:
            line = self._lines.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise SpesError(f"{self._log}: silent for {PATIENCE_SECONDS:.0f} s") from None
        if line is None:
            words = self._log.read_text().strip().splitlines()
            raise SpesError(f"{self._log}: it has ended: {words[-1] if words else 'without a word'}")
        fields: dict[str, Any] = json.loads(line)
        return fields

    def mark(self, *kinds: str) -> Mark:
        """Its next mark, which must be of one of these kinds."""
        mark = Mark(**self.hear())
        if mark.kind not in kinds:
            raise SpesError(f"{self._log}: {mark.kind} where {' or '.join(kinds)} was expected")
        return mark

    def close(self) -> None:
        """Let it end, or end it."""
        self._stream(self._process.stdin).close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream(self._process.stdout).close()


@dataclass(frozen=True, slots=True)
class Stage:
    """A place for contestants, with its nodes counted from 1."""

    folder: Path
    nodes: int
    lab: Lab | None = None
    """None for loopback."""
    actors: ExitStack = field(default_factory=ExitStack)

    @property
    def counters(self) -> str:
        """Where bytes are counted: `line` or `own`."""
        return "own" if self.lab is None else "line"

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return "127.0.0.1" if self.lab is None else self.lab.address(node)

    def wire_seconds(self) -> float:
        """CPU seconds of the lab's wire so far; 0 on loopback."""
        return 0.0 if self.lab is None else self.lab.wire_seconds()

    def start(self, node: int, module: str, *arguments: str, name: str = "node") -> Actor:
        """Start `python -m module` as a process of a node; it ends with the scene."""
        command = [sys.executable, "-m", module, *arguments]
        log = self.folder / f"{name}-{node}.log"
        with open(log, "w") as errors:
            process: subprocess.Popen[str]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": errors,
                "text": True,
            }
            if self.lab is None:
                process = subprocess.Popen(command, preexec_fn=die_with_parent, **pipes)
            else:
                process = self.lab.exec(node, command, **pipes)
        actor = Actor(process, log)
        self.actors.callback(actor.close)
        return actor


@contextmanager
def scene(folder: Path, nodes: int, *, delay_ms: float = 0, rate_mbit: float = 0) -> Iterator[Stage]:
    """A stage for one contestant: a lab if its lines have a rate, else loopback. It ends everything that it started."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(nodes, delay_ms=delay_ms, rate_mbit=rate_mbit)) if rate_mbit else None
        actors = stack.enter_context(ExitStack())
        yield Stage(folder, nodes, lab, actors)
