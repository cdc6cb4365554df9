"""The page of a swarm for somebody who takes no part in it: read from the DHT and from any node's commits."""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from node.live import Live
from node.observer import Observer
from node.remote_commits import read_commit
from node.web.server import PagePlace, serving
from swarm.discovery import find_manifest
from swarm.documents import Commit, Signed
from swarm.exchange import Exchange
from swarm.history import MOST_LINES, Moved, RoundLine, round_line
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.membership import Lookout
from swarm.network import Network
from swarm.records import View

PAST_ROUNDS = 200
"""Rounds before the first look that are read from the nodes' disks."""
KEPT_COMMITS = 2 * PAST_ROUNDS
"""Commits at hand for the slider over past rounds."""
LOOKS_PER_LEASE = 5
"""One of them asks everybody who may have records."""


async def look_on(
    peers: Sequence[str], run_id: str | None, place: PagePlace, home: Path, say: Callable[[str], None]
) -> None:
    """Serve the page of the run behind these peers until SIGINT or SIGTERM. Raises Unreachable and UserError."""
    say("looking for the swarm")
    identity = Identity.ephemeral()
    network = await Network.start(identity, peers=peers, client=True)
    try:
        manifest = await find_manifest(network, run_id)
        onlooker = Onlooker(network, manifest)
        await onlooker.look()
        async with serving(place, home, onlooker.live, onlooker.find_commit) as address:
            say(f"run {manifest.document.name} {manifest.digest[:12]}: {address}")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in (onlooker.go_on(), onlooker.read_past(), network.watch())]
                await _told_to_stop()
                for task in tasks:
                    task.cancel()
    finally:
        await network.close()


async def _told_to_stop() -> None:
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    await told.wait()


class Onlooker:
    """Reads what there is to know about a run, again and again."""

    def __init__(self, network: Network, manifest: Signed[Manifest]) -> None:
        """Args:
        network: joined.
        manifest: the run's.
        """
        self.live = Live()
        """The newest snapshot."""
        self._manifest = manifest
        self._exchange = Exchange(network, manifest.digest, handler=None)
        self._lookout = Lookout(network, manifest.digest)
        self._rounds: deque[RoundLine] = deque(maxlen=MOST_LINES)
        self._moved = Moved()
        self._looks = 0
        self._commits: dict[int, Signed[Commit]] = {}
        self._observer = Observer(manifest, rounds=self._rounds)
        self._view = View()
        self._last = -1
        """Round of the last commit that was read."""

    async def look(self) -> None:
        """Look once."""
        self._view = View(await self._lookout.look(thorough=self._looks % LOOKS_PER_LEASE == 0), self._lookout.until)
        self._looks += 1
        self._observer.see(self._view)
        newest = max((record.round for record in self._view.present().values()), default=0)
        first = max(0, newest - (PAST_ROUNDS if self._rounds else 1), self._last + 1)
        for number in range(first, newest + 1):
            if (commit := await self._read(number)) is not None:
                self._observer.adopt(commit)
                self._rounds.append(self._line(commit, self._moved.count(self._view)))
                self._last = number
        await self.live.publish(self._observer.snapshot())

    async def go_on(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._manifest.document.round.lease_seconds / LOOKS_PER_LEASE)
            await self.look()

    async def read_past(self) -> None:
        """Read the rounds before the first look, the last one first."""
        first = self._rounds[0].round if self._rounds else 0
        for number in range(first - 1, max(0, first - PAST_ROUNDS), -1):
            if (commit := await self._read(number)) is None:
                return
            self._rounds.appendleft(self._line(commit, bytes_moved=0))

    def find_commit(self, number: int) -> Commit | None:
        """The commit of a round, if it was read."""
        return self._commits[number].document if number in self._commits else None

    async def _read(self, number: int) -> Signed[Commit] | None:
        commit = await read_commit(self._exchange, self._view, number)
        if commit is not None:
            self._commits[number] = commit
            if len(self._commits) > KEPT_COMMITS:
                del self._commits[min(self._commits)]
        return commit

    def _line(self, commit: Signed[Commit], bytes_moved: int) -> RoundLine:
        document = commit.document
        seconds = document.train_seconds + (document.reduce_seconds[-1] if document.reduce_seconds else 0.0)
        return round_line(commit, self._manifest.document, now=0.0, seconds=seconds, bytes_moved=bytes_moved)
