"""A node of a swarm on this box, seen from outside: its processes, its log, its chain, the bits on its disk."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import psutil

from model.errors import SpesError
from node.local_swarm import Box
from node.stores import find_run
from swarm.documents import Commit, Signed, open_document, state_digest
from swarm.held_state import hold_head
from swarm.store import file_digest

WAIT_SECONDS = 180.0
"""What takes longer than this does not happen at all."""
LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Node:
    """A daemon that may be hit."""

    box: Box
    id: str = ""
    pids: list[int] = field(default_factory=list)
    """The daemon, its p2pd, its trainer."""
    log: TextIO | None = None

    def watch(self) -> None:
        """Note who this is, and read the log from now on; once it has joined."""
        found = re.search(r"\((Qm\w+)\)", self.box.log.read_text())
        assert found is not None, "a daemon prints its id first"
        self.id = found[1]
        daemon = psutil.Process(self.box.process.pid)
        self.pids = [daemon.pid, *(child.pid for child in daemon.children(recursive=True))]
        self.log = open(self.box.log)  # noqa: SIM115 - read for as long as the node lives
        self.log.seek(0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """What it has printed since the last call."""
        assert self.log is not None
        while (line := self.log.readline()).endswith("\n"):
            yield line
        self.log.seek(self.log.tell() - len(line.encode()))

    def send(self, number: signal.Signals) -> None:
        """A signal to all of its processes."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # the kernel ends the others with the daemon
                os.kill(pid, number)

    @property
    def has_joined(self) -> bool:
        """Whether it has said so."""
        if self.box.process.poll() is not None:
            raise SpesError(f"{self.box.name} ended early; its log: {self.box.log}")
        return "\ninvite " in self.box.log.read_text()[self.box.log_start :]

    def history(self) -> list[dict[str, Any]]:
        """The rounds it has written down."""
        return [
            json.loads(line)
            for path in self.box.home.glob("runs/*/history.jsonl")
            for line in path.read_text().splitlines()
        ]

    @property
    def round(self) -> int:
        """The last one it has written down."""
        return max((int(line["round"]) for line in self.history()), default=0)

    def adopted(self, number: int) -> float:
        """When it had the commit of a round, or else the first one after it; Unix seconds."""
        return min(float(line["time"]) for line in self.history() if line["round"] >= number)

    def commit(self, number: int) -> Signed[Commit] | None:
        """The commit of a round, if it has adopted one."""
        signed, folder = find_run(self.box.home)
        path = folder / "commits" / str(number)
        if not path.exists():
            return None
        found = open_document(path.read_bytes(), signed.digest)
        assert isinstance(found.document, Commit)
        return cast(Signed[Commit], found)

    def bits(self) -> tuple[int, str, str]:
        """Its round, the digest of the bytes on its disk, and what that should be."""
        signed, folder = find_run(self.box.home)
        with hold_head(folder, signed.digest) as held:
            commit = held.commit.document
            there = {name: file_digest(held.folder / shard.digest) for name, shard in commit.shards.items()}
            return commit.round, state_digest(there), commit.state


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait for a condition. Raises SpesError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SpesError(f"{what}: not within {seconds:.0f} s")
        time.sleep(LOOK_SECONDS)
