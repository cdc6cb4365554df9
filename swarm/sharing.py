"""Which source brings which bytes: work is handed out in pieces, and what a slow source would bring last is taken over.

Nothing here waits or sends; `swarm.gather` does.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from swarm.exchange import CHUNK_BYTES, MAX_RANGES, PROGRESS_SECONDS
from swarm.store import ObjectWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Tempo:
    """When a gather turns to somebody else."""

    piece_bytes: int = 4 << 20
    """The least that a source is asked for at once, if there is that much."""
    batch_seconds: float = 4.0
    """A source is asked for what it sends in this time, by its measured rate."""
    takeover_seconds: float = 1.0
    """An idle source takes work over from one that needs longer than this for what is left."""
    progress_seconds: float = PROGRESS_SECONDS
    """A source that sends nothing for this long, not even a sign of life, does not count: a reserve is asked."""
    patience_seconds: float = 3 * PROGRESS_SECONDS
    """The same for one that sends nothing but signs of life."""
    pause_seconds: float = 0.25
    """Before a source is asked again for what it could not bring; doubled each time."""
    longest_pause_seconds: float = 5.0
    look_seconds: float = 0.25
    """Between two looks at what time alone has changed."""


FAILURES = 2
"""After this many in a row a source does not count any more; it is asked again all the same."""
MOST_CALLS = 32
"""Requests that one source is asked at a time; most of them wait there for what is on its way."""
HOPELESS_FAILURES = 4
"""After this many in a row nothing is expected of a source any more."""


@dataclass(slots=True)
class Setback:
    """How often in a row something failed, and until when it is left alone."""

    tries: int = 0
    until: float = 0.0

    def again(self, now: float, tempo: Tempo) -> None:
        """It has failed once more."""
        self.until = now + min(tempo.pause_seconds * 2**self.tries, tempo.longest_pause_seconds)
        self.tries += 1


@dataclass(slots=True, eq=False)
class Call:
    """One request to a source, and what has not come of it yet."""

    source: "Source"
    spans: list["Span"] = field(default_factory=list)
    waiting: bool = False
    """Whether its source waits itself for everything that is left: the call can be ended without a loss."""
    timeout: asyncio.Timeout | None = None
    """Set while it lasts."""

    def end(self) -> None:
        """End it, whatever it is doing."""
        if self.timeout is not None:
            self.timeout.reschedule(asyncio.get_running_loop().time())
            self.timeout = None


@dataclass(slots=True, eq=False)
class Source:
    """A peer that objects are asked of."""

    node: str
    wants: dict[str, "Wanted"] = field(default_factory=dict)
    """Missing objects that it may be asked for, by digest."""
    calls: list[Call] = field(default_factory=list)
    """What it is asked for now. While it waits for all of that, it can be asked for something else."""
    setback: Setback = field(default_factory=Setback)
    banned: bool = False
    asked: float = 0.0
    """When it was asked last."""
    heard: float = 0.0
    """When the last message came."""
    moved: float = 0.0
    """When the last bytes came."""

    @property
    def spans(self) -> list["Span"]:
        """All that it is asked for."""
        return [span for call in self.calls for span in call.spans]

    @property
    def is_idle(self) -> bool:
        """Whether it sends nothing before something has come to it."""
        return all(call.waiting for call in self.calls)

    @property
    def is_full(self) -> bool:
        """Whether it cannot be asked for more before one of its calls has ended."""
        return len(self.calls) >= MOST_CALLS

    def abandon(self) -> None:
        """End its calls, whatever it is doing."""
        for call in self.calls:
            call.end()


@dataclass(slots=True, eq=False)
class Span:
    """Bytes `start` to `end` of an object that a source is asked for; they come in order, `start` moves."""

    wanted: "Wanted"
    call: Call
    start: int
    end: int
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.start

    @property
    def source(self) -> Source:
        """Who is asked for them."""
        return self.call.source

    @property
    def left(self) -> int:
        """Bytes still to come."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Origin:
    """Bytes `start` to `end` of an object came from this node."""

    node: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bytes of an object that are wrong somewhere, and who sent which."""

    path: Path
    origins: tuple[Origin, ...]


@dataclass(slots=True, eq=False)
class Wanted:
    """An object that is not here yet."""

    digest: str
    size: int
    writer: ObjectWriter
    since: float
    """When it was wanted, or a source was added."""
    sources: list[Source] = field(default_factory=list)
    reserve: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """What is being brought."""
    origins: list[Origin] = field(default_factory=list)
    refusals: dict[str, Setback] = field(default_factory=dict)
    """Sources that do not have it, by node."""
    later: dict[str, float] = field(default_factory=dict)
    """Sources that wait for it themselves, and until when nothing of it is to be expected of them."""
    evidence: Evidence | None = None
    """Set when several sources brought wrong bytes; from then on one source brings everything."""
    opened: bool = False

    def unclaimed(self) -> list[tuple[int, int]]:
        """What is missing and nobody brings: from and to, in order."""
        found = []
        claims = sorted((span.start, span.end) for span in self.spans if span.left)
        for start, end in self.writer.gaps:
            for claimed, until in claims:
                if start <= claimed < end:
                    if start < claimed:
                        found.append((start, claimed))
                    start = until
            if start < end:
                found.append((start, end))
        return found

    def start_over(self) -> None:
        """Throw away what has come."""
        if self.opened:
            self.writer.open()
        self.origins.clear()

    def distrust(self, node: str) -> None:
        """Throw away what came from a node, unless the whole is being checked anyway."""
        if not self.writer.gaps:
            return
        for origin in self.origins:
            if origin.node == node:
                self.writer.forget(origin.start, origin.end)
        self.origins = [origin for origin in self.origins if origin.node != node]


class Sharing:
    """Hands out what is missing to the sources that may bring it."""

    def __init__(self, tempo: Tempo) -> None:
        self.wanted: dict[str, Wanted] = {}
        """By digest, in the order of wanting."""
        self.sources: dict[str, Source] = {}
        self._tempo = tempo

    def add_source(self, wanted: Wanted, node: str, now: float) -> Source:
        """Let a node be asked for an object."""
        source = self.sources.setdefault(node, Source(node))
        if source not in wanted.sources:
            wanted.sources.append(source)
            wanted.since = now
            source.wants[wanted.digest] = wanted
        return source

    def remove(self, wanted: Wanted) -> None:
        """An object is here."""
        del self.wanted[wanted.digest]
        for source in wanted.sources:
            del source.wants[wanted.digest]

    def works(self, source: Source, wanted: Wanted, now: float) -> bool:
        """Whether an object can be expected of a source before long."""
        refusal = wanted.refusals.get(source.node)
        return (
            not source.banned
            and source.setback.tries < FAILURES
            and (refusal is None or refusal.tries < FAILURES)
            and now - max(source.heard, source.moved, wanted.since) < self._tempo.progress_seconds
            and now - max(source.moved, wanted.since) < self._tempo.patience_seconds
        )

    def next_reserve(self, wanted: Wanted, now: float) -> str | None:
        """A node that must be asked now because no source works, if there is one left."""
        if not wanted.reserve or any(self.works(source, wanted, now) for source in wanted.sources):
            return None
        return wanted.reserve.pop(0)

    def is_hopeless(self, wanted: Wanted, now: float) -> bool:
        """Whether nobody is left of whom an object can be expected."""
        return not wanted.reserve and all(
            source.banned
            or source.setback.tries >= HOPELESS_FAILURES
            or wanted.refusals.get(source.node, Setback()).tries >= HOPELESS_FAILURES
            or now - max(source.moved, wanted.since) >= self._tempo.patience_seconds
            for source in wanted.sources
        )

    def assign(self, source: Source, rate: Callable[[str], float], now: float) -> Call | None:
        """What a source is to bring next: what nobody brings yet, or else a share of a slower one's work. While it
        brings something else, this is only what nobody else can bring.

        Args:
            source: a peer.
            rate: bytes/s that a node sends; 0 when unknown.
            now: time of the loop.
        """
        if source.banned or source.is_full or now < source.setback.until:
            return None
        budget = max(self._tempo.piece_bytes, int(rate(source.node) * self._tempo.batch_seconds))
        call = Call(source)
        call.spans = self._take(call, budget, now)
        if source.is_idle and not call.spans:
            call.spans = self._take_over(call, budget, rate, now)
        if not call.spans:
            return None
        for span in call.spans:
            span.wanted.spans.append(span)
        source.calls.append(call)
        source.asked = now
        return call

    def has_work(self, source: Source, now: float) -> bool:
        """Whether there is something for a source that nobody brings."""
        return any(
            self._may_bring(source, wanted, now) and not (wanted.evidence and wanted.spans) and wanted.unclaimed()
            for wanted in source.wants.values()
        )

    def _may_bring(self, source: Source, wanted: Wanted, now: float) -> bool:
        refusal = wanted.refusals.get(source.node)
        return wanted.digest in source.wants and (refusal is None or refusal.until <= now)

    def _take(self, call: Call, budget: int, now: float) -> list[Span]:
        source, spans = call.source, list[Span]()
        for wanted in source.wants.values():
            if not self._may_bring(source, wanted, now) or (wanted.evidence and wanted.spans):
                continue
            # what only this source can bring is asked of it at once: it may have the last of it first
            alone = all(other is source or not self.works(other, wanted, now) for other in wanted.sources)
            if not alone and not source.is_idle:
                continue
            whole = alone or wanted.evidence is not None
            for start, end in wanted.unclaimed():
                if len(spans) == MAX_RANGES or (budget <= 0 and not alone):
                    break
                end = end if whole else min(end, start + max(budget, self._tempo.piece_bytes))
                spans.append(Span(wanted, call, start, end))
                if wanted.later.get(source.node, 0.0) <= now:  # otherwise it will not come yet
                    budget -= end - start
        return spans

    def _take_over(self, call: Call, budget: int, rate: Callable[[str], float], now: float) -> list[Span]:
        """Relieve the source that would finish last, so that both would finish together."""
        source = call.source
        latest, victim, pace = self._tempo.takeover_seconds, None, 0.0
        for other in self.sources.values():
            if other is not source and any(self._can_take(source, span, now) for span in other.spans):
                speed = self._pace(other, rate(other.node), now)
                left = sum(span.left for span in other.spans) / speed if speed else float("inf")
                if left > latest:
                    latest, victim, pace = left, other, speed
        if victim is None:
            return []
        spans = [span for span in victim.spans if self._can_take(source, span, now)]
        mine = rate(source.node) or pace
        rest = sum(span.left for span in spans)
        amount = int(rest * mine / (mine + pace)) if pace else rest
        if rest - amount < CHUNK_BYTES and mine >= 2 * pace:
            amount = rest  # what would remain is not worth a call
        elif amount < CHUNK_BYTES:
            return []
        return list(self._cut(call, victim, spans, min(budget, amount)))

    def _can_take(self, source: Source, span: Span, now: float) -> bool:
        wanted = span.wanted
        return (
            span.left > 0
            and wanted.evidence is None
            and self._may_bring(source, wanted, now)
            and wanted.later.get(source.node, 0.0) <= now
        )

    def _cut(self, call: Call, victim: Source, spans: list[Span], amount: int) -> Iterable[Span]:
        """Move bytes from the end of what the victim is asked for."""
        for span in spans[: -MAX_RANGES - 1 : -1]:
            if amount <= 0:
                break
            size = min(span.left, amount)
            span.end -= size
            amount -= size
            yield Span(span.wanted, call, span.end, span.end + size)
            if not span.left:
                self.release(span)
        for other in victim.calls:
            if other.waiting and not other.spans:
                other.end()

    def _pace(self, source: Source, rate: float, now: float) -> float:
        """Bytes/s that can be expected of a busy source; infinite when it is too early to tell."""
        if source.is_idle:
            return 0.0
        quiet = now - max(source.moved, source.asked)
        if quiet < self._tempo.takeover_seconds:
            return rate or float("inf")
        return min(rate, CHUNK_BYTES / quiet)

    def release(self, span: Span) -> None:
        """A span is over: it has come, or was taken over, or its source has failed."""
        span.call.spans.remove(span)
        span.wanted.spans.remove(span)
        if span.left and span.wanted.evidence:
            span.wanted.start_over()
        elif span.start > span.first:
            span.wanted.origins.append(Origin(span.source.node, span.first, span.start))
