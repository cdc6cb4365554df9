"""A reducer's work in one round: pull the contributions of its shards, average them, announce the results."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from swarm import codec
from swarm.documents import Commit, Contribution, Plan, Result
from swarm.exchange import CallFailed, Exchange
from swarm.store import ShardStore

log = logging.getLogger(__name__)


class _HashingFile:
    """A file that knows the digest of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        self.hash.update(chunk)
        self._file.write(chunk)


class Reducer:
    """Averages shards of one round from the contributions that can be had."""

    def __init__(self, plan: Plan, head: Commit, store: ShardStore, exchange: Exchange) -> None:
        self._plan = plan
        self._head = head
        self._store = store
        self._exchange = exchange
        self._refused: set[str] = set()
        """Nodes whose contributions could not be fetched or are not finite."""

    async def reduce(self, names: Sequence[str], contributions: Mapping[str, Contribution]) -> dict[str, Result]:
        """Average the named shards over the contributions that this node can fetch and that are finite.

        Args:
            names: shards to average.
            contributions: what the owners offer, by node.

        Returns:
            Result by shard; a shard that nobody offers, or nobody that can be reached, has none.
        """
        offers = {node: c for node, c in contributions.items() if c.tokens > 0 and node not in self._refused}
        fetched = await asyncio.gather(*[self._pull(node, offers[node], names) for node in sorted(offers)])
        good = {node: offers[node] for node, ok in zip(sorted(offers), fetched, strict=True) if ok}
        self._refused |= offers.keys() - good.keys()
        return {
            name: result for name in names if (result := await asyncio.to_thread(self._average, name, good)) is not None
        }

    async def _pull(self, node: str, contribution: Contribution, names: Sequence[str]) -> bool:
        """Bring a node's contributions to these shards here and look at them; whether they can be used."""
        digests = {name: contribution.shards[name] for name in names if name in contribution.shards}
        wanted = [
            (digest, self._head.shards[name].size)
            for name, digest in digests.items()
            if self._store.find(digest) is None
        ]
        number = self._plan.round
        try:
            if wanted:
                await self._exchange.fetch(node, wanted, lambda d, size: self._store.scratch_writer(number, d, size))
        except CallFailed as error:
            log.info("round %d: contribution left out: %s", number, error)
            return False
        if any(self._path(digest).stat().st_size != self._head.shards[name].size for name, digest in digests.items()):
            log.warning("round %d: contribution of %s left out: a shard has the size of another one", number, node)
            return False
        if not await asyncio.to_thread(self._all_finite, list(digests.values())):
            log.warning("round %d: contribution of %s left out: it is not finite", number, node)
            return False
        return True

    def _all_finite(self, digests: Sequence[str]) -> bool:
        return all(codec.is_finite(self._path(digest)) for digest in digests)

    def _path(self, digest: str) -> Path:
        path = self._store.find(digest)
        assert path is not None, "it was fetched before"
        return path

    def _average(self, name: str, contributions: Mapping[str, Contribution]) -> Result | None:
        offers = [(node, c.tokens, c.shards[name]) for node, c in sorted(contributions.items()) if name in c.shards]
        if not offers:
            return None
        contributors = tuple(node for node, _, _ in offers)
        if len(offers) == 1:
            return Result(digest=offers[0][2], contributors=contributors)
        folder = self._store.scratch(self._plan.round)
        temporary = folder / f".{name}.part"
        with open(temporary, "wb") as file:
            target = _HashingFile(file)
            codec.average([(tokens, self._path(digest)) for _, tokens, digest in offers], target)
        digest = target.hash.hexdigest()
        os.replace(temporary, folder / digest)
        self._store.place(folder / digest)
        return Result(digest=digest, contributors=contributors)
