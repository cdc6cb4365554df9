"""Keeps this node's shard store at the last commit, by fetching what changed from whoever has it."""

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from model.errors import SpesError
from swarm import codec
from swarm.contribute import encoding_of
from swarm.documents import Commit, Encoded, Merge, Plan, Signed, state_digest
from swarm.exchange import Exchange, Writer
from swarm.gather import Gather
from swarm.identity import NodeId
from swarm.manifest import Encoding, Manifest
from swarm.membership import Membership
from swarm.merging import Donors, is_fit, merge_state
from swarm.shard_names import expert_of
from swarm.store import ObjectWriter, ShardStore, read_commit
from swarm.warmup import strength

VALUE_BYTES = 4
"""Of fp32."""
PASSES = 3
"""How often all sources are asked before a commit counts as unobtainable."""
PAUSE_SECONDS = 1.0
"""Between two passes."""
VOID_SECONDS = 30.0
"""An unobtainable commit is not tried again for this long."""

log = logging.getLogger(__name__)


class Unobtainable(SpesError):
    """No reachable peer has all shards of a commit. Caught by the round, which goes on from the head it has."""


RIVAL_ROUNDS = 3
"""A chain that is further behind is not about to pass this one."""


def weight(tokens: int, number: int, digest: str) -> tuple[int, int, int]:
    """The order of commits of a forked chain: more trained tokens, then more rounds, then the lower digest wins."""
    return tokens, number, -int(digest, 16)


