"""The data ledger: which blocks a round uses, and what happens to those it did not."""

from collections.abc import Iterable, Sequence

from swarm.documents import Blocks, Ledger


def take(ledger: Ledger, count: int) -> tuple[tuple[Blocks, ...], Ledger]:
    """Hand out `count` blocks: returned ones first, then new ones from the cursor on."""
    taken: list[Blocks] = []
    returned = list(ledger.returned)
    while count and returned:
        start, stop = returned.pop(0)
        cut = min(stop, start + count)
        taken.append((start, cut))
        count -= cut - start
        if cut < stop:
            returned.insert(0, (cut, stop))
    if count:
        taken.append((ledger.cursor, ledger.cursor + count))
    return tuple(taken), Ledger(cursor=ledger.cursor + count, returned=tuple(returned))


def give_back(ledger: Ledger, unused: Iterable[Blocks]) -> Ledger:
    """Return blocks to the pool; neighbouring ranges are joined."""
    merged: list[Blocks] = []
    for start, stop in sorted([*ledger.returned, *unused]):
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return Ledger(cursor=ledger.cursor, returned=tuple(merged))


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
