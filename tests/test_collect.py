"""Results as they are announced, between real peers: fetched once, made to values, refused by name when they lie."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from swarm import codec
from swarm.collect import Collector
from swarm.documents import Encoded, Result, digest_of, seal
from swarm.manifest import Encoding, EncodingSettings
from tests import examples
from tests.nodes import Loopback, Node

BASE = np.linspace(-1, 1, 700, dtype="<f4")
VALUES = {"embed": BASE.tobytes(), "head": BASE[:300].tobytes(), "tail": BASE[::-1].tobytes()}
PLAN = examples.digest("plan")


class Made:
    """A result of one shard: what travels, and the new values."""

    def __init__(self, encoding: Encoding, name: str = "embed", add: float = 0.5) -> None:
        base = np.frombuffer(VALUES[name], "<f4")
        delta = np.full(base.size, add, "<f4")
        self.data = codec.encode(encoding, base + delta if encoding == "fp32" else delta)
        decoded = codec.decode(encoding, self.data, base.size)
        self.values = (decoded if encoding == "fp32" else base + decoded).tobytes()

    def result(self, maker: str, **fields: object) -> Result:
        honest = Result(encoded=examples.encoded(self.data), values=digest_of(self.values), contributors=(maker,))
        return honest.model_copy(update=fields)


class Scene:
    """A node that collects, and two others that may make results."""

    def __init__(self, nodes: list[Node], collector: Collector) -> None:
        self.maker, self.other, self.node = nodes
        self.collector = collector

    def announce(self, maker: Node, results: dict[str, Result]) -> None:
        document = examples.reduction(maker.me, plan=PLAN, results=results)
        self.node.board.post(seal(maker.identity, document))

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self.node.board.changed(0.02)

    def has(self, data: bytes) -> bool:
        return self.node.store.find(digest_of(data)) is not None


Play = Callable[[Encoding, Callable[[Scene], Awaitable[None]]], None]


@pytest.fixture
def play(loopback: Loopback, tmp_path: Path, request: pytest.FixtureRequest) -> Play:
    """Runs a script while the third peer collects; `roster` chooses the peers that are in the plan."""
    roster: slice = getattr(request, "param", slice(3))

    def run(encoding: Encoding, script: Callable[[Scene], Awaitable[None]]) -> None:
        async def collecting(nodes: list[Node]) -> None:
            plan = examples.plan(*[node.me for node in nodes[roster]], parent=nodes[0].head.digest)
            collector = Collector(nodes[2].context, plan, PLAN, nodes[2].head.document)
            running = asyncio.create_task(collector.run())
            try:
                await script(Scene(nodes, collector))
            finally:
                running.cancel()
                (outcome,) = await asyncio.gather(running, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError), outcome

        settings = EncodingSettings(shared=encoding, experts=encoding)
        loopback.play(tmp_path, VALUES, settings, collecting)

    return run


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_an_announced_result_becomes_values(play: Play, encoding: Encoding) -> None:
    embed, head = Made(encoding), Made(encoding, "head", add=0.25)

    async def script(scene: Scene) -> None:
        for made in (embed, head):
            scene.maker.keep(made.data)
        scene.announce(scene.maker, {"embed": embed.result(scene.maker.me)})
        await scene.until(lambda: scene.has(embed.values))
        scene.announce(scene.maker, {n: m.result(scene.maker.me) for n, m in {"embed": embed, "head": head}.items()})
        await scene.until(lambda: scene.has(head.values))
        assert scene.node.store.has(digest_of(embed.values)), "they are on the disk before the commit"
        assert scene.node.exchange.received == len(embed.data) + len(head.data), "each of them came once"
        assert not scene.node.board.lost and not scene.node.complaint

    play(encoding, script)


def test_the_contributions_that_a_result_contains_come_from_its_maker(play: Play) -> None:
    """Without them nobody here could tell what it contains, and their node may be out of reach from here."""
    embed = Made("int8")

    async def script(scene: Scene) -> None:
        offer = seal(scene.other.identity, examples.contribution(scene.other.me, plan=PLAN))
        scene.maker.board.post(offer)
        contributors = (scene.maker.me, scene.other.me)
        scene.announce(scene.maker, {"embed": embed.result(scene.maker.me, contributors=contributors)})
        found = scene.node.board.contributions
        await scene.until(lambda: found.get((1, PLAN), {}).keys() == {scene.other.me})
        assert found[1, PLAN][scene.other.me].digest == offer.digest

    play("int8", script)


def test_two_shards_that_changed_by_the_same_bytes(play: Play) -> None:
    embed, tail = Made("int8"), Made("int8", "tail")
    assert embed.data == tail.data and embed.values != tail.values

    async def script(scene: Scene) -> None:
        scene.maker.keep(embed.data)
        results = {"embed": embed.result(scene.maker.me), "tail": tail.result(scene.maker.me)}
        scene.announce(scene.maker, results)
        await scene.until(lambda: scene.has(embed.values) and scene.has(tail.values))
        assert scene.node.exchange.received == len(embed.data) and not scene.node.complaint

    play("int8", script)


@pytest.mark.parametrize("encoding", ["fp32", "int8"])
def test_the_values_must_be_those_that_were_promised(play: Play, encoding: Encoding) -> None:
    made = Made(encoding)

    async def script(scene: Scene) -> None:
        for node in (scene.maker, scene.other):
            node.keep(made.data)
        lie = made.result(scene.maker.me, values=examples.digest("something else"))
        scene.announce(scene.maker, {"embed": lie})
        await scene.until(lambda: scene.node.board.lost.keys() == {scene.maker.me})
        assert scene.maker.me[-6:] in scene.node.complaint and "promised" in scene.node.complaint
        scene.announce(scene.other, {"embed": made.result(scene.other.me)})
        await scene.until(lambda: scene.has(made.values))
        assert scene.node.board.lost.keys() == {scene.maker.me}, (
            "whoever makes the same bytes honestly is none the worse"
        )

    play(encoding, script)


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_a_maker_of_what_is_no_number_is_lost_by_name(play: Play, encoding: Encoding) -> None:
    good = Made(encoding)
    poison = {"fp32": examples.floats(np.nan), "bf16": b"\xc0\x7f", "int8": examples.floats(np.nan), "int4": b""}
    bad = poison[encoding] + good.data[len(poison[encoding]) :] if encoding != "int4" else b"\xff" * len(good.data)

    async def script(scene: Scene) -> None:
        scene.maker.keep(bad)
        scene.other.keep(good.data)
        scene.announce(scene.other, {"embed": good.result(scene.other.me)})
        scene.announce(scene.maker, {"embed": good.result(scene.maker.me, encoded=examples.encoded(bad))})
        await scene.until(lambda: bool(scene.node.board.lost) and scene.has(good.values))
        assert scene.node.board.lost.keys() == {scene.maker.me}
        assert scene.maker.me[-6:] in scene.node.complaint and "not finite" in scene.node.complaint
        assert not scene.has(bad)

    play(encoding, script)


def test_a_result_of_another_size_is_not_fetched(play: Play) -> None:
    large = bytes(10_000)

    async def script(scene: Scene) -> None:
        offer = scene.maker.keep(large)
        result = Result(encoded=offer, values=examples.digest("values"), contributors=(scene.maker.me,))
        scene.announce(scene.maker, {"embed": result})
        await scene.until(lambda: "size of another shard" in scene.node.complaint)
        assert scene.maker.me[-6:] in scene.node.complaint
        await scene.collector.complete(
            examples.commit(
                round=1,
                shards=examples.states(VALUES),
                updates={"embed": examples.update(scene.maker.me, large)},
            )
        )
        assert scene.node.exchange.received == 0 and not scene.has(large)

    play("int8", script)


@pytest.mark.parametrize("play", [slice(0, 3, 2)], indirect=True)
def test_announcements_of_strangers_are_not_fetched(play: Play) -> None:
    junk, made = Made("int8", add=9.0), Made("int8")

    async def script(scene: Scene) -> None:
        scene.other.keep(junk.data)
        scene.maker.keep(made.data)
        scene.announce(scene.other, {"embed": junk.result(scene.other.me)})
        scene.announce(scene.maker, {"embed": made.result(scene.maker.me)})
        await scene.until(lambda: scene.has(made.values))
        assert not scene.has(junk.data) and not scene.node.exchange.arrivals.expected(digest_of(junk.data))

    play("int8", script)


# when the commit is here


def test_a_commit_completes_what_was_never_announced_here(play: Play) -> None:
    """Whether its reducer is gone and others have it, or was this node before it was started again."""
    made = {"embed": Made("int4"), "head": Made("int4", "head")}

    async def script(scene: Scene) -> None:
        for m in made.values():
            scene.other.keep(m.data)
        scene.node.board.lose(scene.maker.me)
        shards = examples.states({name: m.values for name, m in made.items()}, version=1)
        updates = {
            "embed": examples.update(scene.node.me, made["embed"].data),
            "head": examples.update(scene.maker.me, made["head"].data),
        }
        await scene.collector.complete(examples.commit(round=1, shards=shards, updates=updates))
        assert all(scene.has(m.values) for m in made.values())
        assert not scene.node.complaint

    play("int4", script)


def test_a_commit_that_nobody_can_complete_is_not_waited_for(play: Play) -> None:
    async def script(scene: Scene) -> None:
        lost = Encoded(digest=examples.digest("lost"), size=codec.encoded_size("int8", 700))
        update = examples.update(scene.maker.me).model_copy(update={"encoded": lost})
        commit = examples.commit(round=1, shards=examples.states(VALUES), updates={"embed": update})
        commit = commit.model_copy(
            update={"shards": examples.states({**VALUES, "embed": b"values that nobody has"}, version=1)}
        )
        await scene.collector.complete(commit)
        assert scene.node.store.find(lost.digest) is None

    play("int8", script)


@pytest.mark.parametrize("play", [slice(2, 3)], indirect=True)
def test_alone_with_a_commit_of_ones_own(play: Play) -> None:
    async def script(scene: Scene) -> None:
        shards = examples.states({**VALUES, "embed": b"lost"}, version=1)
        lost = Encoded(digest=examples.digest("lost"), size=codec.encoded_size("int8", 700))
        update = examples.update(scene.node.me).model_copy(update={"encoded": lost})
        await scene.collector.complete(examples.commit(round=1, shards=shards, updates={"embed": update}))
        assert scene.node.store.find(lost.digest) is None

    play("int8", script)
