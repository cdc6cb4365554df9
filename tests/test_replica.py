"""A node's copy of the state: what it takes from others, and what it refuses."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from swarm.board import Board
from swarm.collect import collect_results
from swarm.documents import Commit, Ledger, Reduction, Result, ShardState, Signed, digest_of, seal
from swarm.exchange import CallFailed, Exchange, Writer
from swarm.identity import Identity
from swarm.membership import Membership
from swarm.replica import Replica, Unobtainable
from swarm.store import ShardStore

RUN = "ab" * 32


class Peers:
    """Stands in for the calls: which objects each node has."""

    def __init__(self, objects: dict[str, list[bytes]]) -> None:
        self.objects = {node: {digest_of(data): data for data in items} for node, items in objects.items()}
        self.asked: list[str] = []

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        self.asked.append(node)
        for digest, size in wanted:
            data = self.objects.get(node, {}).get(digest)
            if data is None:
                raise CallFailed(node)
            with writer(digest, size) as target:
                target.write(data)
                target.finish()


def values(*numbers: float) -> bytes:
    return np.array(numbers, dtype="<f4").tobytes()


def commit_of(me: Identity, number: int, shards: dict[str, bytes], parent: str, holder: str) -> Signed[Commit]:
    states = {name: ShardState(version=number, digest=digest_of(data), size=len(data)) for name, data in shards.items()}
    commit = Commit(
        run=RUN,
        round=number,
        parent=parent,
        leader=me.node_id,
        shards=states,
        holders=dict.fromkeys(shards, holder),
        owners={},
        shares={},
        missing=(),
        tokens=number,
        ledger=Ledger(),
        loss=1.0,
        heldout_loss=None,
        train_seconds=0.0,
        reduce_seconds=0.0,
    )
    return seal(me, commit)


@pytest.fixture
def store(tmp_path: Path, identities: list[Identity]) -> ShardStore:
    store = ShardStore.open(tmp_path, RUN)
    store.put(values(1, 2))
    store.adopt(commit_of(identities[0], 0, {"embed": values(1, 2)}, "", identities[0].node_id))
    return store


def replica_of(store: ShardStore, peers: Peers) -> Replica:
    membership = SimpleNamespace(update=lambda **_: None)
    return Replica(store, cast(Exchange, peers), cast(Membership, membership))


def test_a_shard_comes_from_another_node_when_its_reducer_is_gone(
    store: ShardStore, identities: list[Identity]
) -> None:
    first, second = (identity.node_id for identity in identities[1:3])
    peers = Peers({second: [values(3, 4)]})
    commit = commit_of(identities[0], 1, {"embed": values(3, 4)}, store.head.digest if store.head else "", first)
    replica = replica_of(store, peers)
    asyncio.run(replica.adopt(commit, [first, second]))
    assert replica.head == commit and store.values("embed").tolist() == [3, 4]
    assert peers.asked[0] == first


def test_a_commit_with_values_that_are_no_numbers_is_not_adopted(
    store: ShardStore, identities: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.replica.PAUSE_SECONDS", 0.0)
    node, poison = identities[1].node_id, values(3, float("nan"))
    before = store.head
    commit = commit_of(identities[0], 1, {"embed": poison}, before.digest if before else "", node)
    with pytest.raises(Unobtainable):
        asyncio.run(replica_of(store, Peers({node: [poison]})).adopt(commit, [node]))
    assert store.head == before and store.find(digest_of(poison)) is None


def test_a_maker_of_poisoned_results_is_not_waited_for(store: ShardStore, identities: list[Identity]) -> None:
    good, bad = identities[1], identities[2]
    board, plan = Board(), "cd" * 32
    results = {good: values(5, 6), bad: values(float("inf"), 6)}
    peers = Peers({identity.node_id: [data] for identity, data in results.items()})
    for identity, data in results.items():
        result = Result(digest=digest_of(data), contributors=(identity.node_id,))
        reduction: Any = Reduction(run=RUN, round=1, plan=plan, node=identity.node_id, results={"embed": result})
        board.post(seal(identity, reduction))

    async def collect() -> None:
        task = asyncio.create_task(collect_results(1, plan, replica_of(store, peers), board))
        found = await board.until(lambda: board.lost or None, 5.0)
        assert found == {bad.node_id}
        task.cancel()

    asyncio.run(collect())
    assert store.find(digest_of(results[good])) is not None and store.find(digest_of(results[bad])) is None
