"""Catching up: the way of a node to the best commit that its peers hold, while they go on.

The others may take less time for a round than this node takes to fetch a state, and keep the objects of two rounds
only. So what has come of one commit is carried on to the next by what travelled in that round, which is smaller, and
only the rest is fetched as it is then: a node whose line is fast enough to take part is fast enough to join.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from swarm.documents import Commit, Document, Signed
from swarm.exchange import CallFailed, Exchange
from swarm.membership import Membership
from swarm.patience import LOOK_SECONDS
from swarm.ranking import ranked
from swarm.records import NodeRecord
from swarm.replica import Replica, Unobtainable, weight

LONGEST_CHAIN = 2
"""Of more rounds than this nobody has what travelled."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A commit that peers hold."""

    commit: Signed[Commit]
    holders: tuple[str, ...]
    """These peers, best first."""


class Pursuit:
    """Brings a replica to the best commit in sight."""

    def __init__(
        self, replica: Replica, exchange: Exchange, membership: Membership, tell: Callable[[str], None]
    ) -> None:
        """Args:
        replica: what is to move.
        exchange, membership: this node's.
        tell: called with how far it is when that takes longer than a moment.
        """
        self._replica = replica
        self._exchange = exchange
        self._membership = membership
        self._tell = tell

    async def run(self) -> bool:
        """Move to the best commit that peers hold and give, when it is better than the head; whether the head has
        moved. Raises UserError when the disk has no room for it."""
        target = await self._find(self._replica.store.head)
        while target is not None:
            try:
                newer = await self._gather(target)
                if newer is None:
                    await self._replica.adopt(target.commit, target.holders)
                    return True
                await self._carry_on(target.commit, newer)
                target = newer
            except Unobtainable as error:
                log.warning("%s", error)
                self._replica.give_up(target.commit)
                target = await self._find(self._replica.store.head)
        return False

    async def _gather(self, target: Target) -> Target | None:
        """Gather a commit; ends early with a better one when there is one. Raises Unobtainable.

        What follows the head comes as what travelled, like to everybody, and is never left for a better one: the next
        step begins there.
        """
        head = self._replica.store.head
        if head is not None and target.commit.document.parent == head.digest:
            return None  # adopting gathers it
        gathering = asyncio.create_task(self._replica.gather(target.commit.document, target.holders))
        watching = asyncio.create_task(self._wait_for_better(target))
        try:
            await asyncio.wait([gathering, watching], return_when=asyncio.FIRST_COMPLETED)
            if gathering.done():
                gathering.result()
                return None
            return watching.result()
        finally:
            for task in (gathering, watching):
                task.cancel()
            await asyncio.gather(gathering, watching, return_exceptions=True)

    async def _wait_for_better(self, target: Target) -> Target:
        commit, holders = target.commit.document, len(target.holders)
        total = sum(shard.size for shard in commit.shards.values())
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            here = total - self._replica.lacking(commit)
            peers = "one peer" if holders == 1 else f"{holders} peers"
            self._tell(f"fetching the state of round {commit.round} from {peers}: {here / total:.0%} is here")
            if (found := await self._find(target.commit)) is not None:
                return found

    async def _carry_on(self, commit: Signed[Commit], newer: Target) -> None:
        """Bring what is here of a commit to a newer one, as far as that is possible."""
        chain = await self._between(commit, newer)
        for base, following in zip([commit, *chain], chain, strict=False):
            log.debug("catch up: round %d was committed meanwhile", following.document.round)
            await self._replica.carry(base.document, following.document, newer.holders)

    async def _between(self, commit: Signed[Commit], newer: Target) -> list[Signed[Commit]]:
        """The commits from the one after `commit` to a newer one; none if that is on another chain or far away."""
        chain = [newer.commit]
        while chain[0].document.parent != commit.digest:
            number = chain[0].document.round - 1
            if len(chain) >= LONGEST_CHAIN or number <= commit.document.round:
                return []
            before = await self._read(newer.holders, number, chain[0].document.parent)
            if before is None:
                return []
            chain.insert(0, before)
        return chain

    async def _read(self, holders: tuple[str, ...], number: int, digest: str) -> Signed[Commit] | None:
        """The commit of a round with a digest, from whoever gives it."""
        for node in holders:
            try:
                signed = await self._exchange.read(node, "commit", number)
            except CallFailed as error:
                log.debug("catch up: %s", error)
                continue
            if signed is not None and signed.digest == digest and self._is_commit(signed):
                return cast(Signed[Commit], signed)
        return None

    def _is_commit(self, signed: Signed[Document]) -> bool:
        return isinstance(signed.document, Commit) and self._replica.has_same_layout(signed.document)

    async def _find(self, than: Signed[Commit] | None) -> Target | None:
        """The best commit that peers hold and give, if it is better than another one, or than nothing."""
        present = (await self._membership.refresh()).present()
        for better in self._better(present, than):
            holders = [node for node, record in present.items() if record.commit == better.commit]
            holders = ranked(holders, self._membership.network.node_id)
            signed = await self._read(tuple(holders), better.round, better.commit)
            # it weighs what the record tells: no old commit in disguise
            if signed is not None and (signed.document.round, signed.document.tokens) == (better.round, better.tokens):
                return Target(signed, tuple(holders))
        return None

    def _better(self, present: dict[str, NodeRecord], than: Signed[Commit] | None) -> list[NodeRecord]:
        """One record for each commit that is better than another one as it tells, the best first."""
        floor = weight(than.document.tokens, than.document.round, than.digest) if than is not None else (-1, 0, 0)
        told = {
            weight(record.tokens, record.round, record.commit): record
            for record in present.values()
            if record.commit and not self._replica.is_void(record.commit)
        }
        return [told[key] for key in sorted(told, reverse=True) if key > floor]
