"""A swarm in one process: real participants on real peers, each with its own p2pd and its own store, and trainers that
leave marks (`bench.marking_trainer`). For tests of whole rounds, and for what a round costs in a larger swarm."""

import asyncio
import contextlib
import gc
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from google.protobuf.wrappers_pb2 import BytesValue
from hivemind.p2p import P2PContext

from bench.marking_trainer import MarkingTrainer
from bootstrap.genesis import write_genesis
from model.settings import LossSettings, ModelSettings, OptimizerSettings
from swarm.documents import Commit, Document, Signed, seal
from swarm.identity import Identity
from swarm.manifest import DataSettings, EncodingSettings, Manifest, MergeSettings, RoundSettings
from swarm.network import Network
from swarm.participant import Participant
from swarm.records import NodeRecord, View
from swarm.release import VERSION
from swarm.store import ShardStore

Tamper = Callable[[Signed[Document]], Iterable[Signed[Document]]]
"""Called with what a node is about to post: what it posts instead."""
Serve = Callable[[BytesValue, P2PContext], AsyncIterator[BytesValue]]
"""How a node answers `rpc_fetch`."""

TINY = ModelSettings(
    vocab_size=64,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    expert_size=32,
    num_experts=4,
    experts_per_token=1,
    max_length=8,
)
"""Its shards have between 80 and 768 values."""
QUICK: Mapping[str, Any] = {
    "total": 0,
    "local_steps": 4,
    "batch_blocks": 1,
    "heldout_blocks": 4,
    "train_seconds": 20.0,
    "margin_seconds": 4.0,
    "lease_seconds": 4.0,
}


PATIENCE_SECONDS = 80.0
"""For what takes some seconds on a machine that is not busy."""

EXACT = EncodingSettings(shared="fp32", experts="fp32")


