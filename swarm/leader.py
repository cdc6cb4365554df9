"""What a leader writes: the plan and the commit of a round, as pure functions of what it knows."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from model.settings import ModelSettings
from swarm import blocks
from swarm.documents import (
    Choices,
    Commit,
    Contribution,
    Member,
    Merge,
    Plan,
    Reduction,
    Result,
    ShardState,
    Share,
    Update,
)
from swarm.identity import NodeId
from swarm.lease import settle
from swarm.manifest import Manifest, RoundSettings
from swarm.ranking import ranked, ranked_by_strength, strengths
from swarm.records import NodeRecord, View
from swarm.shard_names import expert_of, trained

MAX_LOSS = 1000.0
"""Nats per token that nobody trains at."""
SLACK = 1.5
"""Training may take this much longer than the median node needs, then it ends whatever was reached."""
REMEMBERED = 5
"""Rounds whose length the deadlines of the next one follow from."""


def leaders(run_id: str, head: Commit, trainers: Sequence[str]) -> list[str]:
    """The order in which nodes may write the next plan: those who took part in the last round, then the others."""
    number = head.round + 1
    veterans = ranked(head.shares, run_id, number)
    return veterans + [node for node in ranked(trainers, run_id, number) if node not in head.shares]


def reducers(plan: Plan, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """For each shard its owners in the order in which they may average it: the reducer, then its stand-ins.

    It is the same one in every round as long as the owners are the same, since what its encoding has rounded away is
    there. Shared shards are spread so that each node averages its part of the bytes, by its uplink: rendezvous hashing
    with bounded load.

    Args:
        plan: the round's.
        sizes: bytes of each shard.
    """
    uplinks = strengths({node: plan.uplinks.get(node, 0) for node in plan.roster})
    orders = {}
    for name in sizes:
        expert = expert_of(name)
        owners = plan.roster if expert is None else [node for node, held in plan.owners.items() if expert in held]
        orders[name] = ranked_by_strength({node: uplinks[node] for node in owners}, plan.run, name)
    shared = [name for name in sizes if expert_of(name) is None]
    total = sum(sizes[name] for name in shared) / math.fsum(uplinks.values())  # whatever the order of the roster
    load = dict.fromkeys(plan.roster, 0)
    for name in sorted(shared, key=lambda name: (-sizes[name], name)):
        full = {node: (load[node] + sizes[name]) / (uplinks[node] * total) for node in orders[name]}
        first = next((node for node in orders[name] if full[node] <= 1), None) or min(full, key=lambda node: full[node])
        load[first] += sizes[name]
        orders[name] = [first, *(node for node in orders[name] if node != first)]
    return orders


def standing(head: Commit, holders: Mapping[int, Sequence[NodeId]], run_id: str) -> dict[int, list[str]]:
    """For each expert the nodes that hold a lease on it: the owners of the last round first."""
    return {
        expert: sorted(ranked(nodes, run_id, expert), key=lambda node: expert not in head.owners.get(node, ()))
        for expert, nodes in holders.items()
    }


def pinned(head: Commit) -> frozenset[int]:
    """Experts of which a shard was carried: their owners still hold what they have trained."""
    carried = {expert for name in head.carried if (expert := expert_of(name)) is not None}
    return frozenset(carried & head.experts_covered)


def claims(
    manifest: Manifest,
    run_id: str,
    head: Commit,
    capacity: Mapping[NodeId, int],
    holders: Mapping[int, Sequence[NodeId]],
) -> dict[NodeId, tuple[int, ...]]:
    """The experts of each node: what a node leases, and what a plan confirms.

    Args:
        manifest: the run, with its id.
        head: the last commit.
        capacity: experts that each node can train.
        holders: standing leases by expert.
    """
    owners = settle(
        run_id,
        manifest.model.num_experts,
        capacity,
        standing(head, holders, run_id),
        manifest.round.owners_per_expert,
        pinned(head),
    )
    return {node: tuple(sorted(e for e, nodes in owners.items() if node in nodes)) for node in capacity}


def make_plan(
    manifest: Manifest,
    run_id: str,
    leader: NodeId,
    head: Commit,
    head_digest: str,
    roster: Mapping[NodeId, NodeRecord],
    view: View,
    merge: Merge | None = None,
) -> Plan:
    """The plan of the round after `head`.

    Args:
        manifest: the run.
        run_id: its id.
        leader: who signs the plan.
        head: the commit the round starts from, with its digest.
        roster: the nodes that take part, by id.
        view: everybody who is there, and their leases.
        merge: how the round begins, if it begins with a merge.
    """
    rounds = manifest.round
    speeds = {node: record.seconds_per_step for node, record in roster.items() if record.seconds_per_step > 0}
    expected = statistics.median(speeds.values()) * rounds.local_steps if speeds else None
    steps = {
        node: rounds.local_steps
        if expected is None or node not in speeds
        else max(1, min(rounds.local_steps, round(expected / speeds[node])))
        for node in roster
    }
    handed = blocks.hand_out(head.ledger, {node: blocks_for(rounds, steps[node]) for node in roster})
    members = {}
    for index, node in enumerate(ranked(roster, run_id, head.round + 1)):
        heldout = (index * rounds.heldout_blocks // len(roster), (index + 1) * rounds.heldout_blocks // len(roster))
        members[node] = Member(blocks=handed[node], steps=steps[node], heldout=heldout)
    bound, margin = rounds.train_seconds, rounds.margin_seconds
    # who is still catching up cannot pass anything on
    abreast = {head_digest, head.parent} - {""}
    ready = {node: record for node, record in view.present().items() if record.commit in abreast}
    return Plan(
        run=run_id,
        round=head.round + 1,
        parent=head_digest,
        leader=leader,
        roster=members,
        owners=claims(
            manifest, run_id, head, {node: record.capacity for node, record in roster.items()}, view.holders()
        ),
        uplinks={node: record.uplink for node, record in {**ready, **roster}.items()},
        train_seconds=bound if expected is None else min(bound, SLACK * expected + margin),
        reduce_seconds=bound
        if not head.reduce_seconds
        else min(max(bound, margin), SLACK * statistics.median(head.reduce_seconds) + margin),
        merge=merge,
    )


def blocks_for(rounds: RoundSettings, steps: int) -> int:
    """Blocks that a member gets for so many local steps: with overlap as many again, to go on with."""
    return steps * rounds.batch_blocks * (2 if rounds.overlap else 1)


def is_plausible(contribution: Contribution, plan: Plan, head: Commit, manifest: Manifest) -> bool:
    """Whether a contribution claims no more than its node was asked for, and only shards that it owns.

    What a node says about itself becomes weights and sums; nobody may say what he likes.

    Args:
        contribution: of a roster member.
        plan: the round's plan.
        head: the commit it starts from.
        manifest: the run.
    """
    member, block_tokens = plan.roster[contribution.node], manifest.data.block_tokens
    heldout = (member.heldout[1] - member.heldout[0]) * block_tokens
    return (
        contribution.steps * manifest.round.batch_blocks == contribution.used_blocks <= blocks.count(member.blocks)
        and contribution.tokens == contribution.used_blocks * block_tokens
        and contribution.heldout_tokens <= heldout
        and contribution.loss <= MAX_LOSS
        and contribution.heldout_nats <= contribution.heldout_tokens * MAX_LOSS
        and _are_choices(contribution, manifest.model)
        and contribution.shards.keys() <= set(trained(head.shards, plan.owners.get(contribution.node, ())))
    )


def _are_choices(contribution: Contribution, model: ModelSettings) -> bool:
    """Whether as many experts are said to be chosen as routers choose, or nothing is said."""
    said, expected = contribution.choices, contribution.heldout_tokens * model.experts_per_token
    return not said or (
        len(said) == model.num_layers
        and all(len(layer) == model.num_experts and sum(layer) == expected for layer in said)
    )


def resolve(
    order: Mapping[str, Sequence[str]],
    reductions: Mapping[str, Reduction],
    holds: Callable[[str, Result], bool],
) -> dict[str, tuple[str, Result]]:
    """The result to commit for each shard: of its first reducer whose values this node holds.

    Args:
        order: the reducer of each shard and its stand-ins, see `reducers`.
        reductions: what the reducers have announced, by node.
        holds: whether this node has the new values of a shard; a result that only its maker has could be lost with it.

    Returns:
        Maker and result by shard; a shard without an entry has no result yet.
    """
    found = {}
    for name, nodes in order.items():
        for node in nodes:
            reduction = reductions.get(node)
            result = reduction.results.get(name) if reduction is not None else None
            if result is not None and holds(name, result):
                found[name] = (node, result)
                break
    return found


def make_commit(
    plan: Plan,
    plan_digest: str,
    leader: NodeId,
    base: Commit,
    results: Mapping[str, tuple[str, Result]],
    contributions: Mapping[str, Contribution],
    reduce_seconds: float,
) -> Commit:
    """The commit of a round. Shards without a result are carried: they keep their version.

    Args:
        plan: the round's plan, with its digest.
        leader: who signs the commit.
        base: what the round started from.
        results: maker and result by shard, from `resolve`.
        contributions: what the nodes offered, by node.
        reduce_seconds: from the last contribution to now, as this leader saw it.
    """
    counted = {node for _, result in results.values() for node in result.contributors} & contributions.keys()
    share = {node: contributions[node] for node in sorted(counted)}
    shards, updates = dict(base.shards), {}
    for name, (reducer, result) in results.items():
        shards[name] = ShardState(version=plan.round, digest=result.values, size=base.shards[name].size)
        offered = {node for node, contribution in share.items() if name in contribution.shards}
        without = tuple(sorted(offered - set(result.contributors)))
        updates[name] = Update(encoded=result.encoded, reducer=reducer, without=without)
    tokens = sum(c.tokens for c in share.values())
    heldout_tokens = sum(c.heldout_tokens for c in share.values())
    busy = [c.busy for c in share.values() if c.busy]
    return Commit(
        run=plan.run,
        round=plan.round,
        parent=plan.parent,
        plan=plan_digest,
        leader=leader,
        shards=shards,
        updates=updates,
        owners=plan.owners,
        shares={node: Share(tokens=c.tokens, steps=c.steps) for node, c in share.items()},
        missing=tuple(sorted(plan.roster.keys() - counted)),
        tokens=base.tokens + tokens,
        ledger=blocks.settle_up(
            base.ledger,
            {node: member.blocks for node, member in plan.roster.items()},
            {node: c.used_blocks for node, c in share.items()},
        ),
        loss=sum(c.loss * c.tokens for c in share.values()) / tokens if tokens else base.loss,
        heldout_loss=sum(c.heldout_nats for c in share.values()) / heldout_tokens if heldout_tokens else None,
        choices=_add_up([c.choices for c in share.values() if c.choices]),
        train_seconds=max((c.train_seconds for c in share.values()), default=0.0),
        reduce_seconds=(*base.reduce_seconds, reduce_seconds)[-REMEMBERED:],
        merge=plan.merge,
        busy=statistics.fmean(busy) if busy else 0.0,
    )


def _add_up(said: Sequence[Choices]) -> Choices:
    """The sum of choices of the same shape."""
    return tuple(tuple(map(sum, zip(*layers, strict=True))) for layers in zip(*said, strict=True))
