"""The lab: what its lines do is measured with plain sockets, and nothing of it is left behind."""

import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.lab import lab as lab_module
from node.lab.lab import Lab, unavailable
from node.lab.line import Line
from node.lab.wire import QUEUE_BYTES, QUEUE_SECONDS, Lane, Order

REASON = unavailable()
needs_lab = pytest.mark.skipif(bool(REASON), reason=REASON)
PORT = 5000


@contextmanager
def sockets(lab: Lab, *hosts: int) -> Iterator[list[socket.socket]]:
    """A datagram socket in each host."""
    made = []
    try:
        for host in hosts:
            with lab.visit(host):
                made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            made[-1].bind((lab.address(host), PORT))
        yield made
    finally:
        for each in made:
            each.close()


def hears(sender: socket.socket, receiver: socket.socket, seconds: float = 0.3) -> bool:
    """Whether a datagram arrives in time."""
    mark = os.urandom(8)
    sender.sendto(mark, receiver.getsockname())
    deadline = time.monotonic() + seconds
    while select.select([receiver], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if receiver.recv(64) == mark:
            return True
    return False


def round_trip(a: socket.socket, b: socket.socket) -> float:
    """Milliseconds from a to b and back: the median of some, on a machine that may be busy."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        assert hears(a, b, 5) and hears(b, a, 5)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


@needs_lab
@pytest.mark.swarm
def test_two_lines_add_their_delays() -> None:
    with Lab(3, delay_ms=10) as lab, sockets(lab, 1, 2, 3) as (one, two, three):
        assert 40 <= round_trip(one, two) < 55
        lab.set(3, delay_ms=40)
        assert 100 <= round_trip(one, three) < 115
        assert 40 <= round_trip(one, two) < 55


@needs_lab
def test_jitter_spreads_the_times_and_lets_frames_overtake() -> None:
    with Lab(2, delay_ms=20, jitter_ms=15) as lab, sockets(lab, 1, 2) as (one, two):
        for number in range(200):
            one.sendto(bytes([number]), two.getsockname())
        two.settimeout(5)
        arrived = [two.recv(1)[0] for _ in range(200)]
    assert sorted(arrived) == list(range(200)) != arrived


def drain(end: socket.socket, size: int) -> None:
    """Read so many bytes."""
    while size > 0 and (data := end.recv(1 << 16)):
        size -= len(data)


@needs_lab
@pytest.mark.swarm
def test_a_line_carries_its_rate_both_ways_at_once() -> None:
    size, rate = 1_500_000, 8e6
    with Lab(2, rate_mbit=rate / 1e6) as lab:
        with lab.visit(1):
            server = socket.create_server((lab.address(1), PORT))
        with lab.visit(2):
            there = socket.create_connection((lab.address(1), PORT), 10)
        here, _ = server.accept()
        with server, here, there:
            start = time.monotonic()
            threads = [threading.Thread(target=end.sendall, args=(bytes(size),)) for end in (here, there)]
            threads += [threading.Thread(target=drain, args=(end, size)) for end in (here, there)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.monotonic() - start
        traffic = lab.traffic(1)
    assert 0.6 * rate < 8 * size / seconds < rate
    for payload in (traffic.sent_payload, traffic.received_payload):
        assert size <= payload < 1.1 * size, "headers are not payload, and little is sent twice"


@needs_lab
@pytest.mark.swarm
def test_loss_takes_its_part() -> None:
    sent = 2000
    with Lab(2, loss=0.1) as lab, sockets(lab, 1, 2) as (one, two):
        received = 0
        for _ in range(sent // 50):
            for _ in range(50):
                one.sendto(b"x", two.getsockname())
            while select.select([two], [], [], 0.05)[0]:
                received += len(two.recv(1))
    assert 0.15 < 1 - received / sent < 0.23, "two lines with a tenth each lose 19 %; 4.5 standard errors"


@needs_lab
@pytest.mark.swarm
def test_a_cut_host_hears_nothing_and_is_not_told() -> None:
    with Lab(3) as lab, sockets(lab, 1, 2, 3) as (one, two, three):
        lab.cut(2)
        assert not hears(one, two) and not hears(two, one) and hears(one, three)
        with lab.visit(2), socket.socket() as caller:
            caller.settimeout(1.5)
            with pytest.raises(TimeoutError):  # and not "no route to host", which no real line says
                caller.connect((lab.address(1), PORT))
        lab.split([[1, 2], [3]])
        assert not hears(one, two), "a cut host stays cut whatever becomes of its network"
        lab.heal(2)
        assert hears(one, two) and not hears(two, three)


@needs_lab
@pytest.mark.swarm
def test_networks_part_and_join() -> None:
    with Lab(4) as lab, sockets(lab, 1, 2, 3, 4) as ends:
        lab.split([[1, 2], [3, 4]])
        reached = [[hears(a, b, 0.15) for b in ends if b is not a] for a in ends]
        lab.join()
        assert all(hears(a, b) for a in ends for b in ends if b is not a)
    assert reached == [[True, False, False], [True, False, False], [False, False, True], [False, False, True]]


@needs_lab
def test_labs_side_by_side_do_not_meet_each_other_or_the_machine() -> None:
    with Lab(2) as first, Lab(2) as second, sockets(first, 1, 2) as one, sockets(second, 1, 2) as other:
        assert one[0].getsockname() == other[0].getsockname()
        assert hears(one[0], one[1]) and hears(other[0], other[1])
        assert not hears(one[0], other[1], 0.1)
        with socket.create_server(("127.0.0.1", 0)) as outside, first.visit(1), socket.socket() as caller:
            assert caller.connect_ex(outside.getsockname()) != 0


GRANDCHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@needs_lab
def test_nothing_is_left_behind_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "TERM_SECONDS", 0.2)
    devices, descriptors = network_devices(), len(os.listdir("/proc/self/fd"))
    with suppress(ZeroDivisionError), Lab(2) as lab:
        stubborn = lab.exec(1, [sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, text=True)
        stopped = lab.exec(2, ["sleep", "600"])
        stopped.send_signal(signal.SIGSTOP)
        grandchild = int(stubborn.stdout.readline())  # type: ignore[union-attr]
        os.kill(grandchild, 0)
        stubborn.stdout.close()  # type: ignore[union-attr]
        1 / 0  # noqa: B018
    assert stubborn.returncode == -signal.SIGKILL and stopped.returncode is not None
    assert not is_alive(grandchild)
    assert network_devices() == devices, "no device has come to the machine's own network"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "with a namespace's last descriptor it is gone"


@needs_lab
def test_a_lab_vanishes_with_a_killed_process() -> None:
    program = (
        "import sys, time; from node.lab.lab import Lab; lab = Lab(2).__enter__(); "
        "print(lab.exec(1, ['sleep', '600']).pid, lab._wire.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]  # type: ignore[union-attr]
        assert len(pids) == 2 and all(map(is_alive, pids))
        process.kill()
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def network_devices() -> set[str]:
    """Of the namespace that this process is in."""
    return {line.split(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_lab
@pytest.mark.parametrize("networks", [[[1, 2]], [[1, 2, 3], [3]], [[1, 2, 3, 4]]])
def test_a_split_names_every_host_once(networks: list[list[int]]) -> None:
    with Lab(3) as lab, pytest.raises(ValueError, match="once"):
        lab.split(networks)


def test_what_is_no_host_or_line_is_refused() -> None:
    for hosts in (0, 201):
        with pytest.raises(ValueError, match="hosts"):
            Lab(hosts)
    with pytest.raises(ValueError, match="not a line"):
        Lab(2, loss=1.1)
    with pytest.raises(ValueError, match="not a line"):
        Lab(2, delay_ms=-1)
    with pytest.raises(ValueError, match="no host 3"):
        Lab(2).cut(3)


def test_whoever_has_no_rights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in unavailable()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in unavailable()


FRAMES = st.lists(st.tuples(st.floats(0, 0.05), st.integers(60, 1514)), min_size=1, max_size=200)


@given(FRAMES, st.floats(1e4, 1e8))
def test_a_lane_is_never_faster_than_its_rate(frames: list[tuple[float, int]], rate: float) -> None:
    lane, now, left = Lane(rate), 0.0, list[tuple[float, int]]()
    for pause, size in frames:
        now += pause
        leaves = lane.leaves_at(now, size)
        waited = max(0.0, lane.free_at - now)
        assert waited <= max(QUEUE_SECONDS, QUEUE_BYTES / rate) + size / rate + 1e-9
        if leaves is not None:
            assert leaves >= now + size / rate
            left.append((leaves, size))
    for (before, _), (after, size) in pairwise(left):
        assert after - before >= size / rate - 1e-9


LINES = st.builds(Line, delay_ms=st.floats(0, 1e4), rate_mbit=st.floats(0, 1e4), loss=st.floats(0, 1))


@given(st.lists(LINES, max_size=5))
def test_an_order_survives_its_way_to_the_wire(lines: list[Line]) -> None:
    order = Order(lines, list(range(len(lines))))
    assert Order.decode(order.encode()) == order
    assert order.encode().count(b"\n") == 1
