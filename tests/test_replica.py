"""A node's copy of the state, between real peers: how it gets to a commit, how much that moves, and what it refuses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from swarm import codec
from swarm.documents import Commit, ShardState, Signed, digest_of, seal
from swarm.identity import Identity
from swarm.manifest import Encoding, EncodingSettings
from swarm.records import View
from swarm.replica import Unobtainable
from tests import examples
from tests.nodes import Loopback, Node

SIZES = {"embed": 3000, "head": 1000, "layer.0.expert.0": 2000, "layer.0.expert.1": 2000}
GENESIS = {name: np.linspace(-1, 1, size, dtype="<f4") for name, size in SIZES.items()}
VALUES = {name: values.tobytes() for name, values in GENESIS.items()}
Play = Callable[[Encoding, Callable[[list[Node]], Awaitable[None]]], None]


@pytest.fixture
def play(loopback: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a script with three peers at the same genesis; what they do not have they are asked for once only."""
    monkeypatch.setattr("swarm.replica.PASSES", 1)

    def run(encoding: Encoding, script: Callable[[list[Node]], Awaitable[None]]) -> None:
        loopback.play(tmp_path, VALUES, EncodingSettings(shared=encoding, experts=encoding), script)

    return run


class Step:
    """The next commit: some shards have changed by a number."""

    def __init__(self, author: Node, encoding: Encoding, before: Mapping[str, bytes], add: Mapping[str, float]) -> None:
        self.travelled: dict[str, bytes] = {}
        self.values = dict(before)
        for name, number in add.items():
            base = np.frombuffer(before[name], "<f4")
            delta = np.full(base.size, number, "<f4")
            self.travelled[name] = codec.encode(encoding, base + delta if encoding == "fp32" else delta)
            decoded = codec.decode(encoding, self.travelled[name], base.size)
            self.values[name] = (decoded if encoding == "fp32" else base + decoded).tobytes()
        head = author.head.document
        self.number = head.round + 1
        document = examples.commit(
            round=self.number,
            parent=author.head.digest,
            leader=author.me,
            shards={**head.shards, **examples.states({n: self.values[n] for n in add}, self.number)},
            updates={name: examples.update(author.me, data) for name, data in self.travelled.items()},
            tokens=self.number,
        )
        self.commit = seal(author.identity, document)

    def hold(self, node: Node) -> None:
        """A node has what travelled, but has not moved."""
        for data in self.travelled.values():
            node.keep(data, self.number)


def is_at(node: Node, commit: Signed[Commit], values: Mapping[str, bytes]) -> bool:
    """Whether a node is at a commit and can prove it by the values on its disk."""
    shards = commit.document.shards
    held = all(node.store.path(shard.digest).read_bytes() == values[name] for name, shard in shards.items())
    return held and node.head == commit and node.membership.record.digest == commit.document.state


def changed(author: Node, commit: Commit, **shards: ShardState) -> Signed[Commit]:
    """The commit as a liar would sign it."""
    return seal(author.identity, commit.model_copy(update={"shards": {**commit.shards, **shards}}))


# one round


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_a_node_one_round_behind_makes_the_values_from_what_travelled(play: Play, encoding: Encoding) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, encoding, VALUES, {"embed": 0.5, "layer.0.expert.1": 0.25})
        step.hold(first)
        await node.replica.adopt(step.commit, [first.me])
        assert is_at(node, step.commit, step.values)
        assert node.exchange.received == sum(map(len, step.travelled.values()))

    play(encoding, script)


