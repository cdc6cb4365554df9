"""A reducer's work in one round: pull the contributions of its shards, average them, announce the results."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from swarm import codec
from swarm.contribute import encoding_of
from swarm.documents import Commit, Contribution, Encoded, Plan, Result
from swarm.exchange import CallFailed, Writer
from swarm.manifest import EncodingSettings
from swarm.patience import LOOK_SECONDS
from swarm.residuals import Residuals
from swarm.store import HashingFile, ShardStore

log = logging.getLogger(__name__)


class Fetcher(Protocol):
    """Brings contributions here; `swarm.exchange.Exchange` does."""

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        """Fetch objects from a peer. Raises CallFailed."""


class Reducer:
    """Averages shards of one round from the contributions that can be had."""

    def __init__(
        self,
        plan: Plan,
        base: Commit,
        settings: EncodingSettings,
        *,
        store: ShardStore,
        residuals: Residuals,
        exchange: Fetcher,
        margin: float,
        complain: Callable[[str, str], None],
        rate: float = 1.0,
        excused: Callable[[str], bool] = lambda node: False,
    ) -> None:
        """Args:
        plan: the round's plan.
        base: what it starts from.
        settings: encoding by kind of shard.
        store, residuals, exchange: this node's.
        margin: seconds that a contribution may come later than half of the others.
        complain: told the node and the reason when a contribution is bad.
        rate: part of the averaged change that is taken over.
        excused: whether nobody should wait for a node.
        """
        self._plan = plan
        self._base = base
        self._settings = settings
        self._store = store
        self._residuals = residuals
        self._exchange = exchange
        self._margin = margin
        self._complain = complain
        self._rate = rate
        self._excused = excused
        self._folder = store.scratch(plan.round)
        self._unreachable: set[str] = set()
        """Nodes whose contributions could not be fetched; nobody waits for them twice in a round."""
        self._rounded: set[str] = set()
        """Shards whose average has rounded something away. Files of another plan for this round may be there, too."""

    async def reduce(self, names: Sequence[str], contributions: Mapping[str, Contribution]) -> dict[str, Result]:
        """Average the named shards over the contributions that this node can fetch in time and that are sound.

        Args:
            names: shards to average.
            contributions: what the owners offer, by node.

        Returns:
            Result by shard; a shard that nobody offers, or nobody that can be reached, has none.
        """
        offers = {node: contributions[node] for node in sorted(contributions) if contributions[node].tokens > 0}
        await self._pull_all({node: offer for node, offer in offers.items() if node not in self._unreachable}, names)
        return {
            name: result
            for name in names
            if (result := await asyncio.to_thread(self._reduce_one, name, offers)) is not None
        }

    async def _pull_all(self, offers: Mapping[str, Contribution], names: Sequence[str]) -> None:
        """Bring the contributions here. When half of the nodes have sent theirs, the others have the margin left."""
        pulls = {asyncio.create_task(self._pull(node, offer, names), name=node) for node, offer in offers.items()}
        try:
            waiting = pulls
            while len(waiting) > len(pulls) // 2:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            deadline = asyncio.get_running_loop().time() + self._margin
            while waiting := {pull for pull in waiting if not self._excused(pull.get_name())}:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                _, waiting = await asyncio.wait(waiting, timeout=min(left, LOOK_SECONDS))
        finally:
            for pull in pulls:
                pull.cancel()
            for outcome in await asyncio.gather(*pulls, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _pull(self, node: str, offer: Contribution, names: Sequence[str]) -> None:
        mine = [offer.shards[name] for name in names if name in offer.shards and self._fits(name, offer.shards[name])]
        wanted = [(shard.digest, shard.size) for shard in mine if self._store.find(shard.digest) is None]
        if not wanted:
            return
        number = self._plan.round
        try:
            await self._exchange.fetch(node, wanted, lambda d, size: self._store.scratch_writer(number, d, size))
        except CallFailed as error:
            log.info("round %d: contribution left out: %s", number, error)
            self._unreachable.add(node)

    def _reduce_one(self, name: str, offers: Mapping[str, Contribution]) -> Result | None:
        """The result of one shard, its bytes and its new values in the scratch folder."""
        sound = {node: path for node, offer in offers.items() if (path := self._usable(name, node, offer)) is not None}
        if not sound:
            return None
        try:
            return self._average(name, offers, sound)
        except FloatingPointError as error:
            log.warning("round %d: %s is carried: %s", self._plan.round, name, error)
            return None

    def _average(self, name: str, offers: Mapping[str, Contribution], sound: Mapping[str, Path]) -> Result:
        encoding = encoding_of(self._settings, name)
        base = self._store.locate(self._base.shards[name].digest)
        if len(sound) == 1:
            (node,) = sound
            encoded = offers[node].shards[name]
        else:
            encoded = self._write(
                name,
                lambda target: codec.average(
                    encoding,
                    [(offers[node].tokens, path) for node, path in sound.items()],
                    base,
                    self._residuals.find("averaged", name),
                    target,
                    self._rest(name),
                ),
            )
            self._rounded.add(name)
        values = encoded.digest
        if codec.is_applied(encoding, self._rate):
            values = self._write(
                name, lambda target: codec.apply(encoding, base, self._store.locate(encoded.digest), target, self._rate)
            ).digest
        return Result(encoded=encoded, values=values, contributors=tuple(sound))

    def _usable(self, name: str, node: str, offer: Contribution) -> Path | None:
        """The bytes of a contribution to a shard, if they are here and may be averaged."""
        shard = offer.shards.get(name)
        if shard is None:
            return None
        path = self._store.find(shard.digest)
        if not self._fits(name, shard) or (path is not None and path.stat().st_size != shard.size):
            self._complain(node, f"its contribution to {name} has the size of another shard")
            return None
        if path is not None and not codec.is_finite(encoding_of(self._settings, name), path):
            self._complain(node, f"its contribution to {name} is not finite")
            return None
        return path

    def _fits(self, name: str, shard: Encoded) -> bool:
        """Whether what is offered has the size of this shard; nothing else is fetched."""
        encoding = encoding_of(self._settings, name)
        return shard.size == codec.encoded_size(encoding, self._base.shards[name].size // 4)

    def _write(self, name: str, fill: Callable[[HashingFile], None]) -> Encoded:
        """Write a file of the round that is named by its digest."""
        temporary = self._folder / f".averaged.{name}.part"
        with open(temporary, "wb") as file:
            target = HashingFile(file)
            fill(target)
        final = self._folder / target.digest
        os.replace(temporary, final)
        self._store.place(final)
        return Encoded(digest=target.digest, size=final.stat().st_size)

    def _rest(self, name: str) -> Path:
        """What this average rounds away, until it is known whether it was committed."""
        return self._folder / f".averaged.{name}"

    def settle(self, commit: Commit, me: str) -> None:
        """Keep what was rounded away from the averages that the commit contains."""
        for name, update in commit.updates.items():
            if update.reducer == me and name in self._rounded and self._rest(name).exists():
                self._residuals.replace("averaged", name, self._rest(name))
