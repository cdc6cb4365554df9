"""A whole swarm on this box: a rendezvous and nodes as processes of their own, on loopback or in the hosts of a lab."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import SpesError
from swarm.lifeline import die_with_parent

STOP_SECONDS = 15.0
"""A process that was asked to leave is killed after this time."""
END_SECONDS = 60.0
"""After the last round the nodes end by themselves within this time."""
POLL_SECONDS = 0.1
"""How often a log is looked at for new lines."""
_ADDRESS = re.compile(r"spes-node join --peers (\S+)")


def _start_here(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a daemon runs."""

    address: str = "127.0.0.1"
    """It listens on a free port of this one."""
    start: Callable[..., "subprocess.Popen[bytes]"] = _start_here
    """Starts a command there, with options as for `subprocess.Popen`, so that it ends with this process."""


LOOPBACK = Place()


@dataclass(slots=True)
class Box:
    """A daemon of a swarm on this box."""

    name: str
    home: Path
    process: subprocess.Popen[bytes]
    log_start: int = 0
    """Where this process' part of the log begins: a daemon that is started again goes on in the same file."""

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.home / "log"


@dataclass(slots=True)
class LocalSwarm:
    """A rendezvous and its nodes; leaving the context ends them all."""

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

    def start_rendezvous(self, run_file: Path, *options: str, place: Place = LOOPBACK) -> None:
        """Start the rendezvous and wait for its join line. Raises SpesError with its last words when it ends."""
        self.rendezvous = self._start("rendezvous", ["bootstrap", str(run_file), *self._data(), *options], place)
        for line in follow(self.rendezvous):
            if match := _ADDRESS.search(line):
                self.address = match[1]
                return
        raise SpesError(last_words(self.rendezvous))

    def start_node(self, name: str, *options: str, place: Place = LOOPBACK) -> Box:
        """Start a node that joins the rendezvous."""
        arguments = ["join", "--peers", self.address, "--threads", str(self.threads), *self._data(), *options]
        box = self._start(name, arguments, place)
        self.nodes.append(box)
        return box

    def start_seed(self, name: str, place: Place = LOOPBACK) -> Box:
        """Start a seed that joins the rendezvous, and wait until it can be joined; `address` becomes its own.

        Raises SpesError with its last words when it ends.
        """
        box = self._start(name, ["seed", "--peers", self.address], place)
        self.nodes.append(box)
        for line in follow(box):
            if match := _ADDRESS.search(line):
                self.address = match[1]
                return box
        raise SpesError(last_words(box))

    def run_to_end(self, rounds: int, show: Callable[[str], None]) -> None:
        """Show what the rendezvous prints until every node has finished the last of `rounds` rounds.

        Raises SpesError with its last words when a process ends before its time.
        """
        assert self.rendezvous is not None
        for line in follow(self.rendezvous, self._check_nodes):
            show(line.rstrip())
            if re.match(rf"\s*{rounds}/{rounds}\s", line):
                break
        else:
            raise SpesError(f"the rendezvous ended early: {last_words(self.rendezvous)}")
        for box in self.nodes:
            box.process.wait(timeout=END_SECONDS)
        self._check_nodes()

    def _check_nodes(self) -> None:
        for box in self.nodes:
            if box.process.poll():
                raise SpesError(f"{box.name} ended early: {last_words(box)}")

    def _data(self) -> list[str]:
        return ["--data", *map(str, self.data)] if self.data else []

    def _start(self, name: str, arguments: Sequence[str], place: Place) -> Box:
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "node", *arguments]
        command += ["--home", str(home), "--name", name, "--listen", f"{place.address}:0"]
        if "--dashboard" not in arguments:
            command += ["--dashboard", "off"]
        with open(home / "log", "a") as log:
            start = log.tell()
            process = place.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for us, and we end them in order
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return Box(name, home, process, start)

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


def follow(box: Box, check: Callable[[], None] = lambda: None) -> Iterator[str]:
    """The lines that a process prints, from the first one, until it ends; `check` is called while it is silent."""
    with open(box.log) as log:
        log.seek(box.log_start)
        while True:
            ended = box.process.poll() is not None
            line = log.readline()
            if line.endswith("\n"):
                yield line
                continue
            if ended:
                return
            log.seek(log.tell() - len(line))  # a line that is still being written
            check()
            time.sleep(POLL_SECONDS)


def last_words(box: Box) -> str:
    """The last line that a process printed, without the program's name."""
    lines = box.log.read_text().strip().splitlines()
    return lines[-1].removeprefix("spes-node: ") if lines else ""
