"""Keeps this node's shard store at the last commit, by fetching what changed from whoever has it."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import cast

from model.errors import SpesError
from swarm import codec
from swarm.documents import Commit, Signed, state_digest
from swarm.exchange import CallFailed, Exchange
from swarm.membership import Membership, NodeRecord
from swarm.patience import short
from swarm.ranking import ranked
from swarm.store import ShardStore

PASSES = 3
"""How often all sources are asked before a commit counts as unobtainable."""
PAUSE_SECONDS = 1.0
"""Between two passes."""
VOID_SECONDS = 30.0
"""An unobtainable commit is not tried again for this long."""

log = logging.getLogger(__name__)


class Unobtainable(SpesError):
    """No reachable peer has all shards of a commit. Caught by the round, which goes on from the head it has."""


def weight(tokens: int, number: int, digest: str) -> tuple[int, int, int]:
    """The order of commits of a forked chain: more trained tokens, then more rounds, then the lower digest wins."""
    return tokens, number, -int(digest, 16)


class Replica:
    """The committed state on this node and its way to the next one."""

    def __init__(self, store: ShardStore, exchange: Exchange, membership: Membership) -> None:
        self.store = store
        self._exchange = exchange
        self._membership = membership
        self._void: dict[str, float] = {}
        """Commits that could not be obtained, and until when they are left alone."""

    @property
    def head(self) -> Signed[Commit]:
        """The commit whose state is here."""
        assert self.store.head is not None
        return self.store.head

    def successor(self, commits: Iterable[Signed[Commit]]) -> Signed[Commit] | None:
        """The best of the commits that follow the head directly."""
        following = [
            c
            for c in commits
            if c.document.parent == self.head.digest
            and not self._is_void(c.digest)
            and self._has_same_layout(c.document)
        ]
        return max(following, key=lambda c: weight(c.document.tokens, c.document.round, c.digest), default=None)

    def _has_same_layout(self, commit: Commit) -> bool:
        """Whether a commit is about the shards that are here, in their sizes."""
        here = self.store.head
        if here is None:
            return True
        sizes = {name: shard.size for name, shard in here.document.shards.items()}
        return {name: shard.size for name, shard in commit.shards.items()} == sizes

    def _is_void(self, digest: str) -> bool:
        return self._void.get(digest, 0.0) > asyncio.get_running_loop().time()

    async def gather(self, commit: Commit, sources: Sequence[str]) -> None:
        """Bring all shards of a commit into the store.

        Args:
            commit: names the shards, their digests and who reduced them.
            sources: nodes that may have any of them, best first.

        Raises:
            Unobtainable: after PASSES rounds of asking, shards are still missing.
            UserError: the disk has no room for them.
        """
        lacking = sum(s.size for s in commit.shards.values() if self.store.find(s.digest) is None)
        self.store.require_space(lacking)
        for attempt in range(PASSES):
            await asyncio.sleep(attempt * PAUSE_SECONDS)
            for source in (None, *sources):
                missing = await self._missing(commit)
                if not missing:
                    return
                plan = _by_source(commit, missing, source, set(sources))
                await asyncio.gather(*[self.fetch(node, wanted) for node, wanted in plan.items()])
        if missing := await self._missing(commit):
            raise Unobtainable(f"round {commit.round}: nobody has {len(missing)} of its shards, {missing[0]} first")

    async def _missing(self, commit: Commit) -> list[str]:
        """Names of shards that are not here; results that this node made itself are taken in."""
        missing = []
        for name, shard in commit.shards.items():
            if self.store.has(shard.digest):
                continue
            if (path := self.store.find(shard.digest)) is not None:
                await asyncio.to_thread(self.store.take_in, path)
            else:
                missing.append(name)
        return missing

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]]) -> bool:
        """Fetch objects (digest and size) from a node; what does not come is left to others.

        Returns False when some of them hold values that are no numbers: these are thrown away.
        """
        try:
            await self._exchange.fetch(node, wanted, self.store.writer)
        except CallFailed as error:
            log.debug("gather: %s", error)
        if poisoned := await asyncio.to_thread(self._discard_poisoned, [digest for digest, _ in wanted]):
            log.warning("%s sent %d shards that are not finite; they are left out", short(node), poisoned)
        return not poisoned

    def _discard_poisoned(self, digests: Sequence[str]) -> int:
        paths = {digest: path for digest in digests if (path := self.store.find(digest)) is not None}
        poisoned = [digest for digest, path in paths.items() if not codec.is_finite(path)]
        for digest in poisoned:
            self.store.discard(digest)
        return len(poisoned)

    async def adopt(self, commit: Signed[Commit], sources: Sequence[str]) -> None:
        """Gather a commit and make it the head. Raises Unobtainable, and remembers that."""
        try:
            await self.gather(commit.document, sources)
        except Unobtainable:
            self._void[commit.digest] = asyncio.get_running_loop().time() + VOID_SECONDS
            raise
        await asyncio.to_thread(self.store.adopt, commit)
        self.announce()

    def announce(self) -> None:
        """Tell everybody which state this node holds, by the digests of the files on its disk."""
        head = self.head
        self._membership.update(
            round=head.document.round,
            commit=head.digest,
            digest=state_digest({name: self.store.path(s.digest).name for name, s in head.document.shards.items()}),
            tokens=head.document.tokens,
        )

    async def catch_up(self) -> bool:
        """Move to the best commit that a peer holds, when it is better than the head; whether the head has moved."""
        view = await self._membership.refresh()
        best = self._best(list(view.present().values()))
        if best is None:
            return False
        holders = [node for node, record in view.present().items() if record.commit == best.commit]
        for node in ranked(holders, self._membership.network.node_id):
            try:
                signed = await self._exchange.read(node, "commit", best.round)
            except CallFailed as error:
                log.debug("catch up: %s", error)
                continue
            if (
                signed is not None
                and signed.digest == best.commit
                and isinstance(signed.document, Commit)
                and self._has_same_layout(signed.document)
            ):
                try:
                    await self.adopt(cast(Signed[Commit], signed), [node, *(h for h in holders if h != node)])
                except Unobtainable as error:
                    log.warning("%s", error)
                    return False
                return True
        return False

    def _best(self, records: Sequence[NodeRecord]) -> NodeRecord | None:
        here = self.store.head
        floor = weight(here.document.tokens, here.document.round, here.digest) if here is not None else (-1, 0, 0)
        better = [
            (weight(record.tokens, record.round, record.commit), record)
            for record in records
            if record.commit and not self._is_void(record.commit)
        ]
        return max((item for item in better if item[0] > floor), key=lambda item: item[0], default=(None, None))[1]


def _by_source(
    commit: Commit, missing: Sequence[str], source: str | None, known: set[str]
) -> dict[str, list[tuple[str, int]]]:
    """What to ask of whom: everything of one source, or, without one, each shard of its reducer."""
    plan: dict[str, list[tuple[str, int]]] = {}
    for name in missing:
        node = source or commit.holders.get(name)
        if node in known:
            plan.setdefault(node, []).append((commit.shards[name].digest, commit.shards[name].size))
    return plan
