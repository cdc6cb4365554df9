"""A lab: hosts with addresses of their own behind slow, lossy lines that can be cut, on this machine.

    with Lab(4, delay_ms=10, rate_mbit=20) as lab:
        server = lab.exec(1, ["spes-node", "bootstrap", "run.toml", "--listen", f"{lab.address(1)}:31337"])
        lab.split([[1, 2], [3, 4]])

The hosts reach each other and nothing else. Nothing outside them is touched, and labs do not see each other.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from model.errors import SpesError
from node.lab.line import MOST_HOSTS, Line, hardware_address
from node.lab.namespace import Namespace, signal_all
from node.lab.wire import DEVICE, Order, open_tap
from swarm.lifeline import die_with_parent

TERM_SECONDS = 5.0
"""Processes that are still there so long after SIGTERM are killed."""
KILL_SECONDS = 10.0
POLL_SECONDS = 0.02
_NO_SIGNAL = 0
"""Asks the kernel whether the process is there."""
HEADER_BYTES = 66
"""Of one frame: Ethernet 14, IPv4 20, TCP 32 with its timestamps."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a host has sent and received since it is there, headers and repetitions included."""

    sent_bytes: int
    sent_frames: int
    received_bytes: int
    received_frames: int

    @classmethod
    def parse(cls, table: str) -> Self:
        """From the text of /proc/net/dev in a host."""
        row = next(line for line in table.splitlines() if line.strip().startswith(f"{DEVICE}:"))
        counters = [int(word) for word in row.partition(":")[2].split()]
        return cls(counters[8], counters[9], counters[0], counters[1])

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.sent_frames - earlier.sent_frames,
            self.received_bytes - earlier.received_bytes,
            self.received_frames - earlier.received_frames,
        )

    @property
    def sent_payload(self) -> int:
        """Bytes without the headers of TCP and below."""
        return self.sent_bytes - HEADER_BYTES * self.sent_frames

    @property
    def received_payload(self) -> int:
        """As `sent_payload`."""
        return self.received_bytes - HEADER_BYTES * self.received_frames


