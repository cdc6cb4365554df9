"""The data ledger: which blocks a round uses, and what happens to those it did not."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from swarm.documents import Blocks, Ledger


def hand_out(ledger: Ledger, wanted: Mapping[str, int]) -> dict[str, tuple[Blocks, ...]]:
    """The blocks of every roster member in a round, in the order of use.

    A member's own reserved blocks come first, all of them even if it wants fewer. Then, member by member in the order
    of their ids, come those of the pool (returned ones and those reserved for nodes that are not in the roster, in
    ascending order), then new ones from the cursor on.

    Args:
        ledger: of the commit that the round starts from.
        wanted: roster members and how many blocks each should have.
    """
    absent = (block for node, ranges in ledger.reserved.items() if node not in wanted for block in ranges)
    new = (ledger.cursor, ledger.cursor + sum(wanted.values()))
    free = deque([*_joined(sorted([*ledger.returned, *absent])), new])
    handed = {}
    for node in sorted(wanted):
        ranges = list(ledger.reserved.get(node, ()))
        missing = wanted[node] - count(ranges)
        while missing > 0:
            start, stop = free.popleft()
            cut = min(stop, start + missing)
            ranges.append((start, cut))
            missing -= cut - start
            if cut < stop:
                free.appendleft((cut, stop))
        handed[node] = _joined(ranges)
    return handed


def settle_up(ledger: Ledger, handed: Mapping[str, tuple[Blocks, ...]], used: Mapping[str, int]) -> Ledger:
    """The ledger after a round: what a member did not use stays reserved for it, what nobody was handed is returned.

    Args:
        ledger: of the commit that the round started from.
        handed: the blocks of every roster member, from `hand_out`.
        used: how many of them each has used, counted from the start of its ranges; a node that is not in it used none.
    """
    given = sorted(block for ranges in handed.values() for block in ranges)
    cursor = max([ledger.cursor, *(stop for _, stop in given)])
    reserved = (block for ranges in ledger.reserved.values() for block in ranges)
    open_before = sorted([*ledger.returned, *reserved, (ledger.cursor, cursor)])
    left = {node: after(ranges, used.get(node, 0)) for node, ranges in sorted(handed.items())}
    return Ledger(
        cursor=cursor,
        returned=_without(_joined(open_before), given),
        reserved={node: ranges for node, ranges in left.items() if ranges},
    )


def after(ranges: Sequence[Blocks], used: int) -> tuple[Blocks, ...]:
    """What is left of `ranges` when the first `used` blocks are gone."""
    left: list[Blocks] = []
    for start, stop in ranges:
        skip = min(used, stop - start)
        used -= skip
        if start + skip < stop:
            left.append((start + skip, stop))
    return tuple(left)


def count(ranges: Iterable[Blocks]) -> int:
    """Number of blocks in the ranges."""
    return sum(stop - start for start, stop in ranges)


def ids(ranges: Iterable[Blocks]) -> list[int]:
    """The single block ids, in order of use."""
    return [block for start, stop in ranges for block in range(start, stop)]


def _joined(ranges: Iterable[Blocks]) -> tuple[Blocks, ...]:
    """The same blocks in the same order: neighbouring ranges are one, empty ones are gone."""
    joined: list[Blocks] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _without(ranges: Sequence[Blocks], taken: Sequence[Blocks]) -> tuple[Blocks, ...]:
    """The blocks of `ranges` that are not in `taken`, both in ascending order."""
    left: list[Blocks] = []
    for start, stop in ranges:
        for first, end in taken:
            if first < stop and end > start:
                left.append((start, max(start, first)))
                start = min(end, stop)
        left.append((start, stop))
    return _joined(left)