def test_what_travelled_comes_from_whoever_has_it(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        gone, other, node = nodes
        step = Step(gone, "int8", VALUES, {"embed": 0.5})
        step.hold(other)
        await node.replica.adopt(step.commit, [gone.me, other.me])
        assert is_at(node, step.commit, step.values)

    play("int8", script)


def test_where_what_travelled_is_gone_the_values_themselves_are_fetched(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, {"embed": 0.5})
        first.adopt(step.commit, step.values)
        await node.replica.adopt(step.commit, [first.me])
        assert is_at(node, step.commit, step.values)
        assert node.exchange.received == len(VALUES["embed"])

    play("int8", script)


def test_two_shards_that_changed_by_the_same_bytes(play: Play) -> None:
    names = ["layer.0.expert.0", "layer.0.expert.1"]

    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int4", VALUES, dict.fromkeys(names, 0.5))
        step.hold(first)
        await node.replica.adopt(step.commit, [first.me])
        assert is_at(node, step.commit, step.values)
        assert node.exchange.received == len(step.travelled[names[0]])

    play("int4", script)


def test_what_this_node_made_itself_is_taken_in(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, {"embed": 0.5})
        node.keep(step.values["embed"])
        await node.replica.adopt(step.commit, [])
        assert is_at(node, step.commit, step.values) and node.exchange.received == 0

    play("int8", script)


# many rounds


@pytest.mark.parametrize("encoding", ["fp32", "int8"])
def test_a_node_many_rounds_behind_fetches_only_what_has_changed(play: Play, encoding: Encoding) -> None:
    async def script(nodes: list[Node]) -> None:
        first, second, node = nodes
        values, step = dict(VALUES), None
        for name in ("embed", "layer.0.expert.0", "embed"):
            step = Step(first, encoding, values, {name: 0.5})
            values = step.values
            for other in (first, second):
                other.adopt(step.commit, values)
        assert step is not None
        for other in (first, second):
            await other.membership.publish()
        before = node.exchange.received
        assert await node.pursuit.run()
        assert is_at(node, step.commit, values)
        moved = node.exchange.received - before - len(step.commit.wire)
        assert moved == len(VALUES["embed"]) + len(VALUES["layer.0.expert.0"])
        assert not await node.pursuit.run(), "it is there"

    play(encoding, script)


def test_a_node_that_has_nothing_fetches_the_newest_state(play: Play, tmp_path: Path) -> None:
    async def script(nodes: list[Node]) -> None:
        first, second, node = nodes
        step = Step(first, "int8", VALUES, {"embed": 0.5})
        for other in (first, second):
            other.adopt(step.commit, step.values)
            await other.membership.publish()
        newcomer = Node(node.identity, tmp_path / "new", {}, node.context.manifest, network=node.exchange.network)
        assert await newcomer.pursuit.run()
        assert is_at(newcomer, step.commit, step.values)
        assert newcomer.exchange.received == sum(map(len, set(step.values.values()))) + len(step.commit.wire)

    play("int8", script)


def test_what_is_here_of_a_commit_is_carried_to_the_next_by_what_travelled(play: Play, tmp_path: Path) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, dict.fromkeys(["embed", "layer.0.expert.0", "layer.0.expert.1"], 0.5))
        step.hold(first)
        newcomer = Node(node.identity, tmp_path / "new", {}, node.context.manifest, network=node.exchange.network)
        for name in ("embed", "head", "layer.0.expert.1"):
            newcomer.store.put(VALUES[name])
        await newcomer.replica.carry(first.head.document, step.commit.document, [first.me])
        here = {path.read_bytes() for path in newcomer.store.folder.glob("objects/*/*")}
        assert here == {step.values["embed"], VALUES["head"], step.values["layer.0.expert.1"]}
        assert not list(newcomer.store.folder.glob("scratch/*/*")), "the disk does not fill round by round"
        assert newcomer.exchange.received == len(step.travelled["embed"]) + len(step.travelled["layer.0.expert.1"])

    play("int8", script)


@pytest.mark.parametrize("lie", ["unheard of", "an old commit"])
def test_a_record_that_tells_of_a_better_commit_than_there_is(play: Play, lie: str) -> None:
    """Nobody is led back by it, nor kept from the best commit that there is."""

    async def script(nodes: list[Node]) -> None:
        first, liar, node = nodes
        old = Step(first, "fp32", VALUES, {"embed": 0.5})
        for other in nodes:
            other.adopt(old.commit, old.values)
        new = Step(first, "fp32", old.values, {"head": 0.5})
        first.adopt(new.commit, new.values)
        told = {"unheard of": (examples.digest("unheard of"), 9), "an old commit": (old.commit.digest, 1)}[lie]
        liar.membership.note(commit=told[0], round=told[1], tokens=10**12)
        for other in (first, liar):
            await other.membership.publish()
        assert await node.pursuit.run()
        assert is_at(node, new.commit, new.values)
        assert not await node.pursuit.run()

    play("fp32", script)


def test_an_object_that_was_written_again_can_still_be_served(play: Play) -> None:
    """A shard that training did not change is written into the round's folder once more, which does not last."""

    async def script(nodes: list[Node]) -> None:
        node = nodes[2]
        node.keep(VALUES["head"])
        for _ in range(4):
            await node.replica.adopt(Step(node, "fp32", VALUES, {}).commit, [])
        path = node.object(digest_of(VALUES["head"]))
        assert path is not None and path.read_bytes() == VALUES["head"]

    play("fp32", script)


# which commit


