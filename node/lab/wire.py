"""The wire between the hosts of a lab: a process that hands each frame on late, slowly, or not at all.

    python -m node.lab.wire FD...     descriptors of the hosts' namespaces, inherited

In each namespace it makes the device `eth0` (a TAP) and is the other end of it. Every line on standard input is an
order (see `Order`), answered by a line; the wire ends with its standard input. The standard library is all it needs:
kernels without the queueing discipline `netem`, and there are many, do as well as those that have it.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from node.lab.line import Line, hardware_address
from node.lab.namespace import Namespace

DEVICE = "eth0"
QUEUE_SECONDS = 0.2
"""What waits for a line longer than this is dropped, as in a modem's buffer."""
QUEUE_BYTES = 32_000
"""A slow line's buffer holds at least so much."""
MOST_IN_FLIGHT = 100_000
"""Frames on their way, all lines together; more are dropped."""
_BATCH = 64
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


@dataclass(frozen=True, slots=True)
class Order:
    """What the hosts' lines are from now on."""

    lines: Sequence[Line]
    networks: Sequence[int]
    """For each host the network it is in; hosts in different ones do not hear of each other."""

    def encode(self) -> bytes:
        """One line of JSON."""
        return json.dumps({"lines": [asdict(line) for line in self.lines], "networks": self.networks}).encode() + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> "Order":
        """From one line of JSON."""
        fields = json.loads(text)
        return cls([Line(**line) for line in fields["lines"]], fields["networks"])


@dataclass(slots=True)
class Lane:
    """One direction of a line: bits leave it one after the other."""

    rate: float = 0.0
    """Bytes per second; 0 is no limit."""
    free_at: float = 0.0
    """When the last bit of what was let in has left."""

    def leaves_at(self, now: float, size: int) -> float | None:
        """When a frame of `size` bytes that comes now has left; None when the buffer is full."""
        if not self.rate:
            return now
        start = max(now, self.free_at)
        if start - now > max(QUEUE_SECONDS, QUEUE_BYTES / self.rate):
            return None
        self.free_at = start + size / self.rate
        return self.free_at


@dataclass(slots=True)
class Port:
    """The wire's end of a host's line."""

    tap: int
    line: Line = field(default_factory=Line)
    network: int = 0
    up: Lane = field(default_factory=Lane)
    down: Lane = field(default_factory=Lane)

    def change(self, line: Line, network: int) -> None:
        """From now on another line, in another network."""
        self.line, self.network = line, network
        self.up.rate = self.down.rate = line.rate_mbit * 1e6 / 8


class Wire:
    """All ports, and the frames on their way between them."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._ports = {tap: Port(tap) for tap in taps}
        self._by_address = {hardware_address(host): port for host, port in enumerate(self._ports.values(), 1)}
        self._random = random.Random(1)
        self._in_flight: list[tuple[float, int, Port, bytes, bool]] = []
        """(when, a tie-breaker, to whom, the frame, whether it has passed the receiver's own line) as a heap."""
        self._count = 0

    def obey(self, order: Order) -> None:
        """Take new lines and networks."""
        for port, line, network in zip(self._ports.values(), order.lines, order.networks, strict=True):
            port.change(line, network)

    def run(self) -> None:
        """Carry frames until standard input ends."""
        poll = select.epoll()
        for tap in self._ports:
            poll.register(tap, select.EPOLLIN)
        poll.register(sys.stdin.fileno(), select.EPOLLIN)
        orders = b""
        while True:
            wait = max(0.0, self._in_flight[0][0] - time.monotonic()) if self._in_flight else -1
            for descriptor, _ in poll.poll(wait):
                if port := self._ports.get(descriptor):
                    self._take_from(port)
                    continue
                if not (data := os.read(descriptor, 1 << 16)):
                    return
                *complete, orders = (orders + data).split(b"\n")
                for text in complete:
                    self.obey(Order.decode(text))
                    print("ok", flush=True)
            self._hand_on()

    def _take_from(self, port: Port) -> None:
        """Read what a host sends."""
        for _ in range(_BATCH):
            try:
                frame = os.read(port.tap, 1 << 16)
            except OSError:  # nothing left, or the host's device is down
                return
            to = self._by_address.get(frame[:6])  # every host knows the others' addresses: nobody needs to broadcast
            if to is None or to.network != port.network or len(self._in_flight) >= MOST_IN_FLIGHT:
                continue
            if self._random.random() < 1 - (1 - port.line.loss) * (1 - to.line.loss):
                continue
            sent = port.up.leaves_at(time.monotonic(), len(frame))
            if sent is not None:
                self._push(sent + self._delay(port.line) + self._delay(to.line), to, frame, False)

    def _delay(self, line: Line) -> float:
        """Seconds that one frame takes."""
        jitter = self._random.uniform(-line.jitter_ms, line.jitter_ms) if line.jitter_ms else 0.0
        return max(0.0, line.delay_ms + jitter) / 1e3

    def _push(self, when: float, to: Port, frame: bytes, passed: bool) -> None:
        self._count += 1
        heapq.heappush(self._in_flight, (when, self._count, to, frame, passed))

    def _hand_on(self) -> None:
        """Deliver what is due."""
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now:
            when, _, to, frame, passed = heapq.heappop(self._in_flight)
            if not passed:
                arrives = to.down.leaves_at(when, len(frame))
                if arrives is None:
                    continue
                if arrives > now:
                    self._push(arrives, to, frame, True)
                    continue
            try:
                os.write(to.tap, frame)
            except OSError:  # the host's device is down, or it reads too slowly: a real one loses the frame, too
                continue


def open_tap(namespace: Namespace) -> int:
    """Make the device in a namespace; returns the descriptor of its other end. Raises OSError where that is refused."""
    with namespace.visit():
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(tap)
        raise
    return tap


def main(descriptors: Sequence[str]) -> None:
    """Serve as the wire between the namespaces with these descriptors."""
    os.nice(-20)  # a busy machine must not make the lines any slower; whoever can make a TAP may do this, too
    wire = Wire([open_tap(Namespace(int(descriptor))) for descriptor in descriptors])
    print("ok", flush=True)
    wire.run()


if __name__ == "__main__":
    main(sys.argv[1:])
