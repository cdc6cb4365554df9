"""Calls between nodes: documents are posted and read, shards are streamed by digest.

Every message is one `BytesValue` of protobuf's own well-known types, so no generated code is shipped.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from typing import AsyncIterator, BinaryIO, Protocol  # noqa: UP035 - hivemind knows a stream by typing's name

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from swarm.arrivals import Arrivals
from swarm.documents import Document, Rejected, Signed, open_document
from swarm.identity import NodeId
from swarm.meter import Meter, Outflow
from swarm.network import Network
from swarm.store import ObjectWriter

CHUNK_BYTES = 256 << 10
"""Bytes in one message of a stream: larger messages are slower through p2pd."""
MAX_RANGES = 4096
"""Ranges of objects that one request may name."""
MAX_REQUEST_BYTES = 512 << 10
"""More than the longest honest request."""
CALL_SECONDS = 5.0
"""Bound on one short call."""
PROGRESS_SECONDS = 10.0
"""A stream that brings nothing for this long, not even a sign of life, is given up."""
LIFE_SECONDS = 1.0
"""Between two signs of life of a node that waits for an object itself."""
_INDEX = struct.Struct(">I")

Writer = Callable[[str, int], ObjectWriter]
Range = tuple[str, int, int]
"""Digest of an object, offset and length in bytes of a part of it."""

log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A peer did not answer, or not as it should. Caught where another peer can be asked."""


class Misbehaved(CallFailed):
    """A peer sent what no honest one sends."""


@dataclass(frozen=True, slots=True)
class Part:
    """The next bytes of one range of a request; no bytes when the peer will not send that range."""

    index: int
    data: bytes


class Handler(Protocol):
    """What the exchange needs from the node behind it."""

    def receive(self, signed: Signed[Document]) -> str:
        """Take a posted document whose signature holds; returns why it is refused, or an empty string."""

    def document(self, kind: str, number: int, author: str) -> bytes | None:
        """The envelope of a document this node has, of this node's own when no author is named."""

    def object(self, digest: str) -> Path | None:
        """Where this node has an object."""

    def position(self) -> tuple[str, int]:
        """Digest and round of this node's head."""

    def meet(self, node: NodeId, digest: str, number: int) -> None:
        """Hear from a peer what its head is."""


