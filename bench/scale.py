"""What a larger swarm costs each of its nodes: real participants on loopback, 4 and 8 by default, in one process.

All nodes share one core, so their times are upper bounds that grow with the size for that reason alone; messages and
bytes are counted and do not depend on it. A quarter of the nodes joins at one moment when the others are at work.
"""

import argparse
import asyncio
import functools
import logging
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2

from bench.participants import TINY, Node, Swarm
from bench.results_file import write_results
from swarm.documents import Commit, Document, Signed
from swarm.membership import BEATS_PER_LEASE

SIZES = (4, 8)
"""More are better given a core each."""
ROUNDS = 5
MODEL = TINY.model_copy(update={"num_experts": 8, "expert_size": 4})
"""11 small shards: the swarm's own work is measured, and all of it is done by one core."""
SETTINGS: dict[str, Any] = {
    "train_seconds": 120.0,
    "local_steps": 2,
    "overlap": False,
}
AT_ONCE = 8
"""Nodes that start at the same time: more would only wait for the core."""
PATIENCE_SECONDS = 400.0
STEADY_BEATS = 2
"""The DHT's traffic is counted while every record is renewed so often and nothing else happens."""
BOUND = 2.0
"""Of the growth, from the smallest swarm to the largest, of what a node sends in the DHT for each node there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured at one size; medians over the rounds."""

    nodes: int
    plan_seconds: float
    """From a commit's posting until the last node has begun the next round."""
    commit_seconds: float
    """From the last contribution to the commit's posting."""
    adopted_seconds: float
    """From the commit's posting until the last node holds its state."""
    settled_seconds: float
    """From the moment a quarter of the nodes joins until a commit after which no expert moves any more."""
    round_messages: float
    """DHT requests that a node answers in a round beside those of its training: planning looks often."""
    round_bytes: float
    """Of these requests and their answers."""
    steady_messages: float
    """DHT requests that a node answers per second while everybody trains: the records are renewed and read."""
    steady_bytes: float
    """Of these requests and their answers, per second."""
    document_bytes: float
    """That a node sends in a round: what it posts, to each of the others."""
    posts: float
    """Of a node in a round, each to one other."""
    plan_bytes: float
    commit_bytes: float
    contribution_bytes: float


COLUMNS = (
    ("nodes", "nodes", 1, 0),
    ("plan_seconds", "plan s", 1, 2),
    ("commit_seconds", "commit s", 1, 2),
    ("adopted_seconds", "adopted s", 1, 2),
    ("settled_seconds", "settled s", 1, 1),
    ("round_messages", "DHT/round", 1, 0),
    ("round_bytes", "kB/round", 1000, 0),
    ("steady_messages", "DHT/s", 1, 2),
    ("steady_bytes", "kB/s ", 1000, 2),
    ("posts", "posts/round", 1, 0),
    ("document_bytes", "posted kB/round", 1000, 0),
    ("plan_bytes", "plan kB", 1000, 1),
    ("commit_bytes", "commit kB", 1000, 1),
    ("contribution_bytes", "contribution kB", 1000, 1),
)
"""Field, title, divisor and digits of what is printed."""


