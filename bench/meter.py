"""What a process of a benchmark tells about itself, one line of JSON at a time, and how that is read."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from node.lab.lab import Traffic

Counters = Callable[[], tuple[int, int]]
"""Bytes sent and received so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One moment in the life of a process."""

    kind: Literal["begin", "end", "done"]
    """Of a synchronisation, or of the process."""
    number: int
    """Which synchronisation; 0 when it is done."""
    time: float
    """Seconds of the machine's monotonic clock."""
    cpu: float
    """CPU seconds so far, of this process and of those that it has started."""
    sent: int
    """Bytes so far."""
    received: int
    peak: int = 0
    """When it is done: most resident bytes of one of these processes, a Python one's counted from after its imports."""


def line_counters() -> tuple[int, int]:
    """What has passed the line of the lab's host that this process is in, without the headers of TCP and below."""
    traffic = Traffic.parse(Path("/proc/self/net/dev").read_text())
    return traffic.sent_payload, traffic.received_payload


class Meter:
    """Measures this process; made after the imports."""

    def __init__(self, counters: Counters) -> None:
        """Args:
        counters: where bytes are counted.
        """
        self._counters = counters
        self._me = psutil.Process()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._baseline = self._me.memory_info().rss

    def mark(self, kind: Literal["begin", "end", "done"], number: int = 0) -> None:
        """Tell where this process stands now."""
        now = time.monotonic()
        family = [self._me, *self._me.children(recursive=True)]
        cpu = sum(sum(process.cpu_times()[:2]) for process in family)
        sent, received = self._counters()
        peak = max(map(self._peak, family)) if kind == "done" else 0
        tell(asdict(Mark(kind=kind, number=number, time=now, cpu=cpu, sent=sent, received=received, peak=peak)))

    def _peak(self, process: psutil.Process) -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
        return peak - (self._baseline if process.name().startswith("python") else 0)


def tell(fields: dict[str, Any]) -> None:
    """Say something to whoever has started this process."""
    print(json.dumps(fields), flush=True)


def orders() -> Iterator[int]:
    """The synchronisations that this process is told to begin, by whoever has started it, until an empty line."""
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        yield int(line)
