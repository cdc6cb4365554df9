"""Waiting for peers: with a deadline, by name, and never for one that is gone."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from swarm.board import Board
from swarm.exchange import CALL_SECONDS, CallFailed, Exchange
from swarm.records import View

Kind = Literal["plan", "contribution", "reduction", "commit"]
WORDS: dict[Kind, str] = {
    "plan": "the plan",
    "contribution": "the contributions",
    "reduction": "the results",
    "commit": "the commit",
}

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Peers that are waited for are pinged this often."""
ASLEEP_SECONDS = 10.0
"""A node that has not looked for this long was stopped: its deadlines have passed without its having waited."""
FAILURES = 2
"""A peer that does not answer this many pings in a row is lost for the round."""
LOOKED_AT = 8
"""Peers that are pinged at a time: who waits for a large swarm must not call all of it every second."""
WITNESSES = 2
"""Others that are asked for a document of a peer that does not answer."""


class Patience:
    """Waits for others on behalf of one node."""

    def __init__(
        self,
        board: Board,
        exchange: Exchange,
        margin: float,
        view: Callable[[], View],
        tell: Callable[[str], None],
    ) -> None:
        """Args:
        board, exchange: the node's.
        margin: seconds that a dead or slow peer may cost.
        view: the swarm as the node sees it.
        tell: shows people what is waited for.
        """
        self._board = board
        self._answer_seconds = min(CALL_SECONDS, max(2.0, margin / 5))
        """A ping that is not answered within this time has failed: two of them take less than the margin."""
        self._exchange = exchange
        self._view = view
        self._tell = tell
        self._failures: dict[str, int] = {}
        """Unanswered pings in a row, by node."""
        self._margin = margin
        self._reached = asyncio.get_running_loop().time()
        """When a peer has answered last."""
        self._looks = 0
        self._looked: dict[str, int] = {}
        """The number of the last look at each node."""

    async def wait(
        self, ready: Callable[[], T | None], *, what: Kind, whom: Callable[[], Collection[str]], seconds: float
    ) -> T | None:
        """Wait until `ready` returns something.

        Peers that are waited for are asked for the document, in case its delivery was lost, and others in place of
        those that do not answer; if these have no news either, the peer is marked as lost on the board. Either may
        make `ready` true.

        Args:
            ready: looks at the board; None means not yet.
            what: the kind of document that is waited for.
            whom: ids of the nodes that are waited for now.
            seconds: the deadline.

        Returns:
            What `ready` returned, or None when the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        look = loop.time() + LOOK_SECONDS
        while (found := await self._board.until(ready, max(0.0, min(look, deadline) - loop.time()))) is None:
            look = loop.time() + LOOK_SECONDS
            left = deadline - loop.time()
            if left <= 0:
                return None
            waiting = [node for node in whom() if node not in self._board.lost]
            self._tell(f"waiting for {WORDS[what]} of {self._view().call(waiting)}, at most {left:.0f} s more")
            await self.look(waiting, what)
        return found

    async def look(self, nodes: Collection[str], what: Kind) -> None:
        """Ping nodes once, LOOKED_AT of them at most and in turn, and ask them for a document of the round in progress;
        those that have not answered FAILURES times in a row, and sent nothing else meanwhile, are marked as lost on the
        board."""
        others = [node for node in nodes if node != self._exchange.network.node_id]
        began = asyncio.get_running_loop().time()
        if len(others) > LOOKED_AT:
            others = sorted(others, key=lambda node: self._looked.get(node, 0))[:LOOKED_AT]
        self._looks += 1
        self._looked.update(dict.fromkeys(others, self._looks))
        answers = await asyncio.gather(*[self._answers(node, what) for node in others])
        for node, answered in zip(others, answers, strict=True):
            if self._exchange.heard.get(node, -math.inf) >= began:  # what it sends may keep its answer waiting
                answered, self._reached = True, asyncio.get_running_loop().time()
            self._failures[node] = 0 if answered else self._failures.get(node, 0) + 1
            if self._failures[node] >= FAILURES and self._is_connected(began):
                self._board.lose(node)

    def _is_connected(self, since: float) -> bool:
        """Whether it is the others who are gone, and not this node: somebody has answered, or nobody for longer than
        the margin, or there is nobody else who could."""
        now = asyncio.get_running_loop().time()
        others = [node for node in self._witnesses() if not self._failures.get(node)]
        return not others or self._reached >= since or now - self._reached > self._margin

    async def _answers(self, node: str, what: Kind) -> bool:
        """Ping a peer and read what may not have been delivered; when it is ahead, that is a commit. A peer that is
        further ahead than that does nothing for this round any more, whatever it answers."""
        committed = self._board.committed
        try:
            head, number = await self._exchange.ping(node, self._answer_seconds)
        except CallFailed:
            return await self._at_second_hand(node, what, committed + 1)
        self._reached = asyncio.get_running_loop().time()
        self._board.meet(node, head, number)
        try:
            kind = "commit" if number > committed else what
            if (document := await self._exchange.read(node, kind, committed + 1)) is not None:
                self._board.post(document)
        except CallFailed as error:
            log.debug("%s not read: %s", what, error)
        return number <= committed + 1

    async def _at_second_hand(self, node: str, what: Kind, number: int) -> bool:
        """Ask some others for a document of a peer that does not answer: not everybody can reach everybody. Returns
        whether it is news: what is known already says nothing about whether the peer still lives."""
        others = self._witnesses(node)
        some = random.sample(others, min(WITNESSES, len(others)))
        news = await asyncio.gather(*[ask(self._board, self._exchange, other, what, number, node) for other in some])
        if any(answer is not None for answer in news):
            self._reached = asyncio.get_running_loop().time()
        return any(news)

    def _witnesses(self, node: str = "") -> list[str]:
        """Who is there beside this node and another one."""
        return sorted(self._view().present().keys() - self._board.lost.keys() - {node, self._exchange.network.node_id})


async def ask(board: Board, exchange: Exchange, witness: str, what: Kind, number: int, author: str) -> bool | None:
    """Ask a peer for another one's document and put it on the board; returns whether it is news, None when the peer
    does not answer."""
    try:
        signed = await exchange.read(witness, what, number, author)
    except CallFailed as error:
        log.debug("%s not read: %s", what, error)
        return None
    if signed is None or signed.document.kind != what or signed.signer != author:
        return False
    known = {other.digest for other in board.of(what, number, author)}
    return not board.post(signed) and signed.digest not in known
