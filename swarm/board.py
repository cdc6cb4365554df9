"""The board: documents of the rounds in progress as they arrive, and a way to wait for them."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from swarm.documents import Commit, Contribution, Document, Leave, Plan, Reduction, Signed

T = TypeVar("T")

ROUNDS_AHEAD = 2
"""Documents of rounds further ahead than this are refused; a node that is so far behind reads the chain instead."""
MOVING_SECONDS = 6.0
"""Who tells of newer rounds at least this often is catching up."""


class Board:
    """What is known about the current rounds. Documents of the same kind, round and signer replace each other."""

    def __init__(self) -> None:
        self.plans: dict[int, dict[str, Signed[Plan]]] = {}
        """By round, then by leader."""
        self.heads: dict[str, str] = {}
        """Digest of the commit that each peer has told to be its head."""
        self.commits: dict[int, dict[str, Signed[Commit]]] = {}
        """By round, then by leader."""
        self.contributions: dict[tuple[int, str], dict[str, Signed[Contribution]]] = {}
        """By round and digest of the plan, then by node."""
        self.reductions: dict[tuple[int, str], dict[str, Signed[Reduction]]] = {}
        """By round and digest of the plan, then by node."""
        self.lost: dict[str, int] = {}
        """Nodes that do not answer, until they are heard of again; with the round of this node's head at the loss."""
        self._left: dict[str, int] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """The newest round that each node has told, and when it was seen first."""
        self._arriving: set[str] = set()
        """Nodes whose record says so."""
        self._verdicts: dict[str, bool] = {}
        """What was found of documents, by digest; true as long as the head does not move."""
        self.committed = 0
        """Round of this node's head."""
        self._changed = asyncio.Event()

    def post(self, signed: Signed[Document]) -> str:
        """Take a document; returns why it is refused, or an empty string."""
        document = signed.document
        self.hear(signed.signer)
        if isinstance(document, Leave):
            self._left[document.node] = max(document.round, self._left.get(document.node, 0))
        elif isinstance(document, Plan | Commit | Contribution | Reduction):
            if not self.committed < document.round <= self.committed + ROUNDS_AHEAD:
                return f"round {document.round} is not in progress here, {self.committed + 1} is"
            match document:
                case Plan():
                    self.plans.setdefault(document.round, {})[signed.signer] = cast(Signed[Plan], signed)
                case Commit():
                    self.commits.setdefault(document.round, {})[signed.signer] = cast(Signed[Commit], signed)
                case Contribution():
                    places = self.contributions.setdefault((document.round, document.plan), {})
                    places[signed.signer] = cast(Signed[Contribution], signed)
                case Reduction():
                    reductions = self.reductions.setdefault((document.round, document.plan), {})
                    known = reductions.get(signed.signer)
                    # deliveries overtake each other, and a reducer only ever adds results
                    if known is None or len(known.document.results) < len(document.results):
                        reductions[signed.signer] = cast(Signed[Reduction], signed)
        self.notify()
        return ""

    def of(self, kind: str, number: int, author: str) -> list[Signed[Any]]:
        """The documents of one kind that one node has signed in a round; several when they are about several plans."""
        places: list[Mapping[str, Signed[Any]]] = []
        match kind:
            case "plan":
                places = [self.plans.get(number, {})]
            case "commit":
                places = [self.commits.get(number, {})]
            case "contribution":
                places = [found for (round_, _), found in self.contributions.items() if round_ == number]
            case "reduction":
                places = [found for (round_, _), found in self.reductions.items() if round_ == number]
        return [found[author] for found in places if author in found]

    def verdict(self, digest: str, judge: Callable[[], bool]) -> bool:
        """Whether a document is sound: judged once, and not again at every look."""
        if digest not in self._verdicts:
            self._verdicts[digest] = judge()
        return self._verdicts[digest]

    def excused(self, node: str, number: int) -> bool:
        """Whether nobody should wait for a node in a round: it has left, or does not answer."""
        return node in self.lost or self._left.get(node, -1) >= number - 1

    def hear(self, node: str) -> None:
        """Note that a node is there."""
        self.lost.pop(node, None)

    def come_back(self, node: str) -> None:
        """Note that a node that has left takes part again."""
        self._left.pop(node, None)

    def meet(self, node: str, digest: str, number: int) -> None:
        """Note that a peer has told what its head is."""
        self.hear(node)
        self.heads[node] = digest
        self.see(node, number)
        self.notify()

    def see(self, node: str, number: int, *, arriving: bool = False) -> None:
        """Note which round a node's record tells that it holds: one that was committed after it was lost shows that it
        lives.

        Args:
            node: whose record it is.
            number: the round.
            arriving: whether the record says that it has just started, or is fetching the state.
        """
        if self.lost.get(node, number) < number:
            self.hear(node)
        seen = self._seen.get(node, (-1, 0.0))[0]
        if seen < number or (arriving and node not in self._arriving):
            self._seen[node] = max(seen, number), time.monotonic()
        if arriving:
            self._arriving.add(node)
        else:
            self._arriving.discard(node)

    def is_moving(self, node: str) -> bool:
        """Whether a node's record told of a newer round, or of its arrival, a moment ago."""
        return time.monotonic() - self._seen.get(node, (-1, -MOVING_SECONDS))[1] < MOVING_SECONDS

    def lose(self, node: str) -> None:
        """Note that a node does not answer."""
        self.lost.setdefault(node, self.committed)
        if node in self._seen:  # only what it tells from now on shows that it moves
            self._seen[node] = self._seen[node][0], -MOVING_SECONDS
        self.notify()

    def advance(self, committed: int) -> None:
        """The head is now `committed`: forget what belongs to it and to earlier rounds."""
        self.committed = committed
        self._verdicts.clear()
        for plans in (self.plans, self.commits):
            for number in [n for n in plans if n <= committed]:
                del plans[number]
        for documents in (self.contributions, self.reductions):
            for key in [k for k in documents if k[0] <= committed]:
                del documents[key]
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> None:
        """Wait until the board changes, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def until(self, ready: Callable[[], T | None], seconds: float) -> T | None:
        """Wait until `ready` returns something, looking again at every change; None after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while (found := ready()) is None:
                    await self._changed.wait()
                return found
        except TimeoutError:
            return ready()