class Replica:
    """The committed state on this node and its way to the next one."""

    def __init__(self, store: ShardStore, exchange: Exchange, membership: Membership, manifest: Manifest) -> None:
        self.store = store
        self._manifest = manifest
        self._merging = threading.Lock()
        self._merged: dict[tuple[object, ...], Commit] = {}
        """The last state that was merged, by what it was made from."""
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
            and not self.is_void(c.digest)
            and self.has_same_layout(c.document)
            and self.merges_right(c.document)
        ]
        return max(following, key=lambda c: weight(c.document.tokens, c.document.round, c.digest), default=None)

    def has_same_layout(self, commit: Commit) -> bool:
        """Whether a commit is about the shards that are here, in their sizes."""
        here = self.store.head
        if here is None:
            return True
        sizes = {name: shard.size for name, shard in here.document.shards.items()}
        return {name: shard.size for name, shard in commit.shards.items()} == sizes

    def is_void(self, digest: str) -> bool:
        """Whether a commit could not be obtained a moment ago."""
        return self._void.get(digest, 0.0) > asyncio.get_running_loop().time()

    def give_up(self, commit: Signed[Commit]) -> None:
        """Leave a commit that cannot be obtained alone for a while."""
        self._void[commit.digest] = asyncio.get_running_loop().time() + VOID_SECONDS

    # one shard

    def encoding(self, name: str) -> Encoding:
        """How a shard travels."""
        return encoding_of(self._manifest.encoding, name)

    def encoded_size(self, name: str) -> int:
        """Bytes of a shard as it travels."""
        return self._encoded_size(name, self.head.document)

    def _encoded_size(self, name: str, base: Commit) -> int:
        return codec.encoded_size(self.encoding(name), base.shards[name].size // VALUE_BYTES)

    def result_writer(self, name: str, encoded: Encoded) -> ObjectWriter:
        """Where a shard's result goes while it arrives."""
        return self._result_writer(name, encoded, self.head.document)

    def _result_writer(self, name: str, encoded: Encoded, base: Commit) -> ObjectWriter:
        # values may be part of the state as they come
        if not codec.is_applied(self.encoding(name), self._manifest.round.outer_rate):
            return self.store.writer(encoded.digest, encoded.size)
        return self.store.scratch_writer(base.round + 1, encoded.digest, encoded.size)

    def apply(self, base: Commit, name: str, encoded: Encoded, values: str) -> str:
        """Make the new values of a shard from the result that has been fetched, and put them into the store. It reads
        and writes files, so it belongs into a thread.

        Args:
            base: has the old values.
            name: the shard.
            encoded: the result, in the store.
            values: digest that the new values must have.

        Returns:
            Why that is impossible, for people; empty when the values are here.
        """
        path = self.store.find(encoded.digest)
        if path is None or path.stat().st_size != self._encoded_size(name, base):
            return f"its result for {name} has the size of another shard"
        encoding, shard, rate = self.encoding(name), base.shards[name], self._manifest.round.outer_rate
        if not codec.is_finite(encoding, path):
            self.store.discard(encoded.digest)
            return f"its result for {name} is not finite"
        if not codec.is_applied(encoding, rate):
            return "" if encoded.digest == values else f"its result for {name} does not have the digest it promised"
        if self.store.has(values):
            return ""
        try:
            with self.store.writer(values, shard.size) as target:
                codec.apply(encoding, self.store.locate(shard.digest), path, target, rate)
                target.finish()
        except (ValueError, FloatingPointError):
            return f"its result for {name} does not give the values it promised"
        return ""

    # merging

    async def base(self, merge: Merge | None) -> Commit:
        """What a round starts from that follows the head: its state, merged if the round begins with that."""
        if merge is None:
            return self.head.document
        return await self.merged(merge.alpha, merge.donors)

    async def merged(self, alpha: float, donors: Donors) -> Commit:
        """The state of the head with its experts merged, see `swarm.merging.merge_state`."""
        return await asyncio.to_thread(self._merge, self.head, alpha, donors)

    def _merge(self, head: Signed[Commit], alpha: float, donors: Donors) -> Commit:
        key = (head.digest, alpha, donors)
        with self._merging:  # whoever waited for the one before may have been cancelled, its thread was not
            if key not in self._merged:
                self.store.require_space(
                    sum(s.size for n, s in head.document.shards.items() if expert_of(n) is not None)
                )
                self._merged = {key: merge_state(self.store, head.document, alpha, donors)}
            return self._merged[key]

    def merges_right(self, following: Plan | Commit) -> bool:
        """Whether a plan or commit that follows the head merges if, and as, the run says."""
        alpha = strength(self._manifest, self.head.document.round)
        return is_fit(following.merge, alpha, self._manifest.model, self._manifest.merge.donors)

    # a commit

    async def gather(self, commit: Commit, sources: Sequence[str]) -> None:
        """Bring the values of all shards of a commit into the store.

        Where the commit follows the head they are made from what travelled in its round, else they are fetched
        themselves, those that have changed.

        Args:
            commit: names the shards, their digests and who averaged them.
            sources: nodes that may have any of them, best first.

        Raises:
            Unobtainable: after PASSES rounds of asking, shards are still missing.
            UserError: the disk has no room for them.
        """
        self.store.require_space(self.lacking(commit))
        for attempt in range(PASSES):
            await asyncio.sleep(attempt * PAUSE_SECONDS)
            if not (missing := await self._missing(commit)):
                return
            if self.store.head is not None and self.head.digest == commit.parent and self.merges_right(commit):
                await self._fetch_updates(await self.base(commit.merge), commit, missing, sources)
                missing = await self._missing(commit)
            values = {commit.shards[n].digest: commit.shards[n].size for n in missing}
            await self._fetch(values, sources)
            await asyncio.to_thread(self._discard_poisoned, values)
        if missing := await self._missing(commit):
            raise Unobtainable(f"round {commit.round}: nobody has {len(missing)} of its shards, {missing[0]} first")

    def lacking(self, commit: Commit) -> int:
        """Bytes of a commit's state that are not here."""
        return sum(shard.size for shard in commit.shards.values() if self.store.find(shard.digest) is None)

    async def carry(self, base: Commit, commit: Commit, sources: Sequence[str]) -> None:
        """Bring what is here of a commit to the one that follows it, by what travelled in that round. That, and what
        stays behind, is of no use any more then and is thrown away: many rounds of it would fill the disk.

        Args:
            base: a commit of which some shards are here.
            commit: the one that follows it.
            sources: nodes that may have what travelled, best first.
        """
        held = [name for name in await self._missing(commit) if self.store.find(base.shards[name].digest) is not None]
        if commit.merge is not None:  # that takes all experts of a layer
            held = [name for name in held if expert_of(name) is None]
        await self._fetch_updates(base, commit, held, sources)
        done = {shard.digest for shard in base.shards.values()} | {u.encoded.digest for u in commit.updates.values()}
        for digest in done - {shard.digest for shard in commit.shards.values()}:
            self.store.discard(digest)

    async def _fetch_updates(self, base: Commit, commit: Commit, names: Sequence[str], sources: Sequence[str]) -> None:
        """Fetch what travelled in the round of a commit that follows `base`, and make the new values from it."""
        updates = {
            name: commit.updates[name].encoded
            for name in names
            if name in commit.updates and commit.updates[name].encoded.size == self._encoded_size(name, base)
        }
        names_of = {encoded.digest: name for name, encoded in updates.items()}
        lacking = {e.digest: e.size for e in updates.values() if self.store.find(e.digest) is None}

        def writer(digest: str, _: int) -> ObjectWriter:
            return self._result_writer(names_of[digest], updates[names_of[digest]], base)

        await self._fetch(lacking, sources, writer)
        for name, encoded in updates.items():
            if self.store.find(encoded.digest) is not None:
                trouble = await asyncio.to_thread(self.apply, base, name, encoded, commit.shards[name].digest)
                if trouble:
                    log.warning("round %d: %s", commit.round, trouble)

    async def _fetch(self, wanted: Mapping[str, int], sources: Sequence[str], writer: Writer | None = None) -> None:
        """Fetch objects (size by digest) from all sources at once; what nobody gives stays away."""
        if not wanted:
            return
        gather = Gather(self._exchange, writer or self.store.writer)
        for digest, size in wanted.items():
            gather.want(digest, size, sources)
        working = asyncio.create_task(gather.run())
        settled = asyncio.create_task(gather.settled())
        try:
            await asyncio.wait([working, settled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, settled):
                task.cancel()
            outcomes = await asyncio.gather(working, settled, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome  # this node's own disk

    def _discard_poisoned(self, digests: Iterable[str]) -> None:
        """Throw away values that are no numbers, whoever has committed them."""
        for digest in digests:
            path = self.store.find(digest)
            if path is not None and (path.stat().st_size % VALUE_BYTES or not codec.is_finite("fp32", path)):
                log.warning("values that are not finite are left out: %s", digest[:12])
                self.store.discard(digest)

    async def _missing(self, commit: Commit) -> list[str]:
        """Names of shards whose values are not here; those that this node made itself are taken in."""
        missing = []
        for name, shard in commit.shards.items():
            path = self.store.find(shard.digest)
            # a digest that belongs to an object of another size is a lie about this shard
            if path is None or path.stat().st_size != shard.size:
                missing.append(name)
            elif path != self.store.path(shard.digest):
                await asyncio.to_thread(self.store.take_in, path)
        return missing

    async def adopt(self, commit: Signed[Commit], sources: Sequence[str]) -> None:
        """Gather a commit and make it the head. Raises Unobtainable, and remembers that."""
        try:
            await self.gather(commit.document, sources)
        except Unobtainable:
            self.give_up(commit)
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

    def rival(self) -> NodeId | None:
        """A node on another chain that weighs less than this one's, but weighed more at the round where it stands: it
        will be ahead when its round in progress is committed."""
        head = self.head
        others = {
            node: record
            for node, record in self._membership.view.trainers().items()
            if record.commit not in ("", head.digest, head.document.parent) and not self.is_void(record.commit)
        }
        chain = self._chain(RIVAL_ROUNDS) if others else {}
        for node, record in others.items():
            mine = chain.get(record.round)
            if mine is None or mine.digest == record.commit:
                continue
            then = weight(mine.document.tokens, record.round, mine.digest)
            if weight(record.tokens, record.round, record.commit) > then:
                return node
        return None

    def _chain(self, rounds: int) -> dict[int, Signed[Commit]]:
        """The head and its ancestors, of so many rounds at most, by round."""
        commit: Signed[Commit] | None = self.head
        chain: dict[int, Signed[Commit]] = {}
        while commit is not None and len(chain) < rounds:
            chain[commit.document.round] = commit
            parent = commit.document.parent
            before = read_commit(self.store.folder, self.store.run_id, commit.document.round - 1)
            commit = before if before is not None and before.digest == parent else None
        return chain