class Exchange(ServicerBase):
    """Serves a node's documents and objects to its peers, and calls theirs."""

    def __init__(
        self,
        network: Network,
        run_id: str,
        handler: Handler | None,
        *,
        progress_seconds: float = PROGRESS_SECONDS,
        life_seconds: float = LIFE_SECONDS,
    ) -> None:
        """Args:
        network, run_id: this node's place, and the run the calls are about.
        handler: the node that is served; without one this exchange only calls.
        progress_seconds: a stream that brings nothing for this long is given up.
        life_seconds: between two signs of life of a stream that waits for an object.
        """
        self.network = network
        self.run_id = run_id
        self.progress_seconds = progress_seconds
        self.life_seconds = life_seconds
        self.arrivals = Arrivals()
        """Objects on their way to this node; a peer that asks for one waits for it."""
        self.sent = 0
        """Bytes of documents and objects sent."""
        self.received = 0
        self.heard: dict[str, float] = {}
        """When the last message of a stream came from each peer, on the event loop's clock."""
        self.on_served: Callable[[], None] = lambda: None
        """Called when a peer has had the last range of an object that it asked for."""
        self._served: set[str] = set()
        """Objects of which a peer has had the last range it asked for."""
        self._progressed = asyncio.Event()
        self._uplink = Meter()
        self._downlinks: dict[str, Meter] = {}
        self._node = handler
        self._deliveries: set[asyncio.Task[None]] = set()
        self._namespace = f"spes-{run_id[:16]}"

    @property
    def _handler(self) -> Handler:
        assert self._node is not None, "an exchange without a handler only calls"
        return self._node

    async def start(self) -> None:
        """Serve from now on."""
        await self.add_p2p_handlers(self.network.p2p, namespace=self._namespace)

    # what peers call

    async def rpc_post(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Take one signed document; answers why it was refused, or nothing."""
        self.received += len(request.value)
        try:
            refusal = self._handler.receive(open_document(request.value, self.run_id))
        except Rejected as error:
            refusal = str(error)
        if refusal:
            log.debug("document from %s refused: %s", context.remote_id, refusal)
        return BytesValue(value=refusal.encode())

    async def rpc_read(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Give one signed document by kind, round and author; empty when it is not here."""
        found = self._handler.document(*_wanted(request.value)) or b""
        self.sent += len(found)
        return BytesValue(value=found)

    async def rpc_ping(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Hear which commit a peer holds, and say which one this node holds."""
        if request.value:
            self._handler.meet(NodeId(context.remote_id.to_base58()), *_pair(request.value))
        return BytesValue(value=msgpack.packb(self._handler.position()))

    async def rpc_fetch(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """Stream ranges of objects.

        What is here comes at once, in the order of the request; what this node is fetching itself, when it is here; for
        the rest, and for ranges that reach beyond their object, the answer says so. A message is one of

            index, bytes    the next bytes of the range with this index; no message spans two ranges
            index           this range does not come
            nothing         a sign of life, while everything that is left is on its way to this node
        """
        waiting = dict(enumerate(_ranges(request.value)))
        outflow = Outflow(self._uplink)
        try:
            while waiting:
                arrival = self.arrivals.next()
                for index, wanted in list(waiting.items()):
                    file = self._open(wanted)
                    if file is None and self.arrivals.expected(wanted[0]):
                        continue
                    del waiting[index]
                    if file is None:
                        yield BytesValue(value=_INDEX.pack(index))
                        continue
                    with closing(file):
                        left = wanted[2]
                        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                            yield BytesValue(value=_INDEX.pack(index) + chunk)
                            left -= len(chunk)
                            self.sent += len(chunk)
                            outflow.moved(len(chunk))
                    self._served.add(wanted[0])
                    self._progressed.set()
                    self.on_served()
                if waiting:
                    outflow.pause()
                    yield BytesValue()
                    await _until(arrival, self.life_seconds)
        finally:
            outflow.pause()

    def _open(self, wanted: Range) -> BinaryIO | None:
        """The object's file at the first byte of a range; None when the range is not here."""
        digest, offset, length = wanted
        path = self._handler.object(digest)
        try:
            if path is None or path.stat().st_size < offset + length:
                return None
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:  # it was collected between two looks
            return None
        file.seek(offset)
        return file

    def has_served(self, digest: str) -> bool:
        """Whether a peer has had an object from here."""
        return digest in self._served

    async def until_served(self, digests: Collection[str], seconds: float) -> None:
        """Wait until peers have fetched these objects, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._served.issuperset(digests):
                    await self._progressed.wait()
                    self._progressed.clear()
        except TimeoutError:
            log.info("not all of %d objects were fetched in %.0f s", len(digests), seconds)

    @property
    def upload_rate(self) -> float:
        """Bytes per second that this node sends while it sends objects; 0 when too little was sent to tell."""
        return self._uplink.rate

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second that came from each peer while it was sending; too little counts as 0."""
        return {node: meter.rate for node, meter in self._downlinks.items()}

    def rate(self, node: str) -> float:
        """Bytes per second that come from a peer while it is sending; 0 when too little came to tell."""
        meter = self._downlinks.get(node)
        return meter.rate if meter is not None else 0.0

    # what this node calls

    def _stub(self, node: str) -> "Exchange":
        stub: Exchange = self.get_stub(self.network.p2p, PeerID.from_base58(node), namespace=self._namespace)
        return stub

    async def _call(self, call: Callable[["Exchange"], object], node: str, seconds: float = CALL_SECONDS) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                answer = await call(self._stub(node))  # type: ignore[misc]
        except Exception as error:
            raise CallFailed(f"{node}: {str(error) or type(error).__name__}") from error
        self.received += len(answer.value)
        return bytes(answer.value)

    async def ping(self, node: str, seconds: float = CALL_SECONDS) -> tuple[str, int]:
        """Tell a peer this node's head; returns the digest and round of its own. Raises CallFailed after `seconds`."""
        mine = BytesValue(value=msgpack.packb(self._node.position()) if self._node is not None else b"")
        answer = await self._call(lambda stub: stub.rpc_ping(mine), node, seconds)  # type: ignore[call-arg]
        try:
            return _pair(answer)
        except ValueError as error:
            raise CallFailed(f"{node}: {error}") from error

    async def read(self, node: str, kind: str, number: int, author: str = "") -> Signed[Document] | None:
        """A document from a peer, checked; None when it has none. Raises CallFailed.

        Args:
            node: the peer.
            kind: of the document.
            number: its round.
            author: who has signed it, if that is not the peer itself.
        """
        request = BytesValue(value=msgpack.packb((kind, number, author)))
        wire = await self._call(lambda stub: stub.rpc_read(request), node)  # type: ignore[call-arg]
        try:
            return open_document(wire, self.run_id) if wire else None
        except Rejected as error:
            raise CallFailed(f"{node}: {error}") from error

    def post(self, nodes: Iterable[str], signed: Signed[Document]) -> None:
        """Give a document to many peers, without waiting: a slow or dead one delays nobody, and reads it later."""
        for node in nodes:
            if node != self.network.node_id:
                self._deliver(self._post(node, signed))

    def greet(self, nodes: Iterable[str]) -> None:
        """Tell peers what this node's head is, without waiting."""
        for node in nodes:
            if node != self.network.node_id:
                self._deliver(self._greet(node))

    async def _greet(self, node: str) -> None:
        try:
            await self.ping(node)
        except CallFailed as error:
            log.debug("greeting not delivered: %s", error)

    def _deliver(self, call: Coroutine[None, None, None]) -> None:
        delivery = asyncio.create_task(call)
        self._deliveries.add(delivery)
        delivery.add_done_callback(self._deliveries.discard)

    async def flush(self) -> None:
        """Wait until everything that was posted is delivered or given up, at most CALL_SECONDS."""
        if self._deliveries:
            await asyncio.wait(self._deliveries)

    async def _post(self, node: str, signed: Signed[Document]) -> None:
        try:
            refusal = await self._call(lambda stub: stub.rpc_post(BytesValue(value=signed.wire)), node)  # type: ignore[call-arg]
        except CallFailed as error:
            log.debug("%s not delivered: %s", signed.document.kind, error)
            return
        self.sent += len(signed.wire)
        if refusal:
            log.debug("%s refused by %s: %s", signed.document.kind, node, refusal.decode(errors="replace"))

    async def stream(self, node: str, ranges: Sequence[Range]) -> AsyncGenerator[Part | None, None]:
        """Ask a peer for ranges of objects, MAX_RANGES at most.

        Yields:
            What comes, checked to be inside its range and in order within it; None is a sign of life of a peer that
            waits for the rest itself. It ends when every range has come or been refused.

        Raises:
            Misbehaved: the peer sent something else.
            CallFailed: it cannot be reached, the connection broke, or nothing came for `progress_seconds`.
        """
        left = {index: length for index, (_, _, length) in enumerate(ranges)}
        meter = self._downlinks.setdefault(node, Meter())
        stream, measured = None, False
        try:
            request = BytesValue(value=msgpack.packb(ranges))
            async with asyncio.timeout(self.progress_seconds):
                stream = await self._stub(node).rpc_fetch(request)  # type: ignore[call-arg,misc]
            while left:
                async with asyncio.timeout(self.progress_seconds):
                    message = (await anext(stream)).value
                self.heard[node] = asyncio.get_running_loop().time()
                part = _part(message, left)
                # the way of the request, and what the peer waits for, do not count as its sending
                if part is None:
                    if measured:
                        meter.end()
                    measured = False
                elif measured:
                    meter.moved(len(part.data))
                else:
                    meter.begin()
                    measured = True
                self.received += len(part.data) if part is not None else 0
                yield part
        except TimeoutError as error:
            raise CallFailed(f"{node}: nothing came for {self.progress_seconds:.0f} s") from error
        except StopAsyncIteration as error:
            raise CallFailed(f"{node}: the stream broke off") from error
        except ValueError as error:
            raise Misbehaved(f"{node}: {error}") from error
        except Exception as error:
            raise CallFailed(f"{node}: {str(error) or type(error).__name__}") from error
        finally:
            if measured:
                meter.end()
            if stream is not None:
                await stream.aclose()

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        """Fetch objects from one peer that has them; what has arrived stays when the stream breaks.

        Args:
            node: the peer to ask.
            wanted: digest and size in bytes of each object.
            writer: opens the place for one object; it keeps only bytes whose digest is right.

        Raises:
            CallFailed: the peer has not all of them, stopped answering, or sent wrong bytes.
            OSError: this node's own disk.
        """
        parts = self.stream(node, [(digest, 0, size) for digest, size in wanted])
        async with aclosing(parts):
            for index, (digest, size) in enumerate(wanted):
                with writer(digest, size) as target:
                    while target.missing:
                        part = await anext(parts, None)
                        if part is None or part.index != index or not part.data:
                            raise CallFailed(f"{node}: it does not have everything")
                        target.write(part.data)
                    try:
                        await asyncio.to_thread(target.finish)
                    except ValueError as error:
                        raise Misbehaved(f"{node}: {error}") from error


def _ranges(request: bytes) -> list[Range]:
    """The ranges that a request names. Raises ValueError for anything else."""
    if len(request) > MAX_REQUEST_BYTES:
        raise ValueError(f"a request has at most {MAX_REQUEST_BYTES} bytes")
    ranges = msgpack.unpackb(request)
    if not isinstance(ranges, list) or len(ranges) > MAX_RANGES:
        raise ValueError(f"a request names at most {MAX_RANGES} ranges")
    for wanted in ranges:
        match wanted:
            case [str(), int(offset), int(length)] if offset >= 0 and length > 0:
                continue
        raise ValueError("a range is a digest, an offset and a length")
    return [(digest, offset, length) for digest, offset, length in ranges]


def _part(message: bytes, left: dict[int, int]) -> Part | None:
    """What a message of a stream says, and note it in `left`, the bytes still to come by range.

    Raises ValueError when it is not about what was asked.
    """
    if not message:
        return None
    if len(message) < _INDEX.size:
        raise ValueError("a message of a stream is cut")
    (index,) = _INDEX.unpack_from(message)
    data = bytes(message[_INDEX.size :])
    if index not in left or len(data) > left[index]:
        raise ValueError("more came than was asked for")
    left[index] -= len(data)
    if not data or not left[index]:
        del left[index]
    return Part(index, data)


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most some seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _wanted(value: bytes) -> tuple[str, int, str]:
    """Kind, round and author of the document that a request is about. Raises ValueError for anything else."""
    match msgpack.unpackb(value):
        case [str(kind), int(number), str(author)]:
            return kind, number, author
    raise ValueError("a request names a kind, a round and an author")


def _pair(value: bytes) -> tuple[str, int]:
    """A (digest, number) message. Raises ValueError for anything else."""
    match msgpack.unpackb(value):
        case [str(text), int(number)] if len(text) <= 64:
            return text, number
    raise ValueError("not a digest and a number")
