"""A member of the roster that does what no honest one does: the round goes on, it is named, and the others' state is as
if it had not been there."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from bench.participants import Node, Swarm, Tamper
from swarm.documents import Commit, Contribution, Document, Encoded, Signed, seal
from swarm.identity import short
from swarm.shard_names import expert_of
from tests.accounts import LEFT_TO_THE_COLLECTOR, Accounts, require_every_block_once, require_means

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(240),
    *LEFT_TO_THE_COLLECTOR,
]

MARGIN = 3.0
Attack = Callable[[Node], None]


def offering(node: Node, change: Callable[[Contribution], dict[str, Any]]) -> None:
    """The node's contributions are posted with other fields than the honest ones."""

    def tamper(signed: Signed[Document]) -> Iterable[Signed[Document]]:
        document = signed.document
        if isinstance(document, Contribution):
            other = seal(node.identity, document.model_copy(update=change(document)))
            node.participant.board.post(other)  # when it leads the round it must not know better
            return (other,)
        return () if document.kind == "reduction" else (signed,)  # what it averages itself is another matter

    node.tamper = tamper


def instead(node: Node, data: Callable[[int], bytes]) -> Callable[[Contribution], dict[str, Any]]:
    """Other bytes in the place of all its shards, which it serves when it is asked for them."""

    def change(contribution: Contribution) -> dict[str, Any]:
        shards = {}
        for name, shard in contribution.shards.items():
            wrong = data(shard.size)
            digest = hashlib.sha256(wrong).hexdigest()
            path = node.store.scratch(contribution.round) / digest
            path.write_bytes(wrong)
            node.store.place(path)
            shards[name] = Encoded(digest=digest, size=len(wrong))
        return {"shards": shards}

    return change


