"""Calls between real peers: only bytes with the right digest arrive, and nobody waits for ever for anybody."""

import asyncio
import errno
import gc
import hashlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from swarm import exchange as exchange_module
from swarm.documents import Document, Leave, Signed, seal
from swarm.exchange import CHUNK_BYTES, MAX_RANGES, CallFailed, Exchange
from swarm.identity import Identity
from swarm.network import Network
from swarm.store import ObjectWriter, ShardStore

RUN = "ab" * 32


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Node:
    """What is behind an exchange: documents and objects as the test wants them."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.received: list[Signed[Document]] = []
        self.refusal = ""
        self.documents: dict[tuple[str, int], bytes] = {}
        self.lies: dict[str, Path] = {}
        self.head: tuple[Any, Any] = ("ef" * 32, 7)
        self.meetings: list[tuple[str, str, int]] = []

    def receive(self, signed: Signed[Document]) -> str:
        self.received.append(signed)
        return self.refusal

    def document(self, kind: str, number: int, author: str) -> bytes | None:
        return self.documents.get((kind, number))

    def object(self, digest: str) -> Path | None:
        return self.lies.get(digest) or self.store.find(digest)

    def position(self) -> tuple[str, int]:
        return self.head

    def meet(self, node: str, digest: str, number: int) -> None:
        self.meetings.append((node, digest, number))

    def lie(self, digest: str, data: bytes) -> None:
        self.lies[digest] = self.store.folder / f"lie-{len(self.lies)}"
        self.lies[digest].write_bytes(data)


class Pair:
    """Two peers: `here` calls, `there` answers."""

    def __init__(self, here: Exchange, there: Exchange, mine: Node, theirs: Node) -> None:
        self.here = here
        self.there = there
        self.mine = mine
        self.theirs = theirs
        self.node = there.network.node_id

    async def fetch(self, *objects: bytes) -> None:
        await self.here.fetch(self.node, [(digest_of(o), len(o)) for o in objects], self.mine.store.writer)

    def stored(self, *objects: bytes) -> list[bool]:
        return [self.mine.store.has(digest_of(data)) for data in objects]

    def files(self) -> int:
        return sum(path.is_file() for path in self.mine.store.folder.rglob("*"))


@pytest.fixture
def scene(identities: list[Identity], tmp_path: Path) -> Callable[[Callable[[Pair], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine with a pair of peers."""

    @asynccontextmanager
    async def exchanging() -> AsyncIterator[Pair]:
        nodes = [Node(ShardStore.open(tmp_path / name, RUN)) for name in ("here", "there")]
        here = await Network.start(identities[0])
        there = await Network.start(identities[1], peers=await here.addresses())
        exchanges = [Exchange(network, RUN, node) for network, node in zip((here, there), nodes, strict=True)]
        sockets = [Path(network.p2p._client_listen_maddr["unix"]) for network in (here, there)]
        try:
            for exchange in exchanges:
                await exchange.start()
            assert all(socket.exists() for socket in sockets)
            yield Pair(exchanges[0], exchanges[1], nodes[0], nodes[1])
        finally:
            await there.close()
            await here.close()
        assert not any(socket.exists() for socket in sockets)

    async def run(script: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        async with exchanging() as pair:
            await script(pair)

    return lambda script: uvloop.run(run(script))


Scene = Callable[[Callable[[Pair], Coroutine[Any, Any, None]]], None]


# objects


def test_objects_of_every_size_arrive(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        sizes = (4, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 4, 5 * CHUNK_BYTES)
        objects = [bytes([index]) * size for index, size in enumerate(sizes)]
        for data in objects:
            pair.theirs.store.put(data)
        await pair.fetch(*objects)
        assert all(pair.stored(*objects))
        assert pair.mine.store.path(digest_of(objects[3])).read_bytes() == objects[3]
        assert pair.here.received == pair.there.sent == sum(sizes)

    scene(script)


def test_many_fetches_at_once_do_not_mix(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        groups = [[bytes([a, b]) * (50_000 * (b + 1)) for b in range(3)] for a in range(6)]
        objects = [data for group in groups for data in group]
        for data in objects:
            pair.theirs.store.put(data)
        await asyncio.gather(*[pair.fetch(*group) for group in groups])
        assert all(pair.stored(*objects))

    scene(script)


@pytest.mark.parametrize("lie", [b"wrong", b"longer", b"tiny", b""])
def test_wrong_bytes_are_rejected_and_what_came_before_stays(scene: Scene, lie: bytes) -> None:
    async def script(pair: Pair) -> None:
        for data in (b"first", b"third"):
            pair.theirs.store.put(data)
        pair.theirs.lie(digest_of(b"right"), lie)
        with pytest.raises(CallFailed, match=pair.node):
            await pair.fetch(b"first", b"right", b"third")
        assert pair.stored(b"first", b"right", b"third") == [True, False, False]
        assert pair.files() == 1

    scene(script)


def test_what_a_source_lacks_ends_the_stream(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        for data in (b"first", b"third"):
            pair.theirs.store.put(data)
        with pytest.raises(CallFailed, match="does not have everything"):
            await pair.fetch(b"first", b"second", b"third")
        assert pair.stored(b"first", b"second", b"third") == [True, False, False]
        await pair.fetch(b"third")
        assert pair.stored(b"third") == [True]

    scene(script)


def test_only_digests_can_be_asked_for(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        (pair.theirs.store.folder / "HEAD").write_text("secret")
        for name in ("../HEAD", str(pair.theirs.store.folder / "HEAD"), ""):
            with pytest.raises(CallFailed, match="does not have everything"):
                await pair.here.fetch(pair.node, [(name, 6)], lambda _, size: pair.mine.store.writer("ab" * 32, size))
        assert pair.there.sent == 0

    scene(script)


def test_a_request_for_too_many_objects_is_refused(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        with pytest.raises(CallFailed, match="at most"):
            await pair.here.fetch(pair.node, [("ab" * 32, 1)] * (MAX_RANGES + 1), pair.mine.store.writer)

    scene(script)


def test_a_source_that_stalls_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(pair: Pair) -> None:
        released = asyncio.Event()

        async def stall(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            yield BytesValue(value=b"\0\0\0\0first")
            yield BytesValue(value=b"\0\0\0\1sec")
            await released.wait()

        stalling, calling = (
            Exchange(e.network, "cd" * 32, pair.theirs, progress_seconds=0.3) for e in (pair.there, pair.here)
        )
        monkeypatch.setattr(stalling, "rpc_fetch", stall)
        await stalling.start()
        started = asyncio.get_running_loop().time()
        wanted = [(digest_of(data), len(data)) for data in (b"first", b"second")]
        with pytest.raises(CallFailed, match="nothing came for"):
            await calling.fetch(pair.node, wanted, pair.mine.store.writer)
        assert asyncio.get_running_loop().time() - started < 3.0
        assert pair.stored(b"first", b"second") == [True, False] and pair.files() == 1
        released.set()

    scene(script)


def test_a_full_disk_is_this_nodes_own_error(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        pair.theirs.store.put(b"data")

        class FullDisk(ObjectWriter):
            def write(self, chunk: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        def full(digest: str, size: int) -> ObjectWriter:
            return FullDisk(pair.mine.store.path(digest), digest, size, durable=True, place=pair.mine.store.place)

        with pytest.raises(OSError, match="No space left"):
            await pair.here.fetch(pair.node, [(digest_of(b"data"), 4)], full)
        assert pair.files() == 0

    scene(script)


# hivemind leaves its connection for a stream that could not be opened to the garbage collector
@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning", "ignore:loop is closed:ResourceWarning")
def test_a_peer_that_is_gone_fails_every_call(scene: Scene, identities: list[Identity]) -> None:
    async def script(pair: Pair) -> None:
        gone = identities[2].node_id
        async with asyncio.timeout(exchange_module.CALL_SECONDS + 1):
            with pytest.raises(CallFailed, match=gone):
                await pair.here.ping(gone)
        with pytest.raises(CallFailed, match=gone):
            await pair.here.read(gone, "plan", 1)
        with pytest.raises(CallFailed, match=gone):
            await pair.here.fetch(gone, [("ab" * 32, 1)], pair.mine.store.writer)
        assert pair.files() == 0

    scene(script)
    gc.collect()


# documents


def test_posts_reach_everybody_else(scene: Scene, identities: list[Identity]) -> None:
    async def script(pair: Pair) -> None:
        leave = seal(identities[0], Leave(run=RUN, node=identities[0].node_id, round=3))
        pair.here.post([identities[0].node_id, identities[2].node_id, pair.node], leave)
        assert not pair.theirs.received, "posting does not wait"
        await pair.here.flush()
        assert pair.theirs.received == [leave] and not pair.mine.received
        assert pair.here.sent == pair.there.received == len(leave.wire)
        await pair.here.flush()

    scene(script)


def test_only_valid_documents_are_received(scene: Scene, identities: list[Identity]) -> None:
    async def script(pair: Pair) -> None:
        me, other = identities[0], identities[1]
        good = seal(me, Leave(run=RUN, node=me.node_id, round=3))
        forged = seal(other, Leave(run=RUN, node=me.node_id, round=3))
        foreign = seal(me, Leave(run="cd" * 32, node=me.node_id, round=3))
        stub = pair.here._stub(pair.node)
        for wire in (b"", b"junk", good.wire[:-1], forged.wire, foreign.wire):
            answer = await stub.rpc_post(BytesValue(value=wire))  # type: ignore[call-arg]
            assert answer.value
        assert not pair.theirs.received
        pair.theirs.refusal = "round 3 is over"
        answer = await stub.rpc_post(BytesValue(value=good.wire))  # type: ignore[call-arg]
        assert answer.value == b"round 3 is over"

    scene(script)


def test_documents_are_read_and_checked(scene: Scene, identities: list[Identity]) -> None:
    async def script(pair: Pair) -> None:
        leave = seal(identities[2], Leave(run=RUN, node=identities[2].node_id, round=3))
        pair.theirs.documents = {("leave", 3): leave.wire, ("leave", 4): leave.wire[:-1] + b"x", ("leave", 5): b"junk"}
        assert await pair.here.read(pair.node, "leave", 3) == leave
        assert await pair.here.read(pair.node, "leave", 2) is None
        for number in (4, 5):
            with pytest.raises(CallFailed):
                await pair.here.read(pair.node, "leave", number)

    scene(script)


def test_a_malformed_request_is_its_senders_error(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        stub = pair.here._stub(pair.node)
        for request in (b"", b"junk", msgpack.packb(5), msgpack.packb(["a", "b"]), msgpack.packb([1, 2, 3])):
            with pytest.raises(P2PHandlerError):
                await stub.rpc_read(BytesValue(value=request))  # type: ignore[call-arg]
        assert await pair.here.ping(pair.node) == pair.theirs.position()

    scene(script)


@pytest.mark.parametrize("position", [("a", "b"), (1, 2), ("a",), (), ("a" * 65, 1)])
def test_a_ping_is_answered_with_a_position_or_counts_as_failed(scene: Scene, position: tuple[Any, Any]) -> None:
    async def script(pair: Pair) -> None:
        assert await pair.here.ping(pair.node) == ("ef" * 32, 7)
        pair.theirs.head = position
        with pytest.raises(CallFailed, match="not a digest and a number"):
            await pair.here.ping(pair.node)

    scene(script)


def test_whoever_pings_tells_its_own_position_under_the_name_of_its_connection(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        pair.mine.head = ("cd" * 32, 5)
        await pair.here.ping(pair.node)
        assert pair.theirs.meetings == [(pair.here.network.node_id, "cd" * 32, 5)]
        pair.mine.head = ("a", "b")
        with pytest.raises(CallFailed):
            await pair.here.ping(pair.node)
        await Exchange(pair.here.network, RUN, None).ping(pair.node)
        assert len(pair.theirs.meetings) == 1, "who has no state tells none"

    scene(script)


def test_an_answer_that_comes_together_with_the_timeout_does_not_deafen_the_node(scene: Scene) -> None:
    """As after a stop of the process: the answer is there, and the time is over."""

    async def late(pair: Pair) -> bool:
        """Let it happen; whether the timeout came first."""
        daemon = pair.here.network._daemon._process
        greeted = asyncio.Event()

        def meet(node: str, digest: str, number: int) -> None:
            daemon.send_signal(signal.SIGSTOP)
            greeted.set()

        pair.theirs.meet = meet  # type: ignore[method-assign]
        call = asyncio.create_task(pair.here.ping(pair.node, seconds=0.3))
        try:
            await greeted.wait()
            await asyncio.sleep(0.05)  # the answer leaves the peer
        finally:
            daemon.send_signal(signal.SIGCONT)
        time.sleep(0.6)  # noqa: ASYNC251 - the answer arrives, and the time of the call is over
        await asyncio.wait([call])
        return isinstance(call.exception(), CallFailed)

    async def script(pair: Pair) -> None:
        for _ in range(10):
            was_late = await late(pair)
            pair.theirs.meet = lambda node, digest, number: None  # type: ignore[method-assign]
            assert await pair.here.ping(pair.node) == pair.theirs.position()
            if was_late:
                return
        pytest.fail("no answer was late")

    scene(script)


def test_another_runs_exchange_is_not_called(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        other = Exchange(pair.here.network, "cd" * 32, pair.mine)
        with pytest.raises(CallFailed):
            await other.ping(pair.node)

    scene(script)
