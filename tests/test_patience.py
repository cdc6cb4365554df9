"""Waiting for a peer that this node cannot reach, between real peers: others may have heard of it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swarm.documents import Signed, seal
from swarm.exchange import CallFailed
from swarm.identity import Identity
from swarm.manifest import EncodingSettings
from swarm.patience import FAILURES, LOOKED_AT, Patience, ask
from swarm.records import View
from tests import examples
from tests.nodes import Loopback, Node

VALUES = {"embed": bytes(8)}
PLAN = examples.digest("plan")

Script = Callable[[Node, Node, Patience], Awaitable[None]]


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Identity]:
    """A node that nobody can reach."""
    with closing(Identity.open(tmp_path / "gone.key")) as identity:
        yield identity


@pytest.fixture
def play(loopback: Loopback, tmp_path: Path, gone: Identity) -> Callable[[Script], None]:
    """Runs a script for a node that waits and for a witness that is there; the node takes the other one for present,
    too."""

    def run(script: Script) -> None:
        async def waiting(nodes: list[Node]) -> None:
            node, witness, _ = nodes
            present = {other: examples.record() for other in (node.me, witness.me, gone.node_id)}
            node.membership.view = View(present)
            await script(node, witness, node.context.patience(lambda text: None))

        loopback.play(tmp_path, VALUES, EncodingSettings(), waiting)

    return run


def contributions(node: Node) -> dict[str, str]:
    return {who: signed.digest for who, signed in node.board.contributions.get((1, PLAN), {}).items()}


def handed_in(author: Identity) -> Signed:  # type: ignore[type-arg]
    return seal(author, examples.contribution(author.node_id))


def test_a_document_of_an_unreachable_peer_comes_from_a_witness(play: Callable[[Script], None], gone: Identity) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        offer = handed_in(gone)
        witness.board.post(offer)
        found = await patience.wait(
            lambda: contributions(node) or None, what="contribution", whom=lambda: [gone.node_id], seconds=20
        )
        assert found == {gone.node_id: offer.digest} and gone.node_id not in node.board.lost

    play(script)


def test_a_peer_of_whom_nobody_has_news_is_lost(play: Callable[[Script], None], gone: Identity) -> None:
    """What is known of it already does not count: it may have died since."""

    async def script(node: Node, witness: Node, patience: Patience) -> None:
        for board in (node.board, witness.board):
            board.post(handed_in(gone))
        for _ in range(FAILURES):
            assert gone.node_id not in node.board.lost
            await patience.look([gone.node_id], "contribution")
        assert gone.node_id in node.board.lost

    play(script)


def test_who_hears_from_nobody_is_alone_itself_and_takes_nobody_for_lost_before_the_margin_is_over(
    play: Callable[[Script], None], gone: Identity
) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        async def read(peer: str, kind: str, number: int, author: str = "") -> Signed | None:  # type: ignore[type-arg]
            raise CallFailed("this node's line is cut")

        node.exchange.read = read  # type: ignore[method-assign, assignment]
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(10 + node.context.margin):
            while gone.node_id not in node.board.lost:
                await patience.look([gone.node_id], "contribution")
                await asyncio.sleep(0.05)
        assert loop.time() - began > node.context.margin

    play(script)


def test_who_has_one_peer_only_does_not_wait_longer_for_it(play: Callable[[Script], None], gone: Identity) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        node.membership.view = View({node.me: examples.record(), gone.node_id: examples.record()})
        for _ in range(FAILURES):
            await patience.look([gone.node_id], "contribution")
        assert gone.node_id in node.board.lost

    play(script)


def test_of_many_peers_some_are_looked_at_in_turn(play: Callable[[Script], None]) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        many, pinged = [f"Qm{number}" for number in range(3 * LOOKED_AT)], list[str]()

        async def ping(peer: str, seconds: float) -> tuple[str, int]:
            pinged.append(peer)
            return "", 1

        node.exchange.ping = ping  # type: ignore[method-assign, assignment]
        for look in range(1, 4):
            await patience.look(many, "contribution")
            assert len(pinged) == LOOKED_AT * look
        assert set(pinged) == set(many)

    play(script)


def test_a_witness_cannot_speak_for_others(play: Callable[[Script], None], gone: Identity) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        witness.document = lambda kind, number, author: handed_in(witness.identity).wire  # type: ignore[method-assign]
        assert not await ask(node.board, node.exchange, witness.me, "contribution", 1, gone.node_id)
        assert not contributions(node)

    play(script)


def test_who_waits_is_not_asked_itself(play: Callable[[Script], None]) -> None:
    async def script(node: Node, witness: Node, patience: Patience) -> None:
        async with asyncio.timeout(5):
            await patience.look([node.me], "commit")
        assert node.me not in node.board.lost

    play(script)


def test_a_peer_that_sends_is_not_lost_though_its_answers_are_late(play: Callable[[Script], None]) -> None:
    """What it sends fills its line, and an answer comes after that."""
    digest = examples.digest("on its way")

    async def script(node: Node, witness: Node, patience: Patience) -> None:
        witness.exchange.arrivals.expect(digest)  # whoever asks for it hears signs of life
        witness.exchange.life_seconds = 0.1

        async def listen() -> None:
            async for _ in node.exchange.stream(witness.me, [(digest, 0, 1)]):
                continue

        async def ping(peer: str, seconds: float) -> tuple[str, int]:
            await asyncio.sleep(0.5)
            raise CallFailed(f"{peer}: no answer")

        node.exchange.__dict__["ping"] = ping
        listening = asyncio.create_task(listen())
        try:
            while witness.me not in node.exchange.heard:
                await asyncio.sleep(0.02)
            for _ in range(FAILURES + 1):
                await patience.look([witness.me], "contribution")
            assert witness.me not in node.board.lost
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        while witness.me not in node.board.lost:  # after the margin, since this node hears from nobody at all
            await patience.look([witness.me], "contribution")

    play(script)
