"""Fetches objects from many peers at once: each serves in proportion to its speed, and none is waited for in vain."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

from swarm.exchange import CallFailed, Exchange, Misbehaved, Writer
from swarm.identity import short
from swarm.sharing import HOPELESS_FAILURES, Call, Evidence, Origin, Setback, Sharing, Source, Span, Tempo, Wanted

_BUFFER = 1 << 20

log = logging.getLogger(__name__)


class Gather:
    """Brings objects here. Say what is wanted, at any time, and let it run."""

    def __init__(
        self,
        exchange: Exchange,
        writer: Writer,
        *,
        on_arrival: Callable[[str], None] = lambda digest: None,
        on_liar: Callable[[str], None] = lambda node: None,
        tempo: Tempo | None = None,
    ) -> None:
        """Args:
        exchange: makes the calls, knows the rates of the peers, and lets those wait that ask for what is on its way.
        writer: opens the place for one object of a digest and a size.
        on_arrival: called with the digest of each object that is here now.
        on_liar: called with a node that sent wrong bytes; this gather asks it for nothing any more.
        tempo: when to turn to somebody else.
        """
        self._exchange = exchange
        self._writer = writer
        self._on_arrival = on_arrival
        self._on_liar = on_liar
        self._tempo = tempo or Tempo(progress_seconds=exchange.progress_seconds)
        self._sharing = Sharing(self._tempo)
        self._here: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        """Set when something has come, or may have become hopeless."""
        self._offered = asyncio.Event()
        """Set when there may be work for idle sources."""
        self._unexpected: set[str] = set()
        """What peers need not wait for: it is here, or it is hopeless."""

    def want(self, digest: str, size: int, sources: Sequence[str], reserve: Sequence[str] = ()) -> None:
        """Ask for an object; what is wanted already gets the additional sources, what is here is ignored.

        Args:
            digest: of the whole object.
            size: bytes, at least 1.
            sources: nodes that may be asked at once and share the work.
            reserve: nodes that are asked one after the other, each when no one before it works.
        """
        if digest in self._here:
            return
        if size < 1:
            raise ValueError(f"{digest[:12]}: an object of {size} bytes")
        now = self._now()
        wanted = self._sharing.wanted.get(digest)
        if wanted is None:
            wanted = Wanted(digest, size, self._writer(digest, size), since=now)
            self._sharing.wanted[digest] = wanted
            self._exchange.arrivals.expect(digest)
        me = self._exchange.network.node_id
        for node in sources:
            if node != me:
                self._add_source(wanted, node)
        known = {source.node for source in wanted.sources} | set(wanted.reserve) | {me}
        wanted.reserve += [node for node in dict.fromkeys(reserve) if node not in known]
        self._offer(wanted.sources)

    def lose(self, node: str) -> None:
        """A node does not answer: turn to others at once. It is asked again when everybody else has been, or later."""
        now = self._now()
        if (source := self._sharing.sources.get(node)) is not None:
            source.setback = Setback(HOPELESS_FAILURES, now + self._tempo.longest_pause_seconds)
            source.abandon()
        for wanted in self._sharing.wanted.values():
            if node in wanted.reserve:
                wanted.reserve.remove(node)
                wanted.reserve.append(node)
        self._notify()

    @property
    def missing(self) -> list[str]:
        """Digests of what is wanted and not here yet."""
        return list(self._sharing.wanted)

    async def settled(self, digests: Collection[str] | None = None) -> list[str]:
        """Wait until everything that is wanted, or of it these digests, is here or given up; returns the digests of
        what nobody has.

        These are still looked for. What a peer is fetching itself is not given up.
        """
        while True:
            open_ones = [w for w in self._sharing.wanted.values() if digests is None or w.digest in digests]
            if all(self._sharing.is_hopeless(wanted, self._now()) for wanted in open_ones):
                return [wanted.digest for wanted in open_ones]
            await self._changed.wait()

    async def run(self) -> None:
        """Work until cancelled. Raises an ExceptionGroup of OSError when this node's own disk fails."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for source in self._sharing.sources.values():
                    self._group.create_task(self._employ(source))
                self._group.create_task(self._look())
        finally:
            self._group = None
            for wanted in self._sharing.wanted.values():
                wanted.writer.close()
                if wanted.evidence is not None:
                    wanted.evidence.path.unlink(missing_ok=True)
                if wanted.digest not in self._unexpected:
                    self._exchange.arrivals.settle(wanted.digest)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _offer(self, sources: Iterable[Source]) -> None:
        """There may be work for these sources: they look, and those that can only wait end a call for it."""
        self._offered.set()
        self._offered = asyncio.Event()
        now = self._now()
        for source in sources:
            if source.is_idle and source.is_full and self._sharing.has_work(source, now):
                source.calls[0].end()

    def _add_source(self, wanted: Wanted, node: str) -> None:
        is_new = node not in self._sharing.sources
        source = self._sharing.add_source(wanted, node, self._now())
        if is_new and self._group is not None:
            self._group.create_task(self._employ(source))

    async def _look(self) -> None:
        """Turn to the reserves of what does not come, and look at what time has changed."""
        while True:
            now = self._now()
            for wanted in self._sharing.wanted.values():
                if (node := self._sharing.next_reserve(wanted, now)) is not None:
                    log.debug("%s: %s is asked in reserve", wanted.digest[:12], short(node))
                    self._add_source(wanted, node)
                self._expect(wanted, not self._sharing.is_hopeless(wanted, now))
            self._notify()
            self._offer(self._sharing.sources.values())
            await asyncio.sleep(self._tempo.look_seconds)

    def _expect(self, wanted: Wanted, expected: bool) -> None:
        """Whether peers that ask for an object are to wait for it here."""
        if not expected and wanted.digest not in self._unexpected:
            self._unexpected.add(wanted.digest)
            self._exchange.arrivals.settle(wanted.digest)
        elif expected and wanted.digest in self._unexpected:
            self._unexpected.discard(wanted.digest)
            self._exchange.arrivals.expect(wanted.digest)

    # one source

    async def _employ(self, source: Source) -> None:
        """Ask a source for what there is for it."""
        assert self._group is not None
        while not source.banned:
            call = self._sharing.assign(source, self._exchange.rate, self._now())
            if call is not None:
                self._group.create_task(self._ask(source, call))
            else:
                await self._offered.wait()

    async def _ask(self, source: Source, call: Call) -> None:
        """Make one call to a source, and give back what has not come."""
        try:
            await self._receive(source, call)
        except Misbehaved as error:
            log.warning("%s; it is not asked again", error)
            self._ban(source)
        except CallFailed as error:
            log.debug("gather: %s", error)
            source.setback.again(self._now(), self._tempo)
        finally:
            for span in list(call.spans):
                self._sharing.release(span)
            source.calls.remove(call)
            if source.banned:
                self._disown(source)
        self._offer(self._sharing.sources.values())

    async def _receive(self, source: Source, call: Call) -> None:
        """Bring what a source is asked for, until all of it is here or taken over by others."""
        spans = list(call.spans)
        parts = self._exchange.stream(source.node, [(s.wanted.digest, s.start, s.left) for s in spans])
        try:
            async with asyncio.timeout(None) as call.timeout, aclosing(parts):
                async for part in parts:
                    call.waiting = False
                    source.heard = self._now()
                    if source.banned:
                        return
                    if part is None:
                        self._wait_with(source, call)
                    elif not part.data:
                        self._refused(spans[part.index])
                    elif not await self._arrived(spans[part.index], part.data):
                        return  # the rest is brought by somebody else
                    if not call.spans:
                        return
        except TimeoutError:
            if call.timeout is not None:
                raise
        finally:
            call.timeout = None

    def _wait_with(self, source: Source, call: Call) -> None:
        """A source waits for everything that a call is about; if there is more, it is asked for that."""
        now = self._now()
        for span in call.spans:
            span.wanted.later[source.node] = now + self._tempo.takeover_seconds
        call.waiting = True
        self._offer([source])

    def _refused(self, span: Span) -> None:
        """A source does not have what it was asked for."""
        if span.left:
            self._sharing.release(span)
            node = span.source.node
            span.wanted.refusals.setdefault(node, Setback()).again(self._now(), self._tempo)
            self._offer(span.wanted.sources)

    async def _arrived(self, span: Span, data: bytes) -> bool:
        """Write what has come of a span; False when others bring what comes next."""
        wanted, source = span.wanted, span.source
        fits = len(data) <= span.left
        if data := data[: span.left]:
            if not wanted.opened:
                wanted.writer.open()
                wanted.opened = True
            wanted.writer.write_at(span.start, data)
            span.start += len(data)
            source.moved = self._now()
            source.setback = Setback()
            wanted.refusals.pop(source.node, None)
            if not span.left:
                self._sharing.release(span)
                if not wanted.writer.gaps:
                    assert self._group is not None
                    # in a task of its own: the end of the call must not leave the object half finished
                    await asyncio.shield(self._group.create_task(self._finish(wanted)))
        return fits

    # one object

    async def _finish(self, wanted: Wanted) -> None:
        """All bytes of an object have come."""
        try:
            await asyncio.to_thread(wanted.writer.finish)
        except ValueError:
            self._convict(wanted)
        else:
            liars: set[str] = set()
            if wanted.evidence is not None:
                liars = await asyncio.to_thread(_liars, wanted.evidence, wanted.writer.final)
            self._sharing.remove(wanted)
            self._here.add(wanted.digest)
            self._expect(wanted, False)
            self._on_arrival(wanted.digest)
            for node in liars:
                self._expose(node, wanted)
        self._notify()

    def _convict(self, wanted: Wanted) -> None:
        """The bytes of an object are wrong: one source has lied, or one of several, which is to be found out."""
        origins, nodes = tuple(wanted.origins), {origin.node for origin in wanted.origins}
        if len(nodes) == 1:
            self._expose(nodes.pop(), wanted)
        else:
            log.info("%s: wrong bytes from one of %d nodes", wanted.digest[:12], len(nodes))
            wanted.evidence = Evidence(wanted.writer.set_aside(), origins)
        wanted.start_over()

    def _expose(self, node: str, wanted: Wanted) -> None:
        source = self._sharing.sources[node]
        if not source.banned:
            log.warning("%s sent wrong bytes for %s; it is not asked again", short(node), wanted.digest[:12])
            self._ban(source)

    def _ban(self, source: Source) -> None:
        """Ask a source for nothing any more, and drop what it has sent of objects that are not complete."""
        source.banned = True
        source.abandon()
        self._disown(source)
        self._on_liar(source.node)

    def _disown(self, source: Source) -> None:
        for wanted in source.wants.values():
            wanted.distrust(source.node)


def _liars(evidence: Evidence, right: Path) -> set[str]:
    """The nodes whose bytes differ from the right ones. The evidence is removed."""
    with open(evidence.path, "rb") as wrong, open(right, "rb") as good:
        liars = {origin.node for origin in evidence.origins if _differs(wrong, good, origin)}
    evidence.path.unlink()
    return liars


def _differs(wrong: BinaryIO, right: BinaryIO, origin: Origin) -> bool:
    for start in range(origin.start, origin.end, _BUFFER):
        size = min(_BUFFER, origin.end - start)
        wrong.seek(start)
        right.seek(start)
        if wrong.read(size) != right.read(size):
            return True
    return False