def test_of_two_successors_the_one_with_more_tokens_is_taken(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        node = nodes[2]
        parent = node.head.digest

        def successor(author: Node, **fields: object) -> Signed[Commit]:
            document = examples.commit(
                round=1, parent=parent, leader=author.me, shards=node.head.document.shards, tokens=10
            )
            return seal(author.identity, document.model_copy(update=fields))

        plain = [successor(author) for author in nodes]
        lowest = min(plain, key=lambda commit: commit.digest)
        assert node.replica.successor(plain) == lowest == node.replica.successor(reversed(plain))
        richer = successor(nodes[0], tokens=11)
        assert node.replica.successor([*plain, richer]) == richer
        strange = successor(nodes[0], tokens=99, parent=examples.digest("elsewhere"))
        assert node.replica.successor([strange]) is None
        other_layout = successor(nodes[0], tokens=99, shards=examples.states({**VALUES, "embed": b"four"}))
        assert node.replica.successor([other_layout]) is None

    play("fp32", script)


def follow(node: Node, tokens: int) -> None:
    """Move a node to a commit of its own that changes nothing and has so many tokens."""
    head = node.head.document
    document = examples.commit(
        round=head.round + 1, parent=node.head.digest, leader=node.me, shards=head.shards, tokens=tokens
    )
    node.adopt(seal(node.identity, document), VALUES)


def test_of_two_chains_that_are_ahead_in_turns_the_one_that_was_lighter_gives_way(play: Play) -> None:
    """Each half of a swarm looks around when it has just committed, and is ahead at that moment."""

    async def script(nodes: list[Node]) -> None:
        ours, theirs, behind = nodes

        def see(node: Node, other: Node) -> None:
            node.membership.view = View({other.me: other.membership.record})

        follow(ours, tokens=10)
        behind.adopt(ours.head, VALUES)
        follow(ours, tokens=20)
        follow(theirs, tokens=11)
        see(ours, theirs)
        assert ours.replica.rival() == theirs.me, "it had more in round 1"
        see(theirs, ours)
        assert theirs.replica.rival() is None, "it only has to move, or to finish its round"
        see(ours, behind)
        assert ours.replica.rival() is None, "the chain is the same"
        follow(theirs, tokens=21)
        see(ours, theirs)
        assert ours.replica.rival() == theirs.me, "and now it is the better one"
        follow(ours, tokens=40)
        follow(theirs, tokens=31)
        see(ours, theirs)
        assert ours.replica.rival() is None, "it has fallen behind"

    play("fp32", script)


async def refused(node: Node, commit: Signed[Commit], sources: Iterable[Node]) -> None:
    """A commit cannot be had, the state stays as it is, and nobody runs after that commit for a while."""
    before = node.head
    with pytest.raises(Unobtainable):
        async with asyncio.timeout(20):
            await node.replica.adopt(commit, [source.me for source in sources])
    assert is_at(node, before, VALUES)
    assert node.replica.successor([commit]) is None


@pytest.mark.parametrize("encoding", get_args(Encoding))
@pytest.mark.parametrize("travelling", [True, False], ids=["what travelled", "values"])
def test_a_commit_with_values_that_are_no_numbers_is_not_adopted(
    play: Play, encoding: Encoding, travelling: bool
) -> None:
    poison = np.where(np.arange(SIZES["embed"]) == 7, np.nan, GENESIS["embed"]).astype("<f4").tobytes()

    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, encoding, VALUES, {"embed": 0.5})
        bad = poison if encoding == "fp32" else b"\xff" * len(step.travelled["embed"])
        document = step.commit.document.model_copy(update={"updates": {"embed": examples.update(first.me, bad)}})
        commit = changed(first, document, embed=examples.states({"embed": poison}, version=1)["embed"])
        first.keep(bad if travelling else poison)
        await refused(node, commit, [first])
        assert node.store.find(digest_of(poison)) is None and node.store.find(digest_of(bad)) is None

    play(encoding, script)


def test_values_that_do_not_follow_from_what_travelled_are_not_adopted(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, {"embed": 0.5})
        step.hold(first)
        wrong = examples.states({"embed": VALUES["embed"][::-1]}, version=1)["embed"]
        await refused(node, changed(first, step.commit.document, embed=wrong), [first])

    play("int8", script)


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_is_said_to_have_travelled_in_another_size_is_not_fetched(play: Play, size: int) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, {"embed": 0.5})
        first.adopt(step.commit, step.values)
        first.keep(bytes(size))
        lie = {"embed": examples.update(first.me, bytes(size))}
        commit = seal(first.identity, step.commit.document.model_copy(update={"updates": lie}))
        await node.replica.adopt(commit, [first.me])
        assert is_at(node, commit, step.values), "the values themselves are there"
        assert node.exchange.received == len(VALUES["embed"])

    play("int8", script)


def test_the_digest_of_another_shard_is_not_a_shards_value(play: Play) -> None:
    async def script(nodes: list[Node]) -> None:
        first, _, node = nodes
        step = Step(first, "int8", VALUES, {})
        head = node.head.document.shards["head"]
        lie = ShardState(version=1, digest=head.digest, size=node.head.document.shards["embed"].size)
        await refused(node, changed(first, step.commit.document, embed=lie), [first])

    play("int8", script)


def test_a_lie_about_a_committed_object_does_not_remove_it(identities: list[Identity], tmp_path: Path) -> None:
    """A part of the state is said to have travelled for a shard twice as large, and is no number in its encoding."""
    small = np.frombuffer(b"\xc0\x7f\xc0\x3f" * 1000, "<f4")  # 1.5 and a little; the lower half is bf16's NaN
    assert np.isfinite(small).all()
    values = {"large": bytes(8000), "small": small.tobytes()}
    manifest = examples.manifest(encoding=EncodingSettings(shared="bf16"))
    node = Node(identities[0], tmp_path / "store", values, manifest)
    own = examples.encoded(values["small"])
    assert "not finite" in node.replica.apply(node.head.document, "large", own, examples.digest("values"))
    assert node.store.has(own.digest) and node.object(own.digest) is not None
