"""Tells people what a node sees: writes its rounds down, shows its page, and keeps the snapshot that both come from."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from node.live import Live
from node.observer import Observer
from node.web.server import PagePlace, serving
from swarm.documents import Commit, Signed
from swarm.history import History, RoundLine
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.participant import Participant
from swarm.records import State, View
from swarm.store import ShardStore, read_commit

LOOK_SECONDS = 1.0
"""A snapshot is never older than this."""


class Reporter:
    """What a node's daemon tells; a participant calls `state` and `commit`."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        me: NodeId,
        store: ShardStore,
        *,
        on_state: Callable[[State, str], None],
        on_round: Callable[[RoundLine], None],
    ) -> None:
        """Args:
        manifest: the run.
        me: the node.
        store: the node's, for past rounds.
        on_state, on_round: told what happens, too.
        """
        self._history = History(store.folder / "history.jsonl", manifest.document, on_round)
        self._observer = Observer(manifest, me=me, rounds=self._history.lines)
        self._live = Live()
        self._store = store
        self._on_state = on_state
        self._news = asyncio.Event()
        if store.head is not None:
            self._observer.adopt(store.head)

    def state(self, state: State, reason: str) -> None:
        """The node does this now."""
        self._observer.tell(state, reason)
        self._news.set()
        self._on_state(state, reason)

    def commit(self, commit: Signed[Commit], view: View, seconds: float) -> None:
        """The node has adopted a commit."""
        self._history.add(commit, view, seconds)
        self._observer.adopt(commit)
        self._news.set()

    @asynccontextmanager
    async def page(self, place: PagePlace | None, home: Path) -> AsyncIterator[str | None]:
        """Serve the node's page inside; yields its address, None where there is to be none.

        Args:
            place: where, or None.
            home: folder of the node.

        Raises UserError when the port cannot be had.
        """
        if place is None:
            yield None
            return
        await self._live.publish(self._observer.snapshot())
        async with serving(place, home, self._live, self._find_commit) as address:
            yield address

    async def watch(self, participant: Participant) -> None:
        """Look at the participant's swarm for ever."""
        while True:
            self._news.clear()
            self._observer.see(participant.membership.view)
            await self._live.publish(self._observer.snapshot())
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _find_commit(self, number: int) -> Commit | None:
        signed = read_commit(self._store.folder, self._store.run_id, number)
        return signed.document if signed is not None else None
