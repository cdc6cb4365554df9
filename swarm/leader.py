"""What a leader writes: the plan and the commit of a round, as pure functions of what it knows."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from swarm import blocks
from swarm.documents import (
    Blocks,
    Commit,
    Contribution,
    Ledger,
    Member,
    Plan,
    Reduction,
    Result,
    ShardState,
    Share,
)
from swarm.identity import NodeId
from swarm.lease import settle
from swarm.manifest import Manifest
from swarm.membership import NodeRecord
from swarm.ranking import ranked
from swarm.shard_names import expert_of, trained

MAX_LOSS = 1000.0
"""Nats per token that nobody trains at."""
SLACK = 1.5
"""Training may take this much longer than the median node needs, then it ends whatever was reached."""


def leaders(run_id: str, head: Commit, trainers: Sequence[str]) -> list[str]:
    """The order in which nodes may write the next plan: those who took part in the last round, then the others."""
    number = head.round + 1
    veterans = ranked(head.shares, run_id, number)
    return veterans + [node for node in ranked(trainers, run_id, number) if node not in head.shares]


def reducers(plan: Plan, name: str) -> list[str]:
    """The owners of a shard in the order in which they may average it: the reducer, then its stand-ins."""
    expert = expert_of(name)
    owners = plan.roster if expert is None else [node for node, held in plan.owners.items() if expert in held]
    return ranked(owners, plan.run, plan.round, name)


def standing(head: Commit, holders: Mapping[int, Sequence[NodeId]], run_id: str) -> dict[int, list[str]]:
    """For each expert the nodes that hold a lease on it: the owner of the last round first."""
    last = {expert: node for node, experts in head.owners.items() for expert in experts}
    return {
        expert: sorted(ranked(nodes, run_id, expert), key=lambda node: node != last.get(expert))
        for expert, nodes in holders.items()
    }


def make_plan(
    manifest: Manifest,
    run_id: str,
    leader: NodeId,
    head: Commit,
    head_digest: str,
    roster: Mapping[NodeId, NodeRecord],
    holders: Mapping[int, Sequence[NodeId]],
) -> Plan:
    """The plan of the round after `head`.

    Args:
        manifest: the run.
        run_id: its id.
        leader: who signs the plan.
        head: the commit the round starts from, with its digest.
        roster: the nodes that take part, by id.
        holders: standing leases by expert.
    """
    rounds = manifest.round
    nodes = ranked(roster, run_id, head.round + 1)
    owner = settle(
        run_id,
        manifest.model.num_experts,
        {node: record.capacity for node, record in roster.items()},
        standing(head, holders, run_id),
    )
    known = [record.seconds_per_step for record in roster.values() if record.seconds_per_step > 0]
    train_seconds = rounds.train_seconds
    if known:
        expected = statistics.median(known) * rounds.local_steps
        train_seconds = min(train_seconds, SLACK * expected + rounds.margin_seconds)

    ledger, members = head.ledger, {}
    for index, node in enumerate(nodes):
        ranges, ledger = blocks.take(ledger, rounds.local_steps * rounds.batch_blocks)
        share = rounds.heldout_blocks
        members[node] = Member(blocks=ranges, heldout=(index * share // len(nodes), (index + 1) * share // len(nodes)))
    return Plan(
        run=run_id,
        round=head.round + 1,
        parent=head_digest,
        leader=leader,
        roster=members,
        owners={node: tuple(sorted(e for e, o in owner.items() if o == node)) for node in nodes},
        local_steps=rounds.local_steps,
        train_seconds=train_seconds,
        reduce_seconds=max(rounds.margin_seconds, min(rounds.train_seconds, 3 * head.reduce_seconds))
        if head.reduce_seconds
        else rounds.train_seconds,
    )


def is_plausible(contribution: Contribution, plan: Plan, head: Commit, block_tokens: int) -> bool:
    """Whether a contribution claims no more than its node was asked for, and only shards that it owns.

    What a node says about itself becomes weights and sums; nobody may say what he likes.

    Args:
        contribution: of a roster member.
        plan: the round's plan.
        head: the commit it starts from.
        block_tokens: tokens that one block trains on.
    """
    member = plan.roster[contribution.node]
    heldout = (member.heldout[1] - member.heldout[0]) * block_tokens
    return (
        contribution.steps <= plan.local_steps
        and contribution.used_blocks <= blocks.count(member.blocks)
        and contribution.tokens == contribution.used_blocks * block_tokens
        and contribution.heldout_tokens <= heldout
        and contribution.loss <= MAX_LOSS
        and contribution.heldout_nats <= contribution.heldout_tokens * MAX_LOSS
        and contribution.shards.keys() <= set(trained(head.shards, plan.owners.get(contribution.node, ())))
    )


def resolve(
    plan: Plan,
    head: Commit,
    reductions: Mapping[str, Reduction],
    holds: Callable[[str], bool],
) -> dict[str, tuple[str, Result]]:
    """The result to commit for each shard: of its first reducer whose bytes this node holds.

    Args:
        plan: the round's plan.
        head: the commit it starts from.
        reductions: what the reducers have announced, by node.
        holds: whether this node has an object; a result that only its maker has could be lost with it.

    Returns:
        Maker and result by shard; a shard without an entry has no result yet.
    """
    found = {}
    for name in head.shards:
        for node in reducers(plan, name):
            reduction = reductions.get(node)
            result = reduction.results.get(name) if reduction is not None else None
            if result is not None and holds(result.digest):
                found[name] = (node, result)
                break
    return found


def make_commit(
    plan: Plan,
    plan_digest: str,
    leader: NodeId,
    head: Commit,
    results: Mapping[str, tuple[str, Result]],
    contributions: Mapping[str, Contribution],
    reduce_seconds: float,
) -> Commit:
    """The commit of a round. Shards without a result are carried: they keep their version.

    Args:
        plan: the round's plan, with its digest.
        leader: who signs the commit.
        head: the commit before.
        results: maker and result by shard, from `resolve`.
        contributions: what the nodes offered, by node.
        reduce_seconds: from the last contribution to now, as this leader saw it.
    """
    shards = dict(head.shards)
    for name, (_, result) in results.items():
        shards[name] = ShardState(version=plan.round, digest=result.digest, size=head.shards[name].size)
    counted = {node for _, result in results.values() for node in result.contributors} & contributions.keys()
    share = {node: contributions[node] for node in sorted(counted)}
    tokens = sum(c.tokens for c in share.values())
    heldout_tokens = sum(c.heldout_tokens for c in share.values())
    return Commit(
        run=plan.run,
        round=plan.round,
        parent=plan.parent,
        plan=plan_digest,
        leader=leader,
        shards=shards,
        holders={name: node for name, (node, _) in results.items()},
        owners=plan.owners,
        shares={node: Share(tokens=c.tokens, steps=c.steps) for node, c in share.items()},
        missing=tuple(sorted(plan.roster.keys() - counted)),
        tokens=head.tokens + tokens,
        ledger=_ledger_after(plan, head.ledger, {node: c.used_blocks for node, c in share.items()}),
        loss=sum(c.loss * c.tokens for c in share.values()) / tokens if tokens else head.loss,
        heldout_loss=sum(c.heldout_nats for c in share.values()) / heldout_tokens if heldout_tokens else None,
        train_seconds=max((c.train_seconds for c in share.values()), default=0.0),
        reduce_seconds=reduce_seconds,
    )


def _ledger_after(plan: Plan, before: Ledger, used: Mapping[str, int]) -> Ledger:
    """The ledger when the plan's blocks are handed out and those that were not used have come back."""
    handed = [member.blocks for member in plan.roster.values()]
    _, ledger = blocks.take(before, sum(map(blocks.count, handed)))
    unused: list[Blocks] = []
    for node, member in plan.roster.items():
        unused += blocks.after(member.blocks, used.get(node, 0))
    return blocks.give_back(ledger, unused)