def not_finite(node: Node) -> None:
    """Values that are no numbers."""
    offering(node, instead(node, lambda size: np.full(size // 4, np.nan, "<f4").tobytes()))


def another_size(node: Node) -> None:
    """Shards with one value more than there is."""
    offering(node, instead(node, lambda size: bytes(size + 4)))


def not_its_experts(node: Node) -> None:
    """It offers experts that others own."""

    def change(contribution: Contribution) -> dict[str, Any]:
        everything = {name: next(iter(contribution.shards.values())) for name in node.head.shards}
        return {"shards": {**everything, **contribution.shards}}

    offering(node, change)


def too_many_tokens(node: Node) -> None:
    """It claims the weight of a million nodes."""
    offering(node, lambda contribution: {"tokens": contribution.tokens * 1_000_000})


def wrong_bytes(node: Node) -> None:
    """It promises one thing and serves another of the same size."""
    offering(node, lambda contribution: {})
    serving(node, lambda message: message[:4] + bytes(len(message) - 4))


def endless(node: Node) -> None:
    """It never stops sending."""
    offering(node, lambda contribution: {})

    async def serve(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        while True:
            yield BytesValue(value=bytes(4) + bytes(1 << 16))

    node.serve = serve


def silent(node: Node) -> None:
    """It takes the call and sends nothing."""
    offering(node, lambda contribution: {})

    async def serve(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        await asyncio.Event().wait()
        yield BytesValue()

    node.serve = serve


def never_leading(node: Node) -> Tamper:
    """It leaves the plans to others: a leader could commit what nobody gets from it."""

    def tamper(signed: Signed[Document]) -> Iterable[Signed[Document]]:
        if signed.document.kind != "plan":
            return (signed,)
        node.participant.board.plans.clear()
        return ()

    return tamper


def serving(node: Node, change: Callable[[bytes], bytes]) -> None:
    """The messages of its streams are others than the honest ones."""

    async def serve(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        async for message in node._fetch(request, context):
            yield BytesValue(value=change(message.value))

    node.serve = serve


@pytest.mark.parametrize(
    ("attack", "is_named"),
    [
        (not_finite, True),
        (another_size, True),
        (not_its_experts, True),
        (too_many_tokens, True),
        (wrong_bytes, True),
        (endless, True),
        (silent, False),  # that may be a broken line as well
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_member_hands_in_is_left_out(
    tmp_path: Path, attack: Attack, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": MARGIN, "train_seconds": 2.0, "overlap": False}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            # without experts of its own it can keep no result to itself that it then commits as the leader
            *honest, rogue = nodes = [swarm.add(capacity=capacity) for capacity in (2, 2, 0)]
            await swarm.start(*nodes)
            for node in honest:
                node.participant.exchange.progress_seconds = MARGIN  # a silent relay costs as long
            await swarm.rounds(1)
            at = max(node.round for node in nodes) + 1  # the round that is in progress may still be honest
            attack(rogue)
            await swarm.until(lambda: min(node.round for node in honest) >= at + 2, "two rounds beside it")
            for node in honest:
                # T of a round is up to 1.5 margins of training and of averaging; then come the two margins of the turns
                assert max(node.seconds[at:]) < 5 * MARGIN
            chain = accounts.chain(swarm)
            for commit in chain[at + 1 : at + 3]:
                assert {node.id for node in honest} <= commit.document.shares.keys()
                assert not any(commit.document.counts(rogue.id, name) for name in commit.document.updates)
            require_means(accounts, chain[: at + 3], nodes, within=1e-5)
            require_every_block_once(chain, nodes)
            if is_named:
                complaints = [node.participant.membership.record.complaint for node in honest]
                assert any(complaint.startswith(short(rogue.id)) for complaint in complaints)
                assert any(short(rogue.id) in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
            assert not any(short(node.id) in complaint for node in honest for complaint in complaints_of(honest))

    uvloop.run(scenario())


def complaints_of(nodes: Iterable[Node]) -> list[str]:
    """What nodes say in public about others."""
    return [node.participant.membership.record.complaint for node in nodes]


def test_a_maker_of_wrong_results_is_replaced_by_its_stand_in(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": MARGIN, "train_seconds": 2.0, "overlap": False}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add() for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(1)
            shared = {name: u.reducer for name, u in nodes[0].head.updates.items() if expert_of(name) is None}
            rogue = next(node for node in nodes if node.id in shared.values())
            honest = [node for node in nodes if node is not rogue]
            its = {name for name, reducer in shared.items() if reducer == rogue.id}
            at = rogue.round + 1
            serving(rogue, lambda message: message[:4] + bytes(len(message) - 4))
            rogue.tamper = never_leading(rogue)
            await swarm.until(lambda: min(node.round for node in honest) >= at + 2, "two rounds beside it")
            later = [c for c in accounts.chain(swarm) if c.document.round > at]
            for before, after in pairwise(later):
                assert after.document.parent == before.digest
                makers = {after.document.updates[name].reducer for name in its if name in after.document.updates}
                assert makers <= {node.id for node in honest}
            assert any(short(rogue.id) in complaint for complaint in complaints_of(honest))

    uvloop.run(scenario())


def test_an_old_message_and_one_in_anothers_name_change_nothing(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        async with Swarm(tmp_path, on_commit=accounts.note, start_nodes=3, overlap=False) as swarm:
            *honest, rogue = nodes = [swarm.add() for _ in range(3)]
            kept = list[Signed[Document]]()
            refused = 0

            def replay(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                kept.append(signed)
                return (*kept[-12:-1], signed)

            await swarm.start(*nodes)
            rogue.tamper = replay
            await swarm.rounds(3)
            old = next(signed for signed in kept if isinstance(signed.document, Commit | Contribution))
            for node in honest:
                refused += bool(node.participant.receive(old))
            assert refused == len(honest), "a document of a round that is over is refused"
            chain = accounts.chain(swarm)
            require_every_block_once(chain, nodes)
            require_means(accounts, chain, nodes, within=1e-5)

    uvloop.run(scenario())
