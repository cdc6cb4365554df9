"""A node of the synchronisation benchmark: a real participant, and a trainer that has its results ready.

python -m bench.sync_node HOME ADDRESS COUNTERS
"""

import asyncio
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import uvloop

from bench.meter import Meter, line_counters, tell
from bench.stage import Actor, Stage
from bootstrap.genesis import write_genesis
from model.settings import LossSettings, ModelSettings, OptimizerSettings
from node.stores import find_run
from swarm.documents import Commit, Signed, seal
from swarm.identity import Identity
from swarm.manifest import DataSettings, Manifest, RoundSettings
from swarm.network import Network
from swarm.participant import Participant
from swarm.records import NodeRecord, View
from swarm.release import VERSION
from swarm.shard_names import expert_of, trained
from swarm.store import ShardStore, run_folder, write_durably
from swarm.trainer import Task, Work

MARGIN_SECONDS = 120.0
"""No deadline is what is measured here."""
BLOCK_TOKENS = 2


def start(stage: Stage, model: ModelSettings, encoding: str, rounds: int) -> list[Actor]:
    """A participant on each node, all of them with the genesis on their disks.

    Args:
        stage: where.
        model: whose shards are synchronised.
        encoding: of what travels, for shared and experts' shards alike.
        rounds: how many.
    """
    author = stage.folder / "author"
    with closing(Identity.open(author / "identity.key")) as identity:
        manifest = seal(identity, _manifest(identity.node_id, model, encoding, rounds, stage.nodes))
        store = ShardStore.open(run_folder(author, manifest), manifest.digest)
        write_genesis(manifest, identity, store)
    write_durably(store.folder / "manifest", manifest.wire)
    actors: list[Actor] = []
    peers: list[str] = []
    for node in range(1, stage.nodes + 1):
        home = stage.folder / f"home-{node}"
        shutil.copytree(store.folder, run_folder(home, manifest))
        actors.append(stage.start(node, "bench.sync_node", str(home), stage.address(node), stage.counters))
    for actor in actors:  # one after the other: of two that dial each other at the same moment both may fail
        actor.hear()
        actor.tell(json.dumps(peers))
        peers += actor.hear()["addresses"]
    for actor in actors:
        actor.tell("go")
    return actors


def _manifest(author: str, model: ModelSettings, encoding: str, rounds: int, nodes: int) -> Manifest:
    how = {"encoding": {"shared": encoding, "experts": encoding}}
    return Manifest.model_validate(
        {
            "name": "sync",
            "author": author,
            "seed": 0,
            "model": model,
            "loss": LossSettings(),
            "optimizer": OptimizerSettings(learning_rate=1e-3),
            "data": DataSettings(block_tokens=BLOCK_TOKENS),
            "round": RoundSettings(
                total=rounds,
                local_steps=1,
                batch_blocks=1,
                heldout_blocks=0,
                start_nodes=nodes,
                train_seconds=MARGIN_SECONDS,
                margin_seconds=MARGIN_SECONDS,
            ),
            **how,
        }
    )


class Prepared:
    """Values for every round, written before the first one: to train is to give them their place."""

    def __init__(self, folder: Path, manifest: Manifest, sizes: dict[str, int], capacity: int, seed: int) -> None:
        """Args:
        folder: where the files go.
        manifest: of the run.
        sizes: bytes of every shard, by name.
        capacity: experts that this node trains.
        seed: differs from node to node.
        """
        folder.mkdir()
        self._folder = folder
        self._capacity = capacity
        random = np.random.default_rng(seed)
        slots = [name for name in sizes if (expert_of(name) or 0) < capacity]
        self._digests = [
            {name: self._write(random.standard_normal(sizes[name] // 4, dtype=np.float32)) for name in slots}
            for _ in range(manifest.round.total)
        ]

    def _write(self, values: np.ndarray) -> str:
        data = (values * np.float32(0.02)).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        (self._folder / digest).write_bytes(data)
        return digest

    def place(self, number: int, names: Iterable[str], experts: tuple[int, ...], folder: Path) -> dict[str, str]:
        """Give the shards of a round their place in `folder`; returns their digests.

        All experts of a layer are alike, so that it does not matter which ones the node has got.
        """
        slot = {expert: place for place, expert in enumerate(experts)}
        digests = {}
        for name in trained(names, experts):
            expert = expert_of(name)
            like = name if expert is None else name.replace(f"expert.{expert}", f"expert.{slot[expert]}")
            digests[name] = self._digests[number - 1][like]
            os.link(self._folder / digests[name], folder / digests[name])
        return digests


class Ready:
    """A trainer that has trained already."""

    def __init__(self, prepared: Prepared, meter: Meter, batch_blocks: int) -> None:
        self._prepared = prepared
        self._meter = meter
        self._batch_blocks = batch_blocks

    async def train(self, task: Task) -> Work:
        self._meter.mark("begin", task.round)
        used = task.steps * self._batch_blocks
        return Work(
            tokens=used * BLOCK_TOKENS,
            steps=task.steps,
            used_blocks=used,
            loss=1.0,
            heldout_nats=0.0,
            heldout_tokens=0,
            seconds=0.001,
            busy_seconds=0.001,
            seconds_per_step=0.001,
            shards=self._prepared.place(task.round, task.shards, task.experts, task.folder),
        )

    def stop(self) -> None:
        """There is nothing to stop."""

    async def moments(self, experts: Collection[int], folder: Path) -> dict[str, str]:
        """There are none."""
        return {}


async def take_part(home: Path, address: str, counters: str) -> None:
    """Take part in all rounds of the run in `home`."""
    manifest, folder = find_run(home)
    with closing(Identity.open(home / "identity.key")) as identity:
        store = ShardStore.open(folder, manifest.digest)
        assert store.head is not None
        sizes = {name: shard.size for name, shard in store.head.document.shards.items()}
        capacity = manifest.document.model.num_experts // manifest.document.round.start_nodes
        prepared = Prepared(home / "prepared", manifest.document, sizes, capacity, int(home.name.rpartition("-")[2]))
        meter = Meter(line_counters if counters == "line" else lambda: (exchange.sent, exchange.received))

        def adopted(commit: Signed[Commit], view: View, seconds: float) -> None:
            if len(commit.document.shares) != manifest.document.round.start_nodes:
                raise RuntimeError(f"round {commit.document.round} without {commit.document.missing}")
            meter.mark("end", commit.document.round)

        tell({"ready": True})
        peers = json.loads(await asyncio.to_thread(sys.stdin.readline))
        network = await Network.start(identity, listen=[f"/ip4/{address}/tcp/0"], peers=peers)
        try:
            addresses = await network.addresses()
            tell({"addresses": addresses})
            await asyncio.to_thread(sys.stdin.readline)  # all are there
            participant = Participant(
                manifest,
                identity=identity,
                network=network,
                store=store,
                record=NodeRecord(
                    run=manifest.digest,
                    version=VERSION,
                    name=home.name,
                    role="trainer",
                    addresses=tuple(addresses[:4]),
                    capacity=capacity,
                ),
                trainer=Ready(prepared, meter, manifest.document.round.batch_blocks),
                on_commit=adopted,
                on_state=lambda state, reason: None,
            )
            exchange = participant.exchange
            await participant.run()
            meter.mark("done")
        finally:
            await network.close()


if __name__ == "__main__":
    where, listen, how = sys.argv[1:]
    uvloop.run(take_part(Path(where), listen, how))
