"""The data ledger: no block is trained twice and none is lost, whoever fails."""

import itertools
import random
from collections.abc import Iterable

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from swarm import blocks
from swarm.documents import Blocks, Ledger, canonical

NODES = [letter * 46 for letter in "abcdef"]
ANN, BEN, CAT = NODES[:3]
MOST = 9

wishes = st.dictionaries(st.sampled_from(NODES), st.integers(0, MOST))
"""A plan: who is in the roster and how many blocks it should have. Who is not in it has left, or missed a commit."""
uses = st.dictionaries(st.sampled_from(NODES), st.integers(0, 2 * MOST))
"""How much of its blocks each node uses; one that fails is not in it."""
seeds = st.integers(0, 2**32 - 1)


def reserved_ids(ledger: Ledger) -> list[int]:
    return [block for ranges in ledger.reserved.values() for block in blocks.ids(ranges)]


def handed_ids(handed: dict[str, tuple[Blocks, ...]]) -> list[int]:
    return [block for ranges in handed.values() for block in blocks.ids(ranges)]


def apart(ranges: Iterable[Blocks]) -> bool:
    """No range is empty, and none goes on where the one before ends."""
    ranges = list(ranges)
    return all(start < stop for start, stop in ranges) and all(
        before[1] != behind[0] for before, behind in itertools.pairwise(ranges)
    )


def reread(ledger: Ledger) -> Ledger:
    """The ledger as a node finds it that opens the commit."""
    return Ledger.model_validate(msgpack.unpackb(canonical(ledger), use_list=False))