def unavailable() -> str:
    """Why there can be no lab here; empty when there can."""
    if sys.platform != "linux":
        return "a lab needs Linux"
    if os.geteuid() != 0:
        return "a lab needs root"
    if not Path("/dev/net/tun").exists():
        return "a lab needs /dev/net/tun"
    try:
        subprocess.run(["ip", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"a lab needs the command ip (iproute2): {error}"
    try:
        with closing(Namespace.create()) as namespace:
            os.close(open_tap(namespace))
    except OSError as error:
        return f"a lab needs network namespaces and TAP devices: {error}"
    return ""


class Lab:
    """Hosts 1 to `hosts`, all on the same lines until `set` changes one. A context manager."""

    def __init__(
        self, hosts: int, *, delay_ms: float = 0, jitter_ms: float = 0, rate_mbit: float = 0, loss: float = 0
    ) -> None:
        """Args:
        hosts: how many, at most 200.
        delay_ms, jitter_ms, rate_mbit, loss: of every host's line, see `Line`.

        Raises ValueError for what cannot be a host or a line.
        """
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"{hosts} hosts; a lab has 1 to {MOST_HOSTS}")
        line = Line(delay_ms=delay_ms, jitter_ms=jitter_ms, rate_mbit=rate_mbit, loss=loss)
        self.hosts = range(1, hosts + 1)
        self._lines = dict.fromkeys(self.hosts, line)
        self._network = dict.fromkeys(self.hosts, 0)
        self._cut: set[int] = set()
        self._namespaces: dict[int, Namespace] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        self._wire: subprocess.Popen[bytes] | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        """Make the hosts. Raises SpesError when this machine cannot, with the reason."""
        with ExitStack() as cleanup:
            try:
                for host in self.hosts:
                    namespace = self._namespaces[host] = Namespace.create()
                    cleanup.callback(namespace.close)
            except OSError as error:
                raise SpesError(f"no lab here: {unavailable() or error}") from error
            self._wire = cleanup.enter_context(self._start_wire())  # it ends when this closes its standard input
            self._await_answer()
            cleanup.callback(self._end_processes)
            for host in self.hosts:
                self._configure(host)
            self._tell_wire()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End every process in the hosts, then let them vanish."""
        self._cleanup.close()

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.77.0.{self._known(host)}"

    def exec(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a host; it ends with the lab, and with this process.

        Args:
            host: where.
            command: program and arguments.
            options: as for `subprocess.Popen`, but for `preexec_fn`.
        """
        namespace = self._namespaces[self._known(host)]

        def move() -> None:
            namespace.enter()
            die_with_parent()

        process = subprocess.Popen(command, preexec_fn=move, **options)
        self._processes.append(process)
        return process

    @contextmanager
    def visit(self, host: int) -> Iterator[None]:
        """Have the calling thread in a host for a while: a socket that is made there stays there."""
        with self._namespaces[self._known(host)].visit():
            yield

    def set(self, host: int, **changes: float) -> None:
        """Change a host's line: the fields of `Line`. Frames on their way keep their times."""
        self._lines[self._known(host)] = replace(self._lines[host], **changes)
        self._tell_wire()

    def cut(self, host: int) -> None:
        """Cut a host off: frames from and to it are lost without a word."""
        self._cut.add(self._known(host))
        self._tell_wire()

    def heal(self, host: int) -> None:
        """Put a host back into its network."""
        self._cut.discard(self._known(host))
        self._tell_wire()

    def split(self, networks: Sequence[Collection[int]]) -> None:
        """Part the hosts into networks that do not hear of each other. Raises ValueError unless each is named once."""
        if sorted(host for network in networks for host in network) != list(self.hosts):
            raise ValueError(f"{networks} does not name each of {len(self.hosts)} hosts once")
        self._network = {host: number for number, network in enumerate(networks) for host in network}
        self._tell_wire()

    def join(self) -> None:
        """Make one network of all hosts again; those that are cut off stay so."""
        self._network = dict.fromkeys(self.hosts, 0)
        self._tell_wire()

    def traffic(self, host: int) -> Traffic:
        """What has passed a host's line, by its own interface counters."""
        table, _ = self.exec(host, ["cat", "/proc/net/dev"], stdout=subprocess.PIPE, text=True).communicate()
        return Traffic.parse(table)

    def wire_seconds(self) -> float:
        """CPU seconds that the emulation has taken; near one a second it is the limit, and not the lines."""
        assert self._wire is not None
        user, system = Path(f"/proc/{self._wire.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    # how it is made

    def _known(self, host: int) -> int:
        if host not in self.hosts:
            raise ValueError(f"no host {host} in a lab of {len(self.hosts)}")
        return host

    def _start_wire(self) -> subprocess.Popen[bytes]:
        descriptors = [namespace.descriptor for namespace in self._namespaces.values()]
        return subprocess.Popen(
            [sys.executable, "-m", "node.lab.wire", *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # a Ctrl-C in the terminal is for us
        )

    def _configure(self, host: int) -> None:
        """Give a host its addresses, and everybody else's: a cut line must be silent, not "no route to host"."""
        lines = [
            "link set lo up",
            f"link set {DEVICE} addrgenmode none",
            f"link set {DEVICE} address {hardware_address(host).hex(':')} up",
            f"addr add {self.address(host)}/24 dev {DEVICE}",
        ]
        for other in self.hosts:
            if other != host:
                hardware = hardware_address(other).hex(":")
                lines.append(f"neigh add {self.address(other)} lladdr {hardware} dev {DEVICE} nud permanent")
        process = self.exec(host, ["ip", "-batch", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _, errors = process.communicate("\n".join(lines))
        if process.returncode:
            raise SpesError(f"ip: {errors.strip()}")

    def _tell_wire(self) -> None:
        assert self._wire is not None and self._wire.stdin is not None, "the lab is not up"
        networks = [-host if host in self._cut else self._network[host] for host in self.hosts]
        with suppress(BrokenPipeError):  # it has ended: there is no answer either
            self._wire.stdin.write(Order(list(self._lines.values()), networks).encode())
            self._wire.stdin.flush()
        self._await_answer()

    def _await_answer(self) -> None:
        assert self._wire is not None and self._wire.stdout is not None
        if self._wire.stdout.readline() != b"ok\n":
            raise SpesError("the wire between the hosts has ended")

    def _end_processes(self) -> None:
        """SIGTERM for everything in the hosts, SIGKILL for what does not end by it."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that is stopped hears nothing else
        self._until_gone(_NO_SIGNAL, TERM_SECONDS)
        self._until_gone(signal.SIGKILL, KILL_SECONDS)
        for process in self._processes:
            process.wait()

    def _until_gone(self, number: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._signal(number) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _signal(self, number: int) -> bool:
        """Send a signal to everything in the hosts; whether there is anything."""
        return signal_all(self._namespaces.values(), number)
