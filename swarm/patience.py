"""Waiting for peers: with a deadline, by name, and never for one that is gone."""

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

from swarm.board import Board
from swarm.exchange import CallFailed, Exchange

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Peers that are waited for are pinged this often."""
FAILURES = 2
"""A peer that does not answer this many pings in a row is lost for the round."""


class Patience:
    """Waits for others on behalf of one node."""

    def __init__(self, board: Board, exchange: Exchange, tell: Callable[[str], None]) -> None:
        self._board = board
        self._exchange = exchange
        self._tell = tell
        """Shows people what is waited for."""
        self._failures: dict[str, int] = {}
        """Unanswered pings in a row, by node."""

    async def wait(
        self, ready: Callable[[], T | None], *, what: str, whom: Callable[[], Collection[str]], seconds: float
    ) -> T | None:
        """Wait until `ready` returns something.

        Peers that are waited for and do not answer are marked as lost on the board, which may make `ready` true.

        Args:
            ready: looks at the board; None means not yet.
            what: what is waited for, for people.
            whom: ids of the nodes that are waited for now.
            seconds: the deadline.

        Returns:
            What `ready` returned, or None when the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (found := await self._board.until(ready, min(LOOK_SECONDS, deadline - loop.time()))) is None:
            left = deadline - loop.time()
            if left <= 0:
                return None
            waiting = [node for node in whom() if node not in self._board.lost]
            self._tell(f"waiting for {what} of {names(waiting)}, at most {left:.0f} s more")
            await self.look(waiting)
        return found

    async def look(self, nodes: Collection[str]) -> None:
        """Ping nodes once; those that have not answered FAILURES times in a row are marked as lost on the board."""
        others = [node for node in nodes if node != self._exchange.network.node_id]
        answers = await asyncio.gather(*[self._answers(node) for node in others])
        for node, answered in zip(others, answers, strict=True):
            self._failures[node] = 0 if answered else self._failures.get(node, 0) + 1
            if self._failures[node] >= FAILURES:
                self._board.lose(node)

    async def _answers(self, node: str) -> bool:
        """Ping a peer; when it is ahead, a commit was not delivered here, so read it."""
        committed = self._board.committed
        try:
            _, number = await self._exchange.ping(node)
            if number > committed and (commit := await self._exchange.read(node, "commit", committed + 1)):
                self._board.post(commit)
        except CallFailed:
            return False
        return True


def short(node: str) -> str:
    """The end of a node id, enough to tell nodes apart."""
    return f"...{node[-6:]}"


def names(nodes: Collection[str]) -> str:
    """Node ids for people: three of them at most."""
    some = [short(node) for node in list(nodes)[:3]]
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(some) + more if some else "nobody"
