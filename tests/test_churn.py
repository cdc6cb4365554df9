"""Nodes that die, hang, come and go, at the worst moments and at random: the others go on, every block counts once."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from bench.participants import Node, Swarm
from swarm.documents import Document, Signed
from tests.accounts import LEFT_TO_THE_COLLECTOR, Accounts, require_every_block_once

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    *LEFT_TO_THE_COLLECTOR,
]

MARGIN = 3.0


class Trap:
    """The first node that is about to post a document of a kind falls, and what it wanted to post with it."""

    def __init__(self, nodes: Iterable[Node], kind: str) -> None:
        self.victim: Node | None = None
        for node in nodes:
            node.tamper = self._for(node, kind)

    def _for(self, node: Node, kind: str) -> Any:
        def fall(signed: Signed[Document]) -> Iterable[Signed[Document]]:
            if signed.document.kind == kind and self.victim is None:
                self.victim = node
            return () if node is self.victim else (signed,)

        return fall


@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.parametrize("kind", ["plan", "contribution", "reduction", "commit"])
def test_one_that_falls_at_the_worst_moment_stops_nobody(tmp_path: Path, kind: str, how: str) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": MARGIN, "train_seconds": 2.0}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add() for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(2)
            trap = Trap(nodes, kind)
            await swarm.until(lambda: trap.victim, f"a {kind}")
            assert trap.victim is not None
            if how == "kill":
                await swarm.end(trap.victim)
            else:
                await trap.victim.hang()
            others = [node for node in nodes if node is not trap.victim]
            before = [len(node.seconds) for node in others]
            await swarm.until(
                lambda: all(len(node.seconds) >= count + 3 for node, count in zip(others, before, strict=True)),
                "three rounds of the others",
                60.0,
            )
            for node, count in zip(others, before, strict=True):
                # who is gone costs two unanswered pings; who answers and does nothing, the margins of a round's plan
                # (in both its times and in both its turns)
                assert max(node.seconds[count:]) < (MARGIN + 5.0 if how == "kill" else 5 * MARGIN + 3.0)
            chain = accounts.chain(swarm)
            require_every_block_once(chain, nodes)
            if how == "kill":
                assert chain[-1].document.experts_covered == frozenset(range(4))

    uvloop.run(scenario())


def test_a_source_that_sends_nothing_is_replaced(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 4, "margin_seconds": MARGIN}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add() for _ in range(4)]
            await swarm.start(*nodes)
            await swarm.rounds(2)
            stuck, *others = nodes
            makers = {update.reducer for update in stuck.head.updates.values()}
            assert makers - {stuck.id}

            async def nothing(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
                await asyncio.Event().wait()
                yield BytesValue()

            stuck.serve = nothing
            newcomer = swarm.add(newcomer=True)
            await swarm.start(newcomer)
            await swarm.until(lambda: newcomer.round, "the newcomer's first round")
            await swarm.rounds(2, others)
            require_every_block_once(accounts.chain(swarm), swarm.nodes)

    uvloop.run(scenario())


@pytest.mark.parametrize("seed", [1, 2])
def test_every_block_counts_once_however_nodes_come_and_go(tmp_path: Path, seed: int) -> None:
    accounts = Accounts()
    draw = random.Random(seed)

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": 2.0, "train_seconds": 3.0, "local_steps": 3}
        async with Swarm(tmp_path, on_commit=accounts.note, **settings) as swarm:
            await swarm.start(*[swarm.add(step_seconds=draw.choice([0.02, 0.06])) for _ in range(3)])
            await swarm.rounds(1)
            away = list[Node]()
            for _ in range(7):
                events = ["kill", "leave", "join", "restart"]
                match draw.choice([event for event in events if _can(event, swarm, away)]):
                    case "join":
                        await swarm.start(swarm.add(step_seconds=draw.choice([0.02, 0.06]), newcomer=True))
                    case "restart":
                        await swarm.restart(away.pop(draw.randrange(len(away))))
                    case how:
                        away.append(draw.choice(swarm.running))
                        await swarm.end(away[-1], how)
                furthest = max(node.round for node in swarm.running)
                await swarm.until(partial(_is_past, swarm, furthest), "a round", 60.0)
            await swarm.rounds(2, seconds=60.0)
            chain = accounts.chain(swarm)
            require_every_block_once(chain, swarm.nodes)
            assert chain[-1].document.experts_covered == frozenset(range(4))
            assert len({node.head.state for node in swarm.running if node.round == chain[-1].document.round}) == 1

            # the whole swarm stops and goes on from its disks
            nodes = list(swarm.running)
            common = min(node.round for node in nodes) + 1
            for node in nodes:
                await swarm.end(node, "kill")
            for node in nodes:
                await swarm.restart(node)
            await swarm.rounds(2, seconds=60.0)
            longer = accounts.chain(swarm)
            # what all had is part of it; of what only some had, one chain counts
            assert [c.digest for c in longer[:common]] == [c.digest for c in chain[:common]]
            require_every_block_once(longer, swarm.nodes)

    uvloop.run(scenario())


def _is_past(swarm: Swarm, number: int) -> bool:
    return max(node.round for node in swarm.running) > number


def _can(event: str, swarm: Swarm, away: list[Node]) -> bool:
    match event:
        case "restart":
            return bool(away)
        case "join":
            return len(swarm.running) < 4
        case _:
            return len(swarm.running) > 2
