"""Tells people what a node sees: writes its rounds down, shows its page, and keeps the snapshot that both come from."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError
from node.control import listening
from node.live import Live
from node.observer import Observer
from node.snapshot import as_json
from node.web.server import PagePlace, serving
from swarm.documents import Commit, Signed
from swarm.history import History, RoundLine
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.participant import Participant
from swarm.records import State, View
from swarm.store import ShardStore, read_commit

PAUSE_MARKER = "paused"
"""A file in the folder of a node that was paused: it stays so when it is started again."""
LOOK_SECONDS = 1.0
"""A snapshot is never older than this."""


class Reporter:
    """What a node's daemon tells; a participant calls `state` and `commit`."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        me: NodeId,
        store: ShardStore,
        home: Path,
        *,
        on_state: Callable[[State, str], None],
        on_round: Callable[[RoundLine], None],
    ) -> None:
        """Args:
        manifest: the run.
        me: the node.
        store: the node's, for past rounds.
        home: its folder.
        on_state, on_round: told what happens, too.
        """
        self._history = History(store.folder / "history.jsonl", manifest.document, on_round)
        self._observer = Observer(manifest, me=me, rounds=self._history.lines)
        self._live = Live()
        self._store = store
        self._home = home
        self._on_state = on_state
        self._news = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
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
    async def page(self, place: PagePlace | None) -> AsyncIterator[str | None]:
        """Serve the node's page inside; yields its address, None where there is to be none.

        Args:
            place: where, or None.

        Raises UserError when the port cannot be had.
        """
        if place is None:
            yield None
            return
        await self._live.publish(self._observer.snapshot())
        async with serving(place, self._home, self._live, self._find_commit) as address:
            yield address

    async def watch(self, participant: Participant) -> None:
        """Look at the participant's swarm for ever, and do what commands on this box say."""
        if (self._home / PAUSE_MARKER).exists():
            participant.pause()
        async with listening(self._home, lambda request: self._answer(request, participant)):
            while True:
                self._news.clear()
                self._observer.see(participant.membership.view)
                await self._live.publish(self._observer.snapshot())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._news.wait()

    async def _answer(self, request: Mapping[str, Any], participant: Participant) -> dict[str, Any]:
        """What a command on this box is answered. Raises UserError."""
        marker = self._home / PAUSE_MARKER
        match request["do"]:
            case "state":
                self._observer.see(participant.membership.view)
                return as_json(self._observer.snapshot())
            case "pause" | "finish" | "resume" if not participant.is_trainer:
                raise UserError("this node trains nothing anyway; it keeps and serves the state")
            case "pause" | "finish" as how:
                marker.touch()
                participant.pause(at_once=how == "pause")
                return {"said": "it pauses when the round has ended, and stays so until: spes-node resume"}
            case "resume":
                marker.unlink(missing_ok=True)
                if self._leaving is not None:
                    self._leaving.cancel()
                participant.resume()
                return {"said": "it trains again from the next round on"}
            case "leave" if request["now"]:
                os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C would
                return {"said": "it leaves the swarm"}
            case "leave":
                self._leaving = asyncio.create_task(_leave_after_round(participant))
                return {"said": "it leaves the swarm when the round has ended; at once: spes-node leave --now"}
        raise UserError(f"a node cannot {request['do']}")

    def _find_commit(self, number: int) -> Commit | None:
        signed = read_commit(self._store.folder, self._store.run_id, number)
        return signed.document if signed is not None else None


async def _leave_after_round(participant: Participant) -> None:
    participant.pause()
    await participant.until_paused()
    os.kill(os.getpid(), signal.SIGTERM)
