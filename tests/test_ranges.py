"""Streams of ranges: what is here comes at once, what is on its way is waited for, and nothing else is accepted."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from swarm.documents import Document, Signed
from swarm.exchange import CHUNK_BYTES, MAX_REQUEST_BYTES, CallFailed, Exchange, Misbehaved, Part, Range
from swarm.identity import Identity
from swarm.network import Network
from swarm.store import ShardStore

RUN = "ab" * 32


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Node:
    """What is behind an exchange: a store."""

    def __init__(self, folder: Path) -> None:
        self.store = ShardStore.open(folder, RUN)

    def receive(self, signed: Signed[Document]) -> str:
        return ""

    def document(self, kind: str, number: int, author: str) -> bytes | None:
        return None

    def object(self, digest: str) -> Path | None:
        return self.store.find(digest)

    def position(self) -> tuple[str, int]:
        return "", 0

    def meet(self, node: str, digest: str, number: int) -> None:
        pass


class Pair:
    """Two peers: `here` calls, `there` answers for the node `theirs`."""

    def __init__(self, here: Network, there: Network, folder: Path) -> None:
        self.theirs = Node(folder)
        self.here = Exchange(here, RUN, None)
        self.there = Exchange(there, RUN, self.theirs)
        self.node = there.node_id

    async def answering(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[BytesValue, P2PContext], AsyncIterator[BytesValue]]
    ) -> Exchange:
        """An exchange whose calls are answered by the peer as the test wants."""
        there = Exchange(self.there.network, "cd" * 32, self.theirs)
        monkeypatch.setattr(there, "rpc_fetch", answer)
        await there.start()
        return Exchange(self.here.network, "cd" * 32, None)


Scene = Callable[[Callable[[Pair], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def scene(identities: list[Identity], tmp_path: Path) -> Scene:
    """Runs a coroutine with a pair of peers."""

    async def run(script: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        here = await Network.start(identities[0])
        there = await Network.start(identities[1], peers=await here.addresses())
        try:
            pair = Pair(here, there, tmp_path)
            await pair.there.start()
            await script(pair)
        finally:
            await there.close()
            await here.close()

    return lambda script: uvloop.run(run(script))


async def parts(exchange: Exchange, node: str, ranges: list[Range]) -> list[Part]:
    """What comes for ranges, without the signs of life."""
    return [part async for part in exchange.stream(node, ranges) if part is not None]


def test_ranges_come_in_order_and_never_mixed(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        data = bytes(range(256)) * 4096
        digest = pair.theirs.store.put(data)
        ranges = [(digest, 5, 3 * CHUNK_BYTES), (digest, len(data) - 1, 1), (digest, 0, len(data))]
        got = await parts(pair.here, pair.node, ranges)
        assert [len(part.data) for part in got[:4]] == [CHUNK_BYTES] * 3 + [1]
        for index, (_, offset, length) in enumerate(ranges):
            assert b"".join(part.data for part in got if part.index == index) == data[offset : offset + length]
        assert [part.index for part in got] == sorted(part.index for part in got)

    scene(script)


def test_what_is_not_here_is_refused_and_the_rest_comes(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        digest = pair.theirs.store.put(b"four")
        ranges = [("ab" * 32, 0, 4), (digest, 2, 3), (digest, 1 << 60, 1 << 60), (digest, 2, 2), ("", 0, 1)]
        assert await parts(pair.here, pair.node, ranges) == [
            Part(0, b""),
            Part(1, b""),
            Part(2, b""),
            Part(3, b"ur"),
            Part(4, b""),
        ]
        pair.theirs.store.path(digest).unlink()
        assert await parts(pair.here, pair.node, [(digest, 0, 4)]) == [Part(0, b"")]

    scene(script)


def test_what_is_on_its_way_is_waited_for(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        here, soon, never = (digest_of(data) for data in (b"here", b"soon", b"never"))
        pair.theirs.store.put(b"here")
        pair.there.life_seconds = 0.05
        for digest in (soon, never):
            pair.there.arrivals.expect(digest)
        got: list[Part | None] = []
        async with aclosing(pair.here.stream(pair.node, [(never, 0, 5), (soon, 0, 4), (here, 0, 4)])) as stream:
            async for part in stream:
                got.append(part)
                if got.count(None) == 3:
                    pair.theirs.store.put(b"soon")
                    pair.there.arrivals.settle(soon)
                if part == Part(1, b"soon"):
                    pair.there.arrivals.settle(never)
        assert [part for part in got if part is not None] == [Part(2, b"here"), Part(1, b"soon"), Part(0, b"")]
        assert got[0] == Part(2, b"here"), "what is here does not wait for what is not"

    scene(script)


def test_signs_of_life_keep_a_stream_alive(scene: Scene) -> None:
    async def script(pair: Pair) -> None:
        pair.here.progress_seconds, pair.there.life_seconds = 1.0, 0.2
        soon = digest_of(b"soon")
        pair.there.arrivals.expect(soon)
        asyncio.get_running_loop().call_later(2.5, pair.there.arrivals.settle, soon)
        assert await parts(pair.here, pair.node, [(soon, 0, 4)]) == [Part(0, b"")]
        with pytest.raises(CallFailed, match="does not have everything"):
            pair.there.arrivals.expect(soon)
            await pair.here.fetch(pair.node, [(soon, 4)], pair.theirs.store.writer)

    scene(script)


@pytest.mark.parametrize(
    "request_",
    [
        5,
        ["ab"],
        [["ab", 0]],
        [["ab", 0, 0]],
        [["ab", -1, 5]],
        [["ab", 0, 1.5]],
        [[b"ab", 0, 1]],
        [["ab", 0, 1, 2]],
        [["a" * MAX_REQUEST_BYTES, 0, 1]],
    ],
)
def test_a_malformed_request_for_ranges_is_refused(scene: Scene, request_: Any) -> None:
    async def script(pair: Pair) -> None:
        stub = pair.here._stub(pair.node)
        with pytest.raises(P2PHandlerError):
            stream = await stub.rpc_fetch(BytesValue(value=msgpack.packb(request_)))  # type: ignore[call-arg,misc]
            await anext(stream)

    scene(script)


@pytest.mark.parametrize(
    "messages",
    [[b"x"], [b"\0\0\0\2x"], [b"\0\0\0\0toolong"], [b"\0\0\0\0four", b"\0\0\0\0x"], [b"\0\0\0\1", b"\0\0\0\1x"]],
    ids=["cut", "not asked", "too long", "too much", "after a refusal"],
)
def test_what_was_not_asked_for_is_misbehaviour(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, messages: list[bytes]
) -> None:
    async def script(pair: Pair) -> None:
        async def answer(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            for message in messages:
                yield BytesValue(value=message)

        calling = await pair.answering(monkeypatch, answer)
        with pytest.raises(Misbehaved, match=pair.node):
            await parts(calling, pair.node, [("ab", 0, 4), ("cd", 0, 4)])

    scene(script)


def test_an_answer_that_ends_too_soon_counts_as_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(pair: Pair) -> None:
        async def answer(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            yield BytesValue(value=b"\0\0\0\0fo")

        calling = await pair.answering(monkeypatch, answer)
        with pytest.raises(CallFailed, match="broke off"):
            await parts(calling, pair.node, [("ab", 0, 4)])

    scene(script)


def test_rates_are_those_of_the_sending(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(pair: Pair) -> None:
        async def paced(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            for pause in (0.5, *[0.02] * 10, None, 0.5, *[0.02] * 10):
                if pause is None:
                    yield BytesValue()
                    continue
                await asyncio.sleep(pause)
                yield BytesValue(value=bytes(4 + CHUNK_BYTES))

        calling = await pair.answering(monkeypatch, paced)
        assert calling.rates == {} and calling.rate(pair.node) == 0.0
        await parts(calling, pair.node, [("ab", 0, 22 * CHUNK_BYTES)])
        assert calling.rates == {pair.node: calling.rate(pair.node)}
        # 20 chunks in 0.4 s and a little more; with the pauses it would be 1.4 s
        assert 20 * CHUNK_BYTES / 1.2 < calling.rate(pair.node) < 20 * CHUNK_BYTES / 0.35
        digest = pair.theirs.store.put(bytes(8 << 20))
        assert pair.there.upload_rate == 0.0
        await parts(pair.here, pair.node, [(digest, 0, 8 << 20)])
        assert 1e6 < pair.there.upload_rate < 1e11

    scene(script)
