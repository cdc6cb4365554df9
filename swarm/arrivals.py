"""What this node is fetching, so that a peer which asks for it too soon can wait for it here."""

import asyncio
from collections import Counter


class Arrivals:
    """The objects that are on their way to this node."""

    def __init__(self) -> None:
        self._expected: Counter[str] = Counter()
        self._next = asyncio.Event()

    def expect(self, digest: str) -> None:
        """An object is being fetched; each call needs its `settle`."""
        self._expected[digest] += 1

    def settle(self, digest: str) -> None:
        """An object has come, or is given up: whoever waits looks again."""
        self._expected[digest] -= 1
        if self._expected[digest] <= 0:
            del self._expected[digest]
        self._next.set()
        self._next = asyncio.Event()

    def expected(self, digest: str) -> bool:
        """Whether the object will be here, if all goes well."""
        return digest in self._expected

    def next(self) -> asyncio.Event:
        """Set at the next arrival. Take it before looking, so that nothing arrives between looking and waiting."""
        return self._next
