"""The data ledger: no block is trained twice and none is lost, whoever fails."""

from hypothesis import given
from hypothesis import strategies as st

from swarm import blocks
from swarm.documents import Blocks, Ledger

rounds = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=5), max_size=12)
"""For every round and node: blocks asked for, and blocks used (0 for a node that fails)."""


@given(rounds)
def test_every_block_below_the_cursor_is_used_once_or_returned(history: list[list[tuple[int, int]]]) -> None:
    ledger, used = Ledger(), list[int]()
    for nodes in history:
        unused, handed = list[Blocks](), list[int]()
        for wanted, done in nodes:
            ranges, ledger = blocks.take(ledger, wanted)
            assert blocks.count(ranges) == wanted
            handed += blocks.ids(ranges)
            used += blocks.ids(ranges)[:done]
            unused += blocks.after(ranges, done)
        assert len(handed) == len(set(handed))
        ledger = blocks.give_back(ledger, unused)
        assert sorted(used + blocks.ids(ledger.returned)) == list(range(ledger.cursor))


@given(rounds)
def test_returned_ranges_are_sorted_apart_and_never_empty(history: list[list[tuple[int, int]]]) -> None:
    ledger = Ledger()
    for nodes in history:
        unused = list[Blocks]()
        for wanted, done in nodes:
            ranges, ledger = blocks.take(ledger, wanted)
            unused += blocks.after(ranges, done)
        ledger = blocks.give_back(ledger, unused)
        edges = [edge for block_range in ledger.returned for edge in block_range]
        assert edges == sorted(set(edges))


def test_returned_blocks_are_handed_out_first() -> None:
    ranges, ledger = blocks.take(Ledger(cursor=20, returned=((3, 5), (9, 12))), 4)
    assert ranges == ((3, 5), (9, 11))
    assert ledger == Ledger(cursor=20, returned=((11, 12),))
    ranges, ledger = blocks.take(ledger, 3)
    assert ranges == ((11, 12), (20, 22))
    assert ledger == Ledger(cursor=22)


def test_one_node_that_uses_everything_reads_the_blocks_in_order() -> None:
    ledger, seen = Ledger(), list[int]()
    for _ in range(5):
        ranges, ledger = blocks.take(ledger, 7)
        seen += blocks.ids(ranges)
    assert seen == list(range(35))
