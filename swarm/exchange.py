"""Calls between nodes: documents are posted and read, shards are streamed by digest.

Every message is one `BytesValue` of protobuf's own well-known types, so no generated code is shipped.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import AsyncIterator, Protocol  # noqa: UP035 - hivemind knows a stream by typing's name

import msgpack
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext, PeerID, ServicerBase

from swarm.documents import Document, Rejected, Signed, open_document
from swarm.network import Network
from swarm.store import ObjectWriter

CHUNK_BYTES = 256 << 10
"""Bytes in one message of a stream: larger messages are slower through p2pd."""
MAX_OBJECTS = 4096
"""Objects that one request may name."""
CALL_SECONDS = 5.0
"""Bound on one short call."""
PROGRESS_SECONDS = 10.0
"""A stream that brings nothing for this long is given up."""

Writer = Callable[[str, int], ObjectWriter]

log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A peer did not answer, or not as it should. Caught where another peer can be asked."""


class Handler(Protocol):
    """What the exchange needs from the node behind it."""

    def receive(self, signed: Signed[Document]) -> str:
        """Take a posted document whose signature holds; returns why it is refused, or an empty string."""

    def document(self, kind: str, number: int) -> bytes | None:
        """The envelope of a document this node has."""

    def object(self, digest: str) -> Path | None:
        """Where this node has an object."""

    def position(self) -> tuple[str, int]:
        """Digest and round of this node's head."""


class Exchange(ServicerBase):
    """Serves a node's documents and objects to its peers, and calls theirs."""

    def __init__(self, network: Network, run_id: str, handler: Handler | None) -> None:
        self.network = network
        self.run_id = run_id
        self.sent = 0
        """Bytes of documents and objects sent."""
        self.received = 0
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
        """Give one signed document by kind and round; empty when it is not here."""
        kind, number = _pair(request.value)
        found = self._handler.document(kind, number) or b""
        self.sent += len(found)
        return BytesValue(value=found)

    async def rpc_ping(self, request: BytesValue, context: P2PContext) -> BytesValue:
        """Say which commit this node holds."""
        return BytesValue(value=msgpack.packb(self._handler.position()))

    async def rpc_fetch(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        """Stream objects one after the other; ends before the first that is not here. No message spans two objects."""
        digests = msgpack.unpackb(request.value)
        if not isinstance(digests, list) or len(digests) > MAX_OBJECTS:
            raise ValueError(f"a request names at most {MAX_OBJECTS} objects")
        for digest in digests:
            path = self._handler.object(digest) if isinstance(digest, str) else None
            if path is None:
                return
            with open(path, "rb") as file:  # noqa: ASYNC230 - a thread per 256 kB would cost more than the read
                while chunk := file.read(CHUNK_BYTES):
                    self.sent += len(chunk)
                    yield BytesValue(value=chunk)

    # what this node calls

    def _stub(self, node: str) -> "Exchange":
        stub: Exchange = self.get_stub(self.network.p2p, PeerID.from_base58(node), namespace=self._namespace)
        return stub

    async def _call(self, call: Callable[["Exchange"], object], node: str) -> bytes:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await call(self._stub(node))  # type: ignore[misc]
        except Exception as error:
            raise CallFailed(f"{node}: {error or type(error).__name__}") from error
        self.received += len(answer.value)
        return bytes(answer.value)

    async def ping(self, node: str) -> tuple[str, int]:
        """Digest and round of a peer's head. Raises CallFailed."""
        answer = await self._call(lambda stub: stub.rpc_ping(BytesValue()), node)  # type: ignore[call-arg]
        try:
            return _pair(answer)
        except ValueError as error:
            raise CallFailed(f"{node}: {error}") from error

    async def read(self, node: str, kind: str, number: int) -> Signed[Document] | None:
        """A document from a peer, checked; None when it has none. Raises CallFailed."""
        request = BytesValue(value=msgpack.packb((kind, number)))
        wire = await self._call(lambda stub: stub.rpc_read(request), node)  # type: ignore[call-arg]
        try:
            return open_document(wire, self.run_id) if wire else None
        except Rejected as error:
            raise CallFailed(f"{node}: {error}") from error

    def post(self, nodes: Iterable[str], signed: Signed[Document]) -> None:
        """Give a document to many peers, without waiting: a slow or dead one delays nobody, and reads it later."""
        for node in nodes:
            if node != self.network.node_id:
                delivery = asyncio.create_task(self._post(node, signed))
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

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        """Fetch objects in order; what has arrived stays when the stream breaks.

        Args:
            node: the peer to ask.
            wanted: digest and size in bytes of each object.
            writer: opens the place for one object; it keeps only bytes whose digest is right.

        Raises:
            CallFailed: the peer has not all of them, stopped answering for PROGRESS_SECONDS, or sent wrong bytes.
            OSError: this node's own disk.
        """
        stream = None
        try:
            request = BytesValue(value=msgpack.packb([digest for digest, _ in wanted]))
            async with asyncio.timeout(PROGRESS_SECONDS):
                stream = await self._stub(node).rpc_fetch(request)  # type: ignore[call-arg,misc]
            for digest, size in wanted:
                with writer(digest, size) as target:
                    while target.missing:
                        async with asyncio.timeout(PROGRESS_SECONDS):
                            message = await anext(stream)
                        self.received += len(message.value)
                        target.write(message.value)
                    await asyncio.to_thread(target.finish)
        except OSError as error:
            if isinstance(error, TimeoutError | ConnectionError):
                raise CallFailed(f"{node}: nothing came for {PROGRESS_SECONDS:.0f} s") from error
            raise
        except StopAsyncIteration as error:
            raise CallFailed(f"{node}: it does not have everything") from error
        except Exception as error:
            raise CallFailed(f"{node}: {error or type(error).__name__}") from error
        finally:
            if stream is not None:
                await stream.aclose()


def _pair(value: bytes) -> tuple[str, int]:
    """A (text, number) message. Raises ValueError for anything else."""
    pair = msgpack.unpackb(value)
    match pair:
        case [str(text), int(number)]:
            return text, number
    raise ValueError("not a text and a number")