def tiny_run(
    author: str, model: ModelSettings, encoding: EncodingSettings, merge: MergeSettings, rounds: Mapping[str, Any]
) -> Manifest:
    """A run for marking trainers; `rounds` are the keys of `RoundSettings` that differ from QUICK."""
    return Manifest(
        name="marks",
        author=author,
        seed=1,
        model=model,
        loss=LossSettings(),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        data=DataSettings(block_tokens=8, num_blocks=1 << 20),
        round=RoundSettings.model_validate({**QUICK, **rounds}),
        encoding=encoding,
        merge=merge,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One node of the swarm, running or not."""

    identity: Identity
    folder: Path
    manifest: Signed[Manifest]
    capacity: int
    trainer: MarkingTrainer
    on_commit: Callable[["Node", Signed[Commit]], None]
    commits: list[Signed[Commit]] = field(default_factory=list)
    """Those that it has adopted, over all its lives."""
    seconds: list[float] = field(default_factory=list)
    """Time of each since the one before."""
    reason: str = ""
    """What it says that it is doing."""
    tamper: Tamper | None = None
    serve: Serve | None = None
    network: Network = field(init=False)
    store: ShardStore = field(init=False)
    participant: Participant = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its node id."""
        return self.identity.node_id

    @property
    def round(self) -> int:
        """Of the last commit that it has adopted."""
        return self.commits[-1].document.round if self.commits else 0

    @property
    def head(self) -> Commit:
        """That commit; it must have adopted one."""
        return self.commits[-1].document

    async def start(self, peers: Iterable[str]) -> None:
        """Begin a life, from what is in the folder."""
        self.network = await Network.start(self.identity, peers=list(peers))
        self.store = ShardStore.open(self.folder, self.manifest.digest)
        self.participant = Participant(
            self.manifest,
            identity=self.identity,
            network=self.network,
            store=self.store,
            record=NodeRecord(
                run=self.manifest.digest,
                version=VERSION,
                name=self.folder.name,
                role="trainer",
                addresses=tuple(await self.network.addresses())[:4],
                capacity=self.capacity,
            ),
            trainer=self.trainer,
            on_commit=self._note,
            on_state=self._tell,
        )
        exchange = self.participant.exchange
        self._post = exchange.post
        self._fetch = exchange.rpc_fetch
        # the calls of an exchange are found by its class's name, so the object is changed and not the class
        exchange.__dict__.update(post=self._post_tampered, rpc_fetch=self._serve)
        self.tasks = [asyncio.create_task(self.participant.run())]

    _post: Callable[[Iterable[str], Signed[Document]], None] = field(init=False)
    _fetch: Serve = field(init=False)

    def _post_tampered(self, nodes: Iterable[str], signed: Signed[Document]) -> None:
        for document in self.tamper(signed) if self.tamper is not None else (signed,):
            self._post(list(nodes), document)

    async def _serve(self, request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
        async for message in (self.serve or self._fetch)(request, context):
            yield message

    def throttle(self, rate: float, *, line: asyncio.Lock | None = None, to: str = "") -> None:
        """Serve objects at this many bytes per second and stream.

        Args:
            rate: bytes/s.
            line: all streams that share it have the rate together.
            to: slow is only what this node asks for.
        """

        async def slowly(request: BytesValue, context: P2PContext) -> AsyncIterator[BytesValue]:
            async for message in self._fetch(request, context):
                if to in ("", str(context.remote_id)):
                    async with line or contextlib.nullcontext():
                        await asyncio.sleep(len(message.value) / rate)
                yield message

        self.serve = slowly

    def _note(self, commit: Signed[Commit], view: View, seconds: float) -> None:
        self.commits.append(commit)
        self.seconds.append(seconds)
        self.on_commit(self, commit)

    def _tell(self, state: str, reason: str) -> None:
        self.reason = f"{state}: {reason}"

    # the end of a life

    async def hang(self) -> None:
        """Do nothing any more, and still answer peers and renew the records."""
        await self._end_tasks()
        self.trainer.stop()
        self.tasks = [asyncio.create_task(self.participant.membership.beat())]

    async def leave(self) -> None:
        """Say goodbye as a daemon does that is told to stop, and end."""
        await self._end_tasks()
        await self.participant.leave()
        await self.stop()

    async def kill(self) -> None:
        """Be gone without a word."""
        self.network._daemon._process.kill()
        await self.stop()

    async def stop(self) -> None:
        """End this life; what is in the folder stays."""
        await self._end_tasks()
        await self.trainer.close()
        await self.network.close()

    async def _end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    def check(self) -> None:
        """Raise what has ended this node's life, if something has."""
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()


class Swarm:
    """Nodes on loopback that all end with it."""

    def __init__(
        self,
        folder: Path,
        *,
        model: ModelSettings = TINY,
        encoding: EncodingSettings | None = None,
        merge: MergeSettings | None = None,
        on_commit: Callable[[Node, Signed[Commit]], None] = lambda node, commit: None,
        **rounds: Any,
    ) -> None:
        """Args:
        folder: for keys and stores.
        model: which shards there are.
        encoding: how they travel; fp32 by default.
        merge: the warm-up; none by default.
        on_commit: called with each commit that a node has adopted.
        rounds: keys of `RoundSettings` that differ from QUICK.
        """
        self._folder = folder
        self._on_commit = on_commit
        author = Identity.open(folder / "author.key")
        self._identities = [author]
        self.manifest = seal(
            author, tiny_run(author.node_id, model, encoding or EXACT, merge or MergeSettings(), rounds)
        )
        self.nodes: list[Node] = []
        """All that were ever added."""
        self.running: list[Node] = []
        self.genesis = ShardStore.open(folder / "genesis", self.manifest.digest)
        write_genesis(self.manifest, author, self.genesis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*[node.stop() for node in self.running])
        for identity in self._identities:
            identity.close()
        gc.collect()  # while the event loop is there to close what hivemind leaves to the collector

    def add(self, *, capacity: int = 4, step_seconds: float = 0.05, newcomer: bool = False) -> Node:
        """A node that does not run yet.

        Args:
            capacity: experts that it can train.
            step_seconds: of its trainer.
            newcomer: it has to fetch the state; others have the genesis on their disk.
        """
        folder = self._folder / f"node-{len(self.nodes)}"
        identity = Identity.open(self._folder / f"{folder.name}.key")
        self._identities.append(identity)
        if not newcomer:
            shutil.copytree(self.genesis.folder, folder)
        node = Node(
            identity=identity,
            folder=folder,
            manifest=self.manifest,
            capacity=capacity,
            trainer=MarkingTrainer(self.manifest.document, identity.node_id, step_seconds),
            on_commit=self._on_commit,
        )
        self.nodes.append(node)
        return node

    async def start(self, *nodes: Node) -> None:
        """Let nodes begin, one after the other, each with those before it as peers."""
        for node in nodes:
            peers = [address for other in self.running for address in await other.network.addresses()]
            await node.start(peers[:3])
            self.running.append(node)

    async def restart(self, node: Node) -> None:
        """Let a node that was ended begin again, with what is on its disk and nothing else."""
        old = node.trainer
        node.trainer = MarkingTrainer(self.manifest.document, node.id, old.step_seconds)
        node.trainer.works = old.works
        await self.start(node)

    async def end(self, node: Node, how: str = "kill") -> None:
        """End a node's life: `kill`, `leave` or `stop`."""
        self.running.remove(node)
        await getattr(node, how)()

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> float:
        """Wait until a condition holds; returns the seconds that it took. Raises TimeoutError with what was waited for,
        and whatever has ended a running node."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not condition():
            for node in self.running:
                node.check()
            if loop.time() - started > seconds:
                doing = "; ".join(f"{node.folder.name} at {node.round} ({node.reason})" for node in self.running)
                raise TimeoutError(f"{what} did not happen within {seconds:.0f} s: {doing}")
            await asyncio.sleep(0.02)
        return loop.time() - started

    async def rounds(
        self, number: int, nodes: Iterable[Node] | None = None, seconds: float = PATIENCE_SECONDS
    ) -> float:
        """Wait until nodes, or all that run, have adopted `number` more rounds than the furthest of them has now."""
        chosen = list(nodes if nodes is not None else self.running)
        goal = max(node.round for node in chosen) + number
        return await self.until(lambda: all(n.round >= goal for n in chosen), f"round {goal}", seconds)