class DhtTraffic:
    """Counts what the DHT handlers of this process answer."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    @property
    def now(self) -> tuple[int, int]:
        """Messages and bytes so far."""
        return self.messages, self.bytes

    def since(self, before: tuple[int, int]) -> tuple[int, int]:
        """Messages and bytes since then."""
        return self.messages - before[0], self.bytes - before[1]

    def install(self) -> None:
        """Count from now on; call it before the first node starts."""
        for name, kind in (
            ("rpc_ping", dht_pb2.PingRequest),
            ("rpc_store", dht_pb2.StoreRequest),
            ("rpc_find", dht_pb2.FindRequest),
        ):
            setattr(DHTProtocol, name, self._counting(getattr(DHTProtocol, name), kind))

    def _counting(self, handler: Any, kind: Any) -> Any:
        @functools.wraps(handler)
        async def count(self: Any, request: kind, context: P2PContext) -> Any:
            answer = await handler(self, request, context)
            traffic.messages += 1
            traffic.bytes += request.ByteSize() + answer.ByteSize()
            return answer

        traffic = self
        return count


class Watch:
    """When what was posted in a swarm, and when who had it."""

    def __init__(self) -> None:
        self.posted: dict[tuple[str, int], float] = {}
        """Kind and round: when the last of them was posted."""
        self.adopted: dict[int, float] = {}
        """Round: when the last node held its state."""
        self.sizes: dict[str, list[int]] = {}
        self.sent = Counter[str]()
        self.posts = 0

    def reset(self) -> None:
        """Begin to count anew."""
        self.sizes.clear()
        self.sent.clear()
        self.posts = 0

    def tamper(self, node: Node) -> None:
        """Look at what a node posts."""

        def look(signed: Signed[Document]) -> Iterable[Signed[Document]]:
            kind, number = signed.document.kind, getattr(signed.document, "round", 0)
            self.posted[kind, number] = asyncio.get_running_loop().time()
            self.sizes.setdefault(kind, []).append(len(signed.wire))
            others = len(node.participant.membership.view.present()) - 1
            self.posts += others
            self.sent[kind] += len(signed.wire) * others
            return (signed,)

        node.tamper = look

    def note(self, node: Node, commit: Signed[Commit]) -> None:
        """A node has adopted a commit."""
        self.adopted[commit.document.round] = asyncio.get_running_loop().time()


async def measure(size: int, rounds: int, lease_seconds: float, traffic: DhtTraffic, folder: Path) -> Row:
    """One swarm of this size, from its start to its end."""
    watch, loop = Watch(), asyncio.get_running_loop()
    joining = size // 4
    life = {"lease_seconds": lease_seconds, "margin_seconds": lease_seconds / 3}
    settings = {**SETTINGS, **life, "start_nodes": size - joining}
    async with Swarm(folder, model=MODEL, on_commit=watch.note, **settings) as swarm:
        nodes = [swarm.add(step_seconds=0.1) for _ in range(size - joining)]
        newcomers = [swarm.add(step_seconds=0.1, newcomer=True) for _ in range(joining)]
        for node in (*nodes, *newcomers):
            watch.tamper(node)
        await _start(swarm, nodes)
        await swarm.rounds(2, seconds=PATIENCE_SECONDS)
        joined = loop.time()
        await _start(swarm, newcomers)
        settled = await _settled(swarm, newcomers, watch) - joined
        first = max(node.round for node in swarm.running) + 1
        watch.reset()
        before = traffic.now
        await swarm.rounds(rounds, seconds=PATIENCE_SECONDS)
        in_rounds = traffic.since(before)
        sent, posts = sum(watch.sent.values()), watch.posts
        steady, seconds = await _training(swarm, STEADY_BEATS * lease_seconds / BEATS_PER_LEASE, traffic)
        numbers = range(first, first + rounds)

        def median(start: Callable[[int], float], end: Callable[[int], float]) -> float:
            return statistics.median(end(number) - start(number) for number in numbers)

        return Row(
            nodes=size,
            plan_seconds=median(
                lambda n: watch.posted["commit", n - 1], lambda n: max(x.trainer.began.get(n, 0.0) for x in swarm.nodes)
            ),
            commit_seconds=median(lambda n: watch.posted["contribution", n], lambda n: watch.posted["commit", n]),
            adopted_seconds=median(lambda n: watch.posted["commit", n], lambda n: watch.adopted[n]),
            settled_seconds=settled,
            round_messages=in_rounds[0] / rounds / size,
            round_bytes=in_rounds[1] / rounds / size,
            steady_messages=steady[0] / seconds / size,
            steady_bytes=steady[1] / seconds / size,
            document_bytes=sent / rounds / size,
            posts=posts / rounds / size,
            plan_bytes=statistics.median(watch.sizes["plan"]),
            commit_bytes=statistics.median(watch.sizes["commit"]),
            contribution_bytes=statistics.median(watch.sizes["contribution"]),
        )


async def _training(swarm: Swarm, seconds: float, traffic: DhtTraffic) -> tuple[tuple[int, int], float]:
    """The DHT's traffic while all nodes do nothing but train for so long, and the seconds of that."""
    loop = asyncio.get_running_loop()
    for node in swarm.running:
        node.trainer.step_seconds = 0.75 * seconds  # of two steps
    number = max(node.round for node in swarm.running) + 2  # the one that is in progress may still be a quick one
    await swarm.until(
        lambda: all(number in node.trainer.began for node in swarm.running), "a long round", PATIENCE_SECONDS
    )
    before, began = traffic.now, loop.time()
    await swarm.until(lambda: loop.time() - began > seconds, "some time", seconds + 10)
    return traffic.since(before), loop.time() - began


async def _start(swarm: Swarm, nodes: list[Node]) -> None:
    for first in range(0, len(nodes), AT_ONCE):
        group = nodes[first : first + AT_ONCE]
        alone, together = ([group[0]], group[1:]) if not swarm.running else ([], group)
        await swarm.start(*alone)
        await asyncio.gather(*[swarm.start(node) for node in together])


async def _settled(swarm: Swarm, newcomers: list[Node], watch: Watch) -> float:
    """When the first of two commits was there between which no expert moved, with a share of every newcomer."""

    def is_settled() -> bool:
        commits = swarm.nodes[0].commits[-2:]
        before, after = (commit.document for commit in commits)
        return before.owners == after.owners and all(node.id in before.shares for node in newcomers)

    await swarm.until(is_settled, "the newcomers' leases to settle", PATIENCE_SECONDS)
    return watch.adopted[swarm.nodes[0].commits[-2].document.round]


def main() -> None:
    """Measure each size, report, and exit with 1 if the cost per node grows faster than the swarm."""
    options = _options()
    logging.disable(logging.CRITICAL)
    traffic, rows = DhtTraffic(), list[Row]()
    traffic.install()
    print("  ".join(title for _, title, _, _ in COLUMNS))
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="spes-scale-") as folder:
            row = uvloop.run(measure(size, options.rounds, options.lease, traffic, Path(folder)))
        rows.append(row)
        cells = (f"{getattr(row, key) / unit:>{len(title)}.{digits}f}" for key, title, unit, digits in COLUMNS)
        print("  ".join(cells), flush=True)
    small, large = (row.steady_bytes / row.nodes for row in (rows[0], rows[-1]))
    holds = large <= BOUND * small
    verdict = "ok" if holds else "FAILED"
    print(
        f"\n{verdict:<6}  DHT bytes per node grow {large / small:.1f} times as fast as the swarm, at most {BOUND:.1f}\n"
    )
    print(
        "figures",
        write_results("scale", {"lease_seconds": options.lease, "rows": [asdict(row) for row in rows], "holds": holds}),
    )
    sys.exit(not holds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="default: 4 8")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="measured at each size (default: 5)")
    parser.add_argument(
        "--lease", type=float, default=30.0, metavar="S", help="life of a record (default: 30; a large swarm has more)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
