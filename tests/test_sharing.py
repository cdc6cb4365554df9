"""Who brings what, in a simulated time: every byte once, all sources busy to the end, nobody waited for."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.exchange import CHUNK_BYTES
from swarm.sharing import MOST_CALLS, Setback, Sharing, Tempo, Wanted
from swarm.store import ObjectWriter

TEMPO = Tempo(piece_bytes=4 * CHUNK_BYTES)


class NoFile(ObjectWriter):
    """Keeps account of the gaps, and no bytes."""

    def write_at(self, offset: int, chunk: bytes) -> None:
        self._close_gap(offset, offset + len(chunk))


@dataclass
class Simulation:
    """Sources that send chunks at their own pace."""

    speeds: dict[str, float]
    """Bytes/s; 0 never sends anything."""
    sizes: list[int]
    now: float = 0.0
    sharing: Sharing = field(default_factory=lambda: Sharing(TEMPO))
    sent: dict[str, int] = field(default_factory=dict)
    wasted: int = 0

    def run(self) -> None:
        for number, size in enumerate(self.sizes):
            writer = NoFile(Path("unused"), str(number), size, durable=False, place=lambda path: None)
            wanted = self.sharing.wanted[str(number)] = Wanted(str(number), size, writer, since=0.0)
            for node in self.speeds:
                self.sharing.add_source(wanted, node, 0.0)
        self.sent = dict.fromkeys(self.speeds, 0)
        due = dict.fromkeys(self.speeds, 0.0)
        while self.sharing.wanted:
            node = min(due, key=lambda name: due[name])
            self.now = due[node]
            due[node] = self.step(node)
            assert self.now < 1e5, "it never ends"

    def step(self, node: str) -> float:
        """Let a source do its next thing; returns when it does the one after."""
        source, speed = self.sharing.sources[node], self.speeds[node]
        rate = {name: speed if self.sent[name] else 0.0 for name, speed in self.speeds.items()}
        if span := next((span for span in source.spans if span.left), None):
            size = min(CHUNK_BYTES, span.left)
            span.wanted.writer.write_at(span.start, bytes(size))  # refuses what has come before
            span.start += size
            self.sent[node] += size
            source.moved = source.heard = self.now
            if not span.left:
                self.sharing.release(span)
            if not span.wanted.writer.gaps:
                assert not span.wanted.spans
                self.sharing.remove(span.wanted)
        source.calls = [call for call in source.calls if call.spans]
        if not source.calls:
            self.sharing.assign(source, rate.__getitem__, self.now)
        begun = sorted(
            (span.wanted.digest, span.start, span.end) for s in self.sharing.sources.values() for span in s.spans
        )
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(begun)), "no byte twice at once"
        ahead = next((span for span in source.spans if span.left), None)
        if ahead is None:
            return self.now + TEMPO.look_seconds
        return self.now + min(CHUNK_BYTES, ahead.left) / speed if speed else float("inf")


speeds = st.lists(st.floats(1e5, 1e8), min_size=1, max_size=6)
sizes = st.lists(st.integers(1, 40 * CHUNK_BYTES), min_size=1, max_size=12)


@given(speeds, st.integers(0, 2), sizes)
def test_all_sources_share_the_work_until_the_end(rates: list[float], silent: int, sizes: list[int]) -> None:
    everybody = {f"node {number}": rate for number, rate in enumerate([*rates, *[0.0] * silent])}
    simulation = Simulation(everybody, sizes)
    simulation.run()
    assert sum(simulation.sent.values()) == sum(sizes)
    # at the very least as good as the fastest one alone, and, with enough to do, nearly as good as all together
    ideal = sum(sizes) / sum(rates)
    chunk = CHUNK_BYTES / max(rates)
    assert simulation.now < ideal + 10 * chunk + (5 if silent else 3) * TEMPO.takeover_seconds


def test_each_serves_in_proportion_to_its_speed() -> None:
    simulation = Simulation({"fast": 40e6, "middle": 20e6, "slow": 2e6}, [1 << 30])
    simulation.run()
    total = sum(simulation.sent.values())
    shares = {node: sent / total for node, sent in simulation.sent.items()}
    assert shares == pytest.approx({"fast": 40 / 62, "middle": 20 / 62, "slow": 2 / 62}, rel=0.2)


def test_small_objects_are_not_cut() -> None:
    sharing = Sharing(TEMPO)
    for number in range(5):
        writer = NoFile(Path("unused"), str(number), CHUNK_BYTES, durable=False, place=lambda path: None)
        sharing.wanted[str(number)] = Wanted(str(number), CHUNK_BYTES, writer, since=0.0)
        for node in ("a", "b"):
            sharing.add_source(sharing.wanted[str(number)], node, 0.0)
    for node in ("a", "b"):
        assert sharing.assign(sharing.sources[node], lambda node: 0.0, 0.0) is not None
    first, second = (sharing.sources[node].spans for node in ("a", "b"))
    assert [span.wanted.digest for span in first] == ["0", "1", "2", "3"]
    assert [span.wanted.digest for span in second] == ["4"]
    assert all(span.left == CHUNK_BYTES for span in [*first, *second])


def test_what_only_one_source_can_bring_is_asked_of_it_at_once() -> None:
    sharing = Sharing(TEMPO)
    for number in range(50):
        writer = NoFile(Path("unused"), str(number), 1 << 30, durable=False, place=lambda path: None)
        sharing.wanted[str(number)] = Wanted(str(number), 1 << 30, writer, since=0.0)
        sharing.add_source(sharing.wanted[str(number)], "a", 0.0)
    assert sharing.assign(sharing.sources["a"], lambda node: 0.0, 0.0) is not None
    assert len(sharing.sources["a"].spans) == 50


def test_what_only_one_source_can_bring_is_asked_of_it_while_it_brings_something_else() -> None:
    sharing = Sharing(TEMPO)

    def want(digest: str, *nodes: str) -> None:
        writer = NoFile(Path("unused"), digest, CHUNK_BYTES, durable=False, place=lambda path: None)
        sharing.wanted[digest] = Wanted(digest, CHUNK_BYTES, writer, since=0.0)
        for node in nodes:
            sharing.add_source(sharing.wanted[digest], node, 0.0)

    def asked() -> list[str]:
        call = sharing.assign(sharing.sources["a"], lambda node: 0.0, 0.0)
        return [span.wanted.digest for span in call.spans] if call is not None else []

    want("first", "a")
    assert asked() == ["first"]
    want("of both", "a", "b")
    want("second", "a")
    assert asked() == ["second"]
    for call in sharing.sources["a"].calls:
        call.waiting = True
    assert asked() == ["of both"], "it has nothing else to do"
    for number in range(2 * MOST_CALLS):
        want(f"number {number}", "a")
        asked()
    assert len(sharing.sources["a"].calls) == MOST_CALLS


def test_pauses_grow_to_a_bound() -> None:
    setback, now, pauses = Setback(), 100.0, []
    for _ in range(8):
        setback.again(now, TEMPO)
        pauses.append(setback.until - now)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0] and pauses[-1] == TEMPO.longest_pause_seconds
