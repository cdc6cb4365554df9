"""A whole swarm on this box: a rendezvous and nodes as processes of their own on loopback."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model.errors import SpesError

STOP_SECONDS = 15.0
"""A process that was asked to leave is killed after this time."""
_ADDRESS = re.compile(r"spes-node join --peers (\S+)")


@dataclass(slots=True)
class Box:
    """A daemon that the demonstration has started."""

    name: str
    home: Path
    process: subprocess.Popen[str]

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.home / "log"


@dataclass(slots=True)
class LocalSwarm:
    """A rendezvous and its nodes on loopback; leaving the context ends them all."""

    folder: Path
    data: Sequence[Path] = ()
    threads: int = 1
    address: str = ""
    rendezvous: Box | None = None
    nodes: list[Box] = field(default_factory=list)

    def __enter__(self) -> "LocalSwarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_rendezvous(self, run_file: Path) -> None:
        """Start the rendezvous and wait for its join line. Raises SpesError with its last words when it ends."""
        box = self._start("rendezvous", ["bootstrap", str(run_file), *self._data()], pipe=True)
        self.rendezvous = box
        assert box.process.stdout is not None
        lines = []
        for line in box.process.stdout:
            lines.append(line)
            if match := _ADDRESS.search(line):
                self.address = match[1]
                return
        raise SpesError(last_words(box) or "".join(lines).strip())

    def start_node(self, name: str, *options: str) -> Box:
        """Start a node that joins the rendezvous."""
        arguments = ["join", "--peers", self.address, "--threads", str(self.threads), *self._data(), *options]
        box = self._start(name, arguments, pipe=False)
        self.nodes.append(box)
        return box

    def _data(self) -> list[str]:
        return ["--data", *map(str, self.data)] if self.data else []

    def _start(self, name: str, arguments: Sequence[str], *, pipe: bool) -> Box:
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "node", *arguments]
        command += ["--home", str(home), "--name", name, "--listen", "127.0.0.1:0"]
        with open(home / "log", "a") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else log,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C in the terminal is for us, and we end them in order
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return Box(name, home, process)

    def rendezvous_lines(self) -> Iterator[str]:
        """What the rendezvous prints from now on."""
        assert self.rendezvous is not None and self.rendezvous.process.stdout is not None
        yield from self.rendezvous.process.stdout

    def stop(self) -> None:
        """Ask every process to leave, nodes first, and wait for them."""
        boxes = [*self.nodes, *([self.rendezvous] if self.rendezvous else [])]
        for box in boxes:
            with contextlib.suppress(ProcessLookupError):
                box.process.send_signal(signal.SIGTERM)
        for box in boxes:
            try:
                box.process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                box.process.kill()
                box.process.wait()


def last_words(box: Box) -> str:
    """The last line that a process printed, without the program's name."""
    lines = box.log.read_text().strip().splitlines()
    return lines[-1].removeprefix("spes-node: ") if lines else ""
