"""The newest snapshot, for everybody who wants to know of each change: who is slow skips some, and nothing piles up."""

import asyncio

from node.snapshot import Snapshot


class Live:
    """Holds one snapshot and wakes those who wait for a newer one."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        """The newest one; None before the first."""
        self.is_closed = False
        self._changed = asyncio.Condition()

    async def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot."""
        async with self._changed:
            self.snapshot = snapshot
            self._changed.notify_all()

    async def close(self) -> None:
        """There will be no newer one."""
        async with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    async def newer(self, version: int) -> Snapshot | None:
        """A snapshot with a higher version, as soon as there is one; None when there will be none."""

        def is_newer() -> bool:
            return self.is_closed or (self.snapshot is not None and self.snapshot.version > version)

        async with self._changed:
            await self._changed.wait_for(is_newer)
        return None if self.is_closed else self.snapshot
