"""Rates of lines, in a simulated time: what they carry, not what buffers take."""

import pytest

from swarm.membership import steady_rate
from swarm.meter import BUFFERED_BYTES, Meter, Outflow

MB = 1 << 20
PIECE = 256 << 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time; a list of one, to be changed."""
    now = [100.0]
    monkeypatch.setattr("swarm.meter.time.monotonic", lambda: now[0])
    return now


def send(outflows: list[Outflow], size: int, rate: float, clock: list[float]) -> None:
    """Send on a line, in turns; buffers take the first BUFFERED_BYTES of each stream at once."""
    for sent in range(0, size, PIECE):
        for outflow in outflows:
            if sent >= BUFFERED_BYTES:
                clock[0] += PIECE / rate
            outflow.moved(PIECE)


@pytest.mark.parametrize("streams", [1, 3])
def test_buffers_do_not_count(clock: list[float], streams: int) -> None:
    line = Meter()
    outflows = [Outflow(line) for _ in range(streams)]
    send(outflows, 16 * MB, 2 * MB, clock)
    assert line.rate == pytest.approx(2 * MB, rel=0.15)
    for outflow in outflows:
        outflow.pause()
    assert not line.is_running


def test_what_only_fills_buffers_says_nothing(clock: list[float]) -> None:
    line = Meter()
    for _ in range(50):
        outflow = Outflow(line)
        outflow.moved(PIECE)
        outflow.pause()
    assert line.rate == 0.0


def test_a_weak_line_is_known_before_its_buffers_are_full(clock: list[float]) -> None:
    line = Meter()
    outflow = Outflow(line)
    for _ in range(8):
        clock[0] += 1.0
        outflow.moved(PIECE)
    assert line.rate == pytest.approx(PIECE)


def test_pauses_do_not_count(clock: list[float]) -> None:
    line = Meter()
    outflow = Outflow(line)
    for _ in range(3):
        send([outflow], 8 * MB, 2 * MB, clock)
        outflow.pause()
        clock[0] += 60
    assert line.rate == pytest.approx(2 * MB, rel=0.15)


def test_a_stream_that_was_given_up_does_not_make_a_line_slow(clock: list[float]) -> None:
    line = Meter()
    Outflow(line).moved(BUFFERED_BYTES)
    assert line.is_running
    clock[0] += 600
    send([Outflow(line)], 64 * MB, 2 * MB, clock)
    assert line.rate == pytest.approx(2 * MB, rel=0.25)


def test_small_changes_of_a_rate_are_not_told() -> None:
    assert steady_rate(0, 0.0) == 0
    assert steady_rate(0, 1000.7) == 1000
    for measured in (760.0, 1000.0, 1300.0):
        assert steady_rate(1000, measured) == 1000
    assert steady_rate(1000, 700.0) == 700 and steady_rate(1000, 1500.0) == 1500
