"""How large do the documents of a round get with the swarm? Real documents of swarms that nobody has to run.

A round of 16 layers of 16 experts in which every shard changed, with records that live 30 s. The view of the swarm is
computed from the size of one node's records.
"""

import hashlib
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
    seal,
)
from swarm.identity import Identity
from swarm.membership import BEATS_PER_LEASE

SIZES = (4, 16, 64, 256, 1024)
LAYERS, EXPERTS = 16, 16
SHARD_BYTES = 16 << 20
HOLDERS = 5
"""Nodes that keep what is under one key of the DHT, and are asked for it."""
LEASE_SECONDS = 30.0
VIEW_BYTES = 2200
"""Of one node's record and lease with their signatures, as they are under their keys."""
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

    def row(self) -> str:
        """One line of the table."""
        count = len(self._nodes)
        plan, commit, contribution = self.plan(), self.commit(), self.contribution()
        reduction = self.reduction(self._shared[: max(1, len(self._shared) // count)])
        view = VIEW_BYTES * count
        holder = view * count * BEATS_PER_LEASE / LEASE_SECONDS / max(1.0, HOLDERS / count)
        cells = (
            f"{count:,}",
            *(f"{size / 1e3:.1f} kB" for size in (plan, commit, contribution, reduction)),
            f"{(plan + commit) * (count - 1) / 1e6:.2f} MB",
            f"{(contribution + reduction) * (count - 1) / 1e6:.2f} MB",
            f"{view / 1e3:.0f} kB",
            f"{holder / 1e3:.0f} kB/s",
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    titles = "nodes", "plan", "commit", "contribution", "reduction"
    print(f"| {' | '.join(titles)} | the leader posts | every node posts | view | a holder of the view sends |")
    print("|" + "---:|" * 9)
    with tempfile.TemporaryDirectory(prefix="spes-model-") as folder:
        identity = Identity.open(Path(folder) / "key")
        for size in SIZES:
            print(Round(size, identity).row())
        identity.close()


if __name__ == "__main__":
    main()
