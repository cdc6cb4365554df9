"""Fetches the results of a round as they are announced: its commit finds them here, and a lost maker is no loss."""

import asyncio

from swarm.board import Board
from swarm.documents import Reduction
from swarm.patience import LOOK_SECONDS
from swarm.replica import Replica


async def collect_results(number: int, plan: str, replica: Replica, board: Board) -> None:
    """Fetch every announced result of a round; runs until it is cancelled.

    Args:
        number: the round.
        plan: digest of its plan.
        replica: where the results go; its head is the commit that the round starts from.
        board: where they are announced.
    """
    shards = replica.head.document.shards

    def lacking(reduction: Reduction) -> list[tuple[str, int]]:
        return [
            (result.digest, shards[name].size)
            for name, result in reduction.results.items()
            if name in shards and replica.store.find(result.digest) is None
        ]

    def wanted() -> dict[str, list[tuple[str, int]]] | None:
        reductions = board.reductions.get((number, plan), {})
        found = {node: lacking(signed.document) for node, signed in reductions.items()}
        return {node: items for node, items in found.items() if items and not board.excused(node, number)} or None

    while True:
        if sources := await board.until(wanted, LOOK_SECONDS):
            usable = await asyncio.gather(*[replica.fetch(node, items) for node, items in sources.items()])
            for node, good in zip(sources, usable, strict=True):
                if not good:
                    board.lose(node)  # its shards go to their stand-ins, or are carried
            board.notify()
            asked = [digest for items in sources.values() for digest, _ in items]
            if any(replica.store.find(digest) is None for digest in asked):
                await board.changed(LOOK_SECONDS)  # a source failed: it is asked again, but not in a hot loop
