"""The merging warm-up in a swarm: several participants in one process, real peers, and every bit looked at."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvloop

from bench.participants import Node, Swarm
from model.merge import merge_experts
from swarm.documents import Commit, Document, Plan, Signed
from swarm.identity import Identity
from swarm.manifest import Encoding, EncodingSettings, MergeSettings
from swarm.membership import read_warmup
from swarm.merging import Donors
from swarm.network import Network
from swarm.shard_names import expert_of, expert_shards
from swarm.warmup import strength, warmup
from tests.accounts import LEFT_TO_THE_COLLECTOR, Accounts, require_every_block_once, require_marks, used

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(240),
    *LEFT_TO_THE_COLLECTOR,
]

MERGES = MergeSettings(alpha=0.5, every_steps=8, first_steps=400, donors=2)
"""With 4 local steps in a round: before rounds 3, 5, 7 and so on."""


def require_merges(swarm: Swarm, accounts: Accounts, chain: list[Signed[Commit]], within: float = 1e-3) -> None:
    """Rounds begin with a merge when the run says so, and what they add is what was trained."""
    for before, after in pairwise(chain):
        merge, alpha = after.document.merge, strength(swarm.manifest.document, before.document.round)
        assert (merge.alpha if merge is not None else 0.0) == alpha
        base = merged(accounts.states[before.digest], merge.donors, alpha) if merge is not None else {}
        for name, values in base.items():
            expert = expert_of(name)
            owners = [node for node, held in after.document.owners.items() if expert in held]
            if name not in after.document.updates:
                assert np.array_equal(accounts.states[after.digest][name], values), "nobody trained it"
                assert after.document.shards[name].version == before.document.shards[name].version
            elif len(owners) == 1 and expert in before.document.owners.get(owners[0], ()):
                node = next(node for node in swarm.nodes if node.id == owners[0])
                gain = accounts.states[after.digest][name] - values
                require_marks(gain, used(after.document, node), within=within)


def merged(state: dict[str, np.ndarray], donors: Donors, alpha: float) -> dict[str, np.ndarray]:
    """The experts of a state when they are merged."""
    found: dict[str, np.ndarray] = {}
    for layer, rows in enumerate(donors):
        names = expert_shards(layer, len(rows))
        values = merge_experts(torch.from_numpy(np.stack([state[name] for name in names])), rows, alpha)
        found |= dict(zip(names, values.numpy(), strict=True))
    return found


@pytest.mark.parametrize(("encoding", "within"), [("fp32", 1e-3), ("int8", 0.4)])
def test_all_nodes_merge_to_the_same_bits_and_train_on_from_there(
    tmp_path: Path, encoding: Encoding, within: float
) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "encoding": EncodingSettings(shared=encoding, experts=encoding)}
        async with Swarm(tmp_path, merge=MERGES, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(capacity=1, step_seconds=0.02) for _ in range(3)]
            await swarm.start(*nodes)
            await swarm.rounds(6)
            chain = accounts.chain(swarm)
            assert sum(commit.document.merge is not None for commit in chain) >= 2
            assert all(len(accounts.holders[commit.digest]) == 3 for commit in chain[1:-1]), "nobody left a round out"
            require_merges(swarm, accounts, chain, within)
            require_every_block_once(chain, nodes)

            observer = Identity.ephemeral()
            network = await Network.start(observer, peers=await nodes[0].network.addresses(), client=True)
            try:
                await swarm.rounds(1)
                told = await read_warmup(network, swarm.manifest)
            finally:
                await network.close()
                observer.close()
            assert told is not None and told == warmup(swarm.manifest.document, told.round) and told.round >= 4

    uvloop.run(scenario())


def test_nodes_come_and_go_in_the_warm_up(tmp_path: Path) -> None:
    """The leader dies when it has written the plan of a merge; a newcomer arrives; the whole swarm goes on from its
    disks in the middle of the warm-up."""
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": 3.0, "lease_seconds": 3.0}
        async with Swarm(tmp_path, merge=MERGES, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(capacity=2) for _ in range(3)]
            dead, orphaned = list[Node](), list[int]()

            def die(signed: Signed[Document]) -> Iterable[Signed[Document]]:
                if isinstance(signed.document, Plan) and signed.document.merge is not None and not dead:
                    dead.append(next(node for node in nodes if node.id == signed.signer))
                    orphaned.append(signed.document.round)
                return () if dead and signed.signer == dead[0].id else (signed,)

            for node in nodes:
                node.tamper = die
            await swarm.start(*nodes)
            await swarm.until(lambda: dead, "a plan with a merge")
            await swarm.end(dead[0])
            await swarm.until(lambda: min(node.round for node in swarm.running) > orphaned[0], "the round of that plan")
            again = accounts.chain(swarm)[orphaned[0]].document
            assert again.merge is not None and dead[0].id not in again.shares, "the next leader merges as well"

            newcomer = swarm.add(newcomer=True)
            await swarm.start(newcomer)
            await swarm.until(lambda: newcomer.trainer.works, "the first work of the newcomer")
            await swarm.rounds(3)

            everybody = list(swarm.running)
            for node in everybody:
                await swarm.end(node, "kill")
            for node in everybody:
                await swarm.restart(node)
            await swarm.rounds(4)
            chain = accounts.chain(swarm)
            assert sum(commit.document.merge is not None for commit in chain) >= 4
            require_merges(swarm, accounts, chain)

    uvloop.run(scenario())


def test_a_node_that_merges_wrongly_stops_nobody_and_is_put_right(tmp_path: Path) -> None:
    accounts = Accounts()

    async def scenario() -> None:
        settings: dict[str, Any] = {"start_nodes": 3, "margin_seconds": 3.0, "overlap": False}
        async with Swarm(tmp_path, merge=MERGES, on_commit=accounts.note, **settings) as swarm:
            nodes = [swarm.add(capacity=2) for _ in range(3)]
            await swarm.start(*nodes)
            broken = nodes[0]
            merge = broken.participant.replica._merge
            broken.participant.replica.__dict__["_merge"] = lambda head, alpha, donors: merge(head, alpha / 2, donors)
            await swarm.rounds(5)
            chain = accounts.chain(swarm)
            merges = [commit for commit in chain if commit.document.merge is not None]
            assert len(merges) >= 2
            assert all(broken.id not in commit.document.shares for commit in merges)
            assert all(len(commit.document.shares) >= 1 for commit in merges)
            between = [c for c in chain[2:] if c.document.merge is None and broken.id in c.document.shares]
            assert between, "it takes part where nothing is merged"
            require_merges(swarm, accounts, chain)

    uvloop.run(scenario())
