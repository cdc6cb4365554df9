"""What the board says about one round: who has handed in, what is averaged, who is still to be waited for."""

from collections.abc import Iterator, Mapping, Sequence

from swarm.context import Context
from swarm.documents import Commit, Contribution, Plan, Reduction, Result, Signed
from swarm.leader import is_plausible, reducers, resolve
from swarm.planner import accepted_commit


class Tally:
    """The documents of one round that can be believed."""

    def __init__(self, context: Context, plan: Signed[Plan], base: Commit) -> None:
        self.plan = plan.document
        self.digest = plan.digest
        """Of the plan."""
        self.base = base
        """What the round starts from: the commit before, merged if the plan says so."""
        self.order = reducers(self.plan, {name: shard.size for name, shard in self.base.shards.items()})
        """The reducer of each shard, then its stand-ins."""
        self._resolved: dict[str, tuple[str, Result]] = {}
        self._context = context
        self._board = context.board

    def excused(self, node: str) -> bool:
        """Whether nobody should wait for a node."""
        return self._board.excused(node, self.plan.round)

    # contributions

    def offers(self) -> Mapping[str, Signed[Contribution]]:
        """What roster members have handed in, by node."""
        found = self._board.contributions.get((self.plan.round, self.digest), {})
        return {node: signed for node, signed in found.items() if node in self.plan.roster}

    def contributions(self) -> dict[str, Contribution]:
        """The offers that claim no more than they may."""
        return {node: signed.document for node, signed in self.offers().items() if self._is_plausible(signed)}

    def _is_plausible(self, offer: Signed[Contribution]) -> bool:
        def judge() -> bool:
            plausible = is_plausible(offer.document, self.plan, self.base, self._context.manifest)
            if not plausible:
                self._context.complain(offer.signer, "its contribution claims more than it was asked for")
            return plausible

        return self._board.verdict(offer.digest, judge)

    def awaited_contributors(self) -> list[str]:
        """Roster members that have not handed in and are not excused."""
        offered = self.offers()
        return [node for node in self.plan.roster if node not in offered and not self.excused(node)]

    def half_handed_in(self) -> bool:
        """Whether at least half of the roster members that are still there have handed in, and one at all."""
        offered = len(self.offers())
        return offered > 0 and offered >= len(self.awaited_contributors())

    # results

    def reductions(self) -> dict[str, Reduction]:
        """What reducers have announced, by node."""
        found = self._board.reductions.get((self.plan.round, self.digest), {})
        return {node: signed.document for node, signed in found.items() if node in self.plan.roster}

    def announced(self) -> set[str]:
        """Shards with a result that can be had: its maker is there, or its values are here."""
        return {
            name
            for node, reduction in self.reductions().items()
            for name, result in reduction.results.items()
            if not self.excused(node) or self.holds(name, result)
        }

    def holds(self, name: str, result: Result) -> bool:
        """Whether a result's values are here, and are of this shard."""
        path = self._context.replica.store.find(result.values)
        # a digest that belongs to an object of another size is a lie about this shard
        return path is not None and path.stat().st_size == self.base.shards[name].size

    def resolved(self) -> dict[str, tuple[str, Result]]:
        """Maker and result of each shard, as a commit would have them now.

        A result whose contributors have not all handed in here cannot be accounted for: they would count it again. One
        that nobody has fetched from this node could be lost with it, or behind its line.
        """
        open_shards = {name: nodes for name, nodes in self.order.items() if name not in self._resolved}
        offered = self.contributions().keys()
        self._resolved |= resolve(
            open_shards,
            self.reductions(),
            lambda name, result: (
                offered >= set(result.contributors)
                and self.holds(name, result)
                and not self._has_nobody_else(name, result)
            ),
        )
        return self._resolved

    def _has_nobody_else(self, name: str, result: Result) -> bool:
        """Whether a result is this node's own, and no peer has it, though there are some."""
        mine = self.reductions().get(self._context.me)
        if mine is None or mine.results.get(name) != result or result.values == self.base.shards[name].digest:
            return False
        others = [node for node in self.plan.roster if node != self._context.me and not self.excused(node)]
        if not others or self._context.exchange.has_served(result.encoded.digest):
            return False
        return result.encoded.digest not in self._made_by(others)

    def _made_by(self, nodes: Sequence[str]) -> Iterator[str]:
        """Digests of what nodes have made themselves in this round, and never fetch: where all have changed a shard
        alike, the average is what each of them has handed in, and two shards may have changed by the same bytes."""
        offers, reductions = self.contributions(), self.reductions()
        for node in nodes:
            if (offer := offers.get(node)) is not None:
                yield from (shard.digest for shard in offer.shards.values())
            if (reduction := reductions.get(node)) is not None:
                yield from (result.encoded.digest for result in reduction.results.values())

    def awaited_reducers(self, me: str) -> list[str]:
        """The others whose turn it is to average the shards that have no result yet."""
        announced = self.announced()
        open_shards = (nodes for name, nodes in self.order.items() if name not in announced)
        first = (next((node for node in nodes if not self.excused(node)), None) for nodes in open_shards)
        return sorted({node for node in first if node is not None and node != me})

    def is_complete(self, results: Mapping[str, tuple[str, Result]]) -> bool:
        """Whether no result can come any more that is not among these: all are, or those who could make them are
        gone."""
        if self.awaited_contributors():
            return False
        offered = {name for c in self.contributions().values() if c.tokens > 0 for name in c.shards}
        return all(
            name in results or name not in offered or all(map(self.excused, nodes))
            for name, nodes in self.order.items()
        )

    # the commit

    def commit(self) -> Signed[Commit] | None:
        """The commit that ends this round here."""
        return accepted_commit(self._context)
