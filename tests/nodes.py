"""Nodes for tests of a node's parts: a context around a store that holds a state, with or without real peers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import uvloop

from swarm.board import Board
from swarm.context import Context
from swarm.documents import Commit, Document, Encoded, Signed, seal
from swarm.exchange import CallFailed, Exchange, Writer
from swarm.identity import Identity
from swarm.inheritance import Inheritance
from swarm.manifest import EncodingSettings, Manifest
from swarm.membership import Membership
from swarm.network import Network
from swarm.progress import Utilisation
from swarm.pursuit import Pursuit
from swarm.replica import Replica
from swarm.residuals import Residuals
from swarm.store import ShardStore
from tests import examples
from tests.examples import RUN

Values = Mapping[str, bytes]
SCRIPT_SECONDS = 60.0
"""Bound on one test with real peers."""


class Node:
    """One node at a genesis of the run; peers can ask it for its objects and its commits."""

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        values: Values,
        manifest: Manifest,
        *,
        author: Identity | None = None,
        network: Network | None = None,
    ) -> None:
        """Args:
        identity, folder: this node's.
        values: of the genesis, by shard; none for a node that has no state yet.
        manifest: the run.
        author: signs the genesis; this node, if it is none.
        network: without one there are no calls.
        """
        self.identity = identity
        self.me = identity.node_id
        self.board = Board()
        self.store = ShardStore.open(folder, RUN)
        self.residuals = Residuals(folder / "residuals")
        network = network or cast(Network, SimpleNamespace(node_id=self.me))
        self.exchange = Exchange(network, RUN, self)
        signed = Signed(manifest, self.me, RUN, b"")
        self.membership = Membership(network, signed, examples.record(), lambda: (0, 0))
        self.replica = Replica(self.store, self.exchange, self.membership, manifest)
        self.pursuit = Pursuit(self.replica, self.exchange, self.membership, lambda text: None)
        self.context = Context(
            manifest=manifest,
            run_id=RUN,
            identity=identity,
            board=self.board,
            exchange=self.exchange,
            membership=self.membership,
            replica=self.replica,
            residuals=self.residuals,
            utilisation=Utilisation(),
            inheritance=Inheritance(self.store, self.exchange),
            tell=lambda state, reason: None,
        )
        if values:
            author = author or identity
            self.adopt(seal(author, examples.commit(leader=author.node_id, shards=examples.states(values))), values)

    @property
    def head(self) -> Signed[Commit]:
        return self.replica.head

    @property
    def complaint(self) -> str:
        """The last one."""
        return self.membership.record.complaint

    def adopt(self, commit: Signed[Commit], values: Values) -> None:
        """Move to a commit that has these values."""
        for data in values.values():
            self.store.put(data)
        self.store.adopt(commit)
        self.board.advance(commit.document.round)
        self.replica.announce()

    def keep(self, data: bytes, number: int = 1) -> Encoded:
        """Put an object of a round into the scratch folder."""
        offer = examples.encoded(data)
        with self.store.scratch_writer(number, offer.digest, offer.size) as writer:
            writer.write(data)
            writer.finish()
        return offer

    # exchange.Handler

    def receive(self, signed: Signed[Document]) -> str:
        return self.board.post(signed)

    def document(self, kind: str, number: int, author: str) -> bytes | None:
        if kind == "commit":
            return self.store.commit_wire(number)
        found = self.board.of(kind, number, author or self.me)
        return found[-1].wire if found else None

    def object(self, digest: str) -> Path | None:
        return self.store.find(digest)

    def position(self) -> tuple[str, int]:
        return self.head.digest, self.head.document.round

    def meet(self, node: str, digest: str, number: int) -> None:
        pass


class Offers:
    """Stands in for the calls of an exchange: which objects each node has, and which calls never end."""

    def __init__(self, objects: Mapping[str, Sequence[bytes]]) -> None:
        self.objects = {node: {examples.encoded(data).digest: data for data in held} for node, held in objects.items()}
        self.asked: list[tuple[str, str]] = []
        """Node and digest."""

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        for digest, size in wanted:
            self.asked.append((node, digest))
            data = self.objects.get(node, {}).get(digest)
            if data is None:
                raise CallFailed(node)
            with writer(digest, size) as target:
                target.write(data)
                target.finish()


class Loopback:
    """Real peers that reach each other on this machine; many tests may use them, one after another."""

    def __init__(self, identities: Sequence[Identity]) -> None:
        self._identities = identities
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._networks: list[Network] = []
        self._runner.run(self._start())

    async def _start(self) -> None:
        for identity in self._identities:
            known = await self._networks[0].addresses() if self._networks else []
            self._networks.append(await Network.start(identity, peers=known))

    def close(self) -> None:
        """End the peers."""
        for network in reversed(self._networks):
            self._runner.run(network.close())
        self._runner.close()

    def play(
        self,
        folder: Path,
        values: Values,
        encodings: EncodingSettings,
        script: Callable[[list[Node]], Awaitable[None]],
    ) -> None:
        """Run a script with a node for each peer, all at the same genesis by the first of them."""
        self._runner.run(self._play(folder, values, encodings, script))

    async def _play(
        self,
        folder: Path,
        values: Values,
        encodings: EncodingSettings,
        script: Callable[[list[Node]], Awaitable[None]],
    ) -> None:
        manifest, author = examples.manifest(encoding=encodings), self._identities[0]
        nodes = [
            Node(identity, folder / str(place), values, manifest, author=author, network=network)
            for place, (identity, network) in enumerate(zip(self._identities, self._networks, strict=True))
        ]
        for node in nodes:
            await node.exchange.start()
        try:
            async with asyncio.timeout(SCRIPT_SECONDS):
                await script(nodes)
        finally:
            for node in nodes:
                namespace = f"spes-{RUN[:16]}"
                await node.exchange.remove_p2p_handlers(node.exchange.network.p2p, namespace=namespace)
