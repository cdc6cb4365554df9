"""How large do the documents of a round get with the swarm? Real documents of swarms that nobody has to run.

A round of 16 layers of 16 experts in which every shard changed, with records that live 60 s. What the DHT costs is
computed from the size of a signed record, and from how often it is read and renewed.
"""

import hashlib
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.documents import (
    Blocks,
    Commit,
    Contribution,
    Document,
    Encoded,
    Ledger,
    Member,
    Plan,
    Reduction,
    Result,
    ShardState,
    Share,
    Update,
    canonical,
    seal,
)
from swarm.identity import Identity
from swarm.membership import BEATS_PER_LEASE
from swarm.records import BUCKETS, NodeRecord, record_key
from swarm.validator import record_validator

SIZES = (4, 16, 64, 256, 1024)
LAYERS, EXPERTS = 16, 16
SHARD_BYTES = 16 << 20
HOLDERS = 5
"""Nodes that keep what is under one key of the DHT."""
LEASE_SECONDS = 60.0
"""Of the presets for models of 1B parameters and more."""
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class Round:
    """The documents of one round."""

    def __init__(self, nodes: int, identity: Identity) -> None:
        """Args:
        nodes: how many take part, all with experts.
        identity: signs.
        """
        self._random = random.Random(nodes)
        self._identity = identity
        others = ("Qm" + "".join(self._random.choices(_BASE58, k=44)) for _ in range(nodes - 1))
        self._nodes = [identity.node_id, *others]
        experts = [f"layer.{layer}.expert.{expert}" for layer in range(LAYERS) for expert in range(EXPERTS)]
        self._shared = ["embed", "head", *(f"layer.{layer}.shared" for layer in range(LAYERS))]
        self._names = [*self._shared, *experts]
        self._run = self._digest()
        self._owners: dict[str, tuple[int, ...]] = {node: (place % EXPERTS,) for place, node in enumerate(self._nodes)}

    def _digest(self) -> str:
        return hashlib.sha256(self._random.randbytes(8)).hexdigest()

    def _encoded(self) -> Encoded:
        return Encoded(digest=self._digest(), size=SHARD_BYTES // 4)

    def _size(self, document: Document) -> int:
        return len(seal(self._identity, document).wire)

    def plan(self) -> int:
        """Bytes of the plan."""
        cursor = range(0, 1 << 20, 400)
        return self._size(
            Plan(
                run=self._run,
                round=100,
                parent=self._digest(),
                leader=self._nodes[0],
                roster={
                    node: Member(
                        blocks=((at, at + 200), (at + 300, at + 400)), steps=100, heldout=(at % 64, at % 64 + 8)
                    )
                    for node, at in zip(self._nodes, cursor, strict=False)
                },
                owners=self._owners,
                uplinks={node: self._random.randrange(10**6, 10**7) for node in self._nodes},
                train_seconds=600.0,
                reduce_seconds=60.0,
            )
        )

    def commit(self) -> int:
        """Bytes of the commit."""
        left: tuple[Blocks, ...] = ((10**6, 10**6 + 7),)
        reserved = dict.fromkeys(self._nodes, left)
        return self._size(
            Commit(
                run=self._run,
                round=100,
                parent=self._digest(),
                plan=self._digest(),
                leader=self._nodes[0],
                shards={n: ShardState(version=100, digest=self._digest(), size=SHARD_BYTES) for n in self._names},
                updates={
                    name: Update(encoded=self._encoded(), reducer=self._random.choice(self._nodes))
                    for name in self._names
                },
                owners=self._owners,
                shares={node: Share(tokens=self._random.randrange(10**6), steps=100) for node in self._nodes},
                missing=(),
                tokens=10**11,
                ledger=Ledger(cursor=10**7, reserved=reserved),
                loss=2.5,
                heldout_loss=2.6,
                train_seconds=600.0,
                reduce_seconds=(50.0, 51.0, 52.0),
                busy=0.93,
            )
        )

    def contribution(self) -> int:
        """Bytes of what a node with one expert hands in."""
        names = [*self._shared, *(f"layer.{layer}.expert.3" for layer in range(LAYERS))]
        return self._size(
            Contribution(
                run=self._run,
                round=100,
                plan=self._digest(),
                node=self._nodes[0],
                tokens=10**6,
                steps=100,
                used_blocks=800,
                loss=2.5,
                heldout_nats=2.6e5,
                heldout_tokens=10**5,
                train_seconds=600.0,
                busy=0.93,
                shards={name: self._encoded() for name in names},
            )
        )

    def reduction(self, shared: Sequence[str]) -> int:
        """Bytes of the results of one expert in all layers, and of shared shards."""
        alone = {f"layer.{layer}.expert.3": tuple(self._nodes[:1]) for layer in range(LAYERS)}
        contributors = {**alone, **dict.fromkeys(shared, tuple(self._nodes))}
        return self._size(
            Reduction(
                run=self._run,
                round=100,
                plan=self._digest(),
                node=self._nodes[0],
                results={
                    name: Result(encoded=self._encoded(), values=self._digest(), contributors=nodes)
                    for name, nodes in contributors.items()
                },
            )
        )

    def record(self) -> int:
        """Bytes of a node's record, as it is under its key."""
        record = NodeRecord(
            run=self._run,
            version="0.1.0",
            name="a box with a name",
            role="trainer",
            state="training",
            reason="round 100: up to 100 steps on experts 3",
            addresses=(
                "/ip4/203.0.113.5/tcp/31337/p2p/" + self._nodes[0],
                "/ip4/192.168.178.20/tcp/31337/p2p/" + self._nodes[0],
            ),
            round=100,
            commit=self._digest(),
            digest=self._digest(),
            tokens=10**11,
            capacity=1,
            experts=(3,),
            device="NVIDIA RTX 6000 Ada Generation, 48 GB",
            seconds_per_step=6.0,
            utilisation=0.93,
            uplink=10**6,
            trained_tokens=10**8,
            sent=10**11,
            received=10**11,
        )
        validator, subkey = record_validator(self._identity)
        key, mark = DHTID.generate(record_key(self._run, self._nodes[0])).to_bytes(), MSGPackSerializer.dumps(subkey)
        value = MSGPackSerializer.dumps(canonical(record))
        return len(mark) + len(validator.sign_value(DHTRecord(key, mark, value, get_dht_time() + LEASE_SECONDS)))

    def row(self) -> str:
        """One line of the table."""
        count = len(self._nodes)
        plan, commit, contribution = self.plan(), self.commit(), self.contribution()
        reduction = self.reduction(self._shared[: max(1, len(self._shared) // count)])
        record, beat = self.record(), LEASE_SECONDS / BEATS_PER_LEASE
        holders = min(count, HOLDERS)
        # every node reads all records once in a beat, each from one holder, and once in a lease from all of them; what
        # is under its own key comes with the answers when it looks for its holders to renew its record
        reads = (
            count * record / beat + holders * count * record / LEASE_SECONDS + holders * count * record / BUCKETS / beat
        )
        # whoever is nearest to a key answers everybody
        busiest = reads + count * (count / BUCKETS) * record / beat
        cells = (
            f"{count:,}",
            *(f"{size / 1e3:.1f} kB" for size in (plan, commit, contribution, reduction)),
            f"{(plan + commit) * (count - 1) / 1e6:.2f} MB",
            f"{(contribution + reduction) * (count - 1) / 1e6:.2f} MB",
            f"{count * record / 1e3:.0f} kB",
            f"{reads / 1e3:.1f} kB/s",
            f"{busiest / 1e3:.1f} kB/s",
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    titles = "nodes", "plan", "commit", "contribution", "reduction"
    print(f"| {' | '.join(titles)} | the leader posts | every node posts | view | a node's DHT | the busiest one's |")
    print("|" + "---:|" * 10)
    with tempfile.TemporaryDirectory(prefix="spes-model-") as folder:
        identity = Identity.open(Path(folder) / "key")
        for size in SIZES:
            print(Round(size, identity).row())
        identity.close()


if __name__ == "__main__":
    main()