class Run:
    """A run seen from outside: its ledger, and every block that a commit has counted."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.used: list[int] = []

    def fork(self) -> "Run":
        other = Run()
        other.ledger, other.used = self.ledger, list(self.used)
        return other

    def round(self, wanted: dict[str, int], used: dict[str, int]) -> None:
        handed = blocks.hand_out(self.ledger, wanted)
        before, self.ledger = self.ledger, blocks.settle_up(self.ledger, handed, used)
        for node, ranges in handed.items():
            self.used += blocks.ids(ranges)[: used.get(node, 0)]
        self._check(before, wanted, handed)

    def _check(self, before: Ledger, wanted: dict[str, int], handed: dict[str, tuple[Blocks, ...]]) -> None:
        ledger, given = self.ledger, handed_ids(handed)
        assert handed.keys() == wanted.keys()
        assert len(set(given)) == len(given), "a block was handed to two members"
        for node, ranges in handed.items():
            mine = blocks.ids(before.reserved.get(node, ()))
            assert blocks.ids(ranges)[: len(mine)] == mine
            assert blocks.count(ranges) == max(wanted[node], len(mine))
            assert apart(ranges)
        assert sorted([*self.used, *blocks.ids(ledger.returned), *reserved_ids(ledger)]) == list(range(ledger.cursor))
        assert ledger.cursor == max([before.cursor, *(block + 1 for block in given)])
        assert ledger.reserved.keys() <= wanted.keys()
        assert all(ranges and apart(ranges) for ranges in ledger.reserved.values())
        assert apart(ledger.returned) and list(ledger.returned) == sorted(ledger.returned)


@given(st.lists(st.tuples(wishes, uses), max_size=12))
def test_every_block_is_used_once_or_returned_or_reserved(history: list[tuple[dict[str, int], dict[str, int]]]) -> None:
    run = Run()
    for wanted, used in history:
        run.round(wanted, used)


@given(seeds)
def test_blocks_survive_kills_missed_commits_aborted_plans_partitions_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()

    def go_on(run: Run, nodes: list[str]) -> None:
        wanted = {node: rng.randint(0, MOST) for node in nodes if rng.random() < 0.8}
        used = {node: rng.choice([0, rng.randint(0, MOST), 2 * MOST]) for node in wanted}
        run.round(wanted, used)

    for _ in range(40):
        match rng.choice(["round", "round", "abort", "partition", "restart"]):
            case "round":
                go_on(run, NODES)
            case "abort":  # a plan without a commit leaves nothing behind
                blocks.hand_out(run.ledger, dict.fromkeys(NODES, MOST))
            case "partition":
                cut = rng.randint(1, len(NODES) - 1)
                sides = [run.fork(), run.fork()]
                for _ in range(rng.randint(1, 4)):
                    go_on(sides[0], NODES[:cut])
                    go_on(sides[1], NODES[cut:])
                run = rng.choice(sides)
            case "restart":
                before, run.ledger = run.ledger, reread(run.ledger)
                assert run.ledger == before
        waiting = blocks.count(run.ledger.returned) + len(reserved_ids(run.ledger))
        assert waiting <= len(NODES) * MOST, "new blocks were handed out while old ones waited"


@given(st.lists(st.tuples(wishes, uses), max_size=6), wishes)
def test_a_plan_takes_new_blocks_only_when_no_old_ones_are_free(
    history: list[tuple[dict[str, int], dict[str, int]]], wanted: dict[str, int]
) -> None:
    run = Run()
    for earlier in history:
        run.round(*earlier)
    given_ids = set(handed_ids(blocks.hand_out(run.ledger, wanted)))
    owed = {block for node in wanted for block in blocks.ids(run.ledger.reserved.get(node, ()))}
    old = {*blocks.ids(run.ledger.returned), *reserved_ids(run.ledger)} - owed
    if any(block >= run.ledger.cursor for block in given_ids):
        assert old <= given_ids
    assert given_ids <= {*old, *owed, *range(run.ledger.cursor, run.ledger.cursor + sum(wanted.values()))}


@given(st.lists(st.tuples(wishes, uses), max_size=6), wishes, uses)
def test_every_node_computes_the_same_plan_and_ledger(
    history: list[tuple[dict[str, int], dict[str, int]]], wanted: dict[str, int], used: dict[str, int]
) -> None:
    run = Run()
    for earlier in history:
        run.round(*earlier)
    turned = run.ledger.model_copy(update={"reserved": dict(reversed(run.ledger.reserved.items()))})
    handed = blocks.hand_out(run.ledger, wanted)
    again = blocks.hand_out(turned, dict(reversed(wanted.items())))
    assert handed == again
    ledger = blocks.settle_up(run.ledger, handed, used)
    assert canonical(ledger) == canonical(blocks.settle_up(turned, dict(reversed(again.items())), used))


@given(st.lists(st.integers(0, MOST), max_size=8))
def test_one_node_that_uses_everything_reads_the_blocks_in_order(sizes: list[int]) -> None:
    run = Run()
    for size in sizes:
        run.round({ANN: size}, {ANN: size})
    assert run.used == list(range(sum(sizes)))
    assert run.ledger == Ledger(cursor=sum(sizes))


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)), max_size=8))
def test_a_slow_node_alone_reads_the_blocks_in_order_as_well(rounds: list[tuple[int, int]]) -> None:
    run = Run()
    for size, done in rounds:
        run.round({ANN: size}, {ANN: done})
    assert run.used == list(range(len(run.used)))


def test_what_a_node_did_not_use_comes_first_in_its_next_plan() -> None:
    ledger = Ledger()
    handed = blocks.hand_out(ledger, {ANN: 4, BEN: 4})
    assert handed == {ANN: ((0, 4),), BEN: ((4, 8),)}
    ledger = blocks.settle_up(ledger, handed, {ANN: 4, BEN: 1})
    assert ledger == Ledger(cursor=8, reserved={BEN: ((5, 8),)})
    assert blocks.hand_out(ledger, {ANN: 4, BEN: 4}) == {ANN: ((8, 12),), BEN: ((5, 8), (12, 13))}
    assert blocks.hand_out(ledger, {ANN: 4, BEN: 2}) == {ANN: ((8, 12),), BEN: ((5, 8),)}


def test_blocks_of_a_node_that_is_gone_go_to_the_others_before_new_ones() -> None:
    ledger = Ledger(cursor=20, returned=((3, 5),), reserved={ANN: ((12, 14),), CAT: ((5, 7), (16, 18))})
    handed = blocks.hand_out(ledger, {BEN: 3, ANN: 3})
    assert handed == {ANN: ((12, 14), (3, 4)), BEN: ((4, 7),)}
    assert blocks.settle_up(ledger, handed, {ANN: 3}) == Ledger(
        cursor=20, returned=((16, 18),), reserved={BEN: ((4, 7),)}
    )


def test_what_a_node_has_reserved_keeps_its_order() -> None:
    ledger = Ledger(cursor=30, reserved={ANN: ((20, 22), (4, 6))})
    handed = blocks.hand_out(ledger, {ANN: 6})
    assert blocks.ids(handed[ANN]) == [20, 21, 4, 5, 30, 31]
    assert blocks.settle_up(ledger, handed, {ANN: 1}).reserved == {ANN: ((21, 22), (4, 6), (30, 32))}


@given(st.lists(st.tuples(wishes, uses), max_size=4), wishes, uses, st.sets(st.sampled_from(NODES)))
def test_no_block_is_lost_when_a_plan_hands_out_less_than_it_might(
    history: list[tuple[dict[str, int], dict[str, int]]],
    wanted: dict[str, int],
    used: dict[str, int],
    dropped: set[str],
) -> None:
    run = Run()
    for earlier in history:
        run.round(*earlier)
    handed = {n: ranges for n, ranges in blocks.hand_out(run.ledger, wanted).items() if n not in dropped}
    ledger = blocks.settle_up(run.ledger, handed, used)
    counted = [block for node, ranges in handed.items() for block in blocks.ids(ranges)[: used.get(node, 0)]]
    everything = [*run.used, *counted, *blocks.ids(ledger.returned), *reserved_ids(ledger)]
    assert sorted(everything) == list(range(ledger.cursor))
