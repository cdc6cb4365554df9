"""A run in one process: engines, contributions, averages, merges and commits are the product's own, without processes,
network and waiting. It trains what a swarm trains whose nodes all do all of their steps in every round, and none while
it is averaged.
"""

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootstrap.genesis import write_genesis
from bootstrap.run_file import RunFile
from model.engine import Engine
from model.errors import UserError
from node.console import Console, describe_run
from node.corpus import Corpus
from node.evaluation import committed, heldout_loss
from node.local_training import LocalTraining
from node.planning import fair_share
from swarm.contribute import Contributor
from swarm.documents import Commit, Contribution, Merge, Plan, Result, Signed, canonical, digest_of, seal
from swarm.exchange import Writer
from swarm.history import History
from swarm.identity import Identity, NodeId
from swarm.leader import make_commit, make_plan, reducers
from swarm.manifest import Manifest
from swarm.merging import choose_donors, merge_state
from swarm.progress import HandedIn
from swarm.records import NodeRecord, View
from swarm.reduce import Reducer
from swarm.release import VERSION
from swarm.residuals import Residuals
from swarm.store import ShardStore
from swarm.training import make_contribution, make_task
from swarm.warmup import strength

AUTHOR = "simulation"
"""Stands for the author of a simulated run, whose id would be another one each time."""


def node_ids(count: int, seed: int) -> list[NodeId]:
    """Ids for nodes that have no keys, the same for the same seed: who trains which experts on which text follows from
    them."""
    digests = [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]
    return [NodeId("Qm" + digest[:44].replace("0", "z")) for digest in digests]  # base58 has no 0


class _Silence:
    """The channel of a trainer that nobody stops."""

    def send(self, message: dict[str, Any]) -> None:
        """Progress is of no interest, trouble is."""
        if message["event"] == "warning":
            raise RuntimeError(message["text"])

    def pending(self) -> bool:
        """Nothing ever comes."""
        return False


class _Nowhere:
    """The peers of a reducer that has everything."""

    async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
        raise AssertionError(f"{wanted} of {node} must be here")


class SimulatedNode:
    """One node's engine, and what it keeps from round to round."""

    def __init__(self, manifest: Manifest, corpus: Corpus, capacity: int, folder: Path) -> None:
        """Args:
        manifest: the run's.
        corpus: all nodes' text.
        capacity: experts that it can train.
        folder: for what its encodings round away.
        """
        self.engine = Engine(manifest.model, manifest.loss, manifest.optimizer)
        self.training = LocalTraining(self.engine, corpus, manifest.round, _Silence())
        self.residuals = Residuals(folder / "residuals")
        self.capacity = capacity
        self.leases: tuple[int, ...] = ()
        self.last: HandedIn | None = None


class Simulation:
    """A run of some nodes, round by round."""

    def __init__(
        self,
        manifest: Signed[Manifest],
        store: ShardStore,
        corpus: Corpus,
        capacities: Mapping[NodeId, int],
        identity: Identity,
    ) -> None:
        """Args:
        manifest: the run.
        store: at the commit to go on from; it becomes everybody's.
        corpus: all nodes' text.
        capacities: experts that each node can train.
        identity: signs the commits.
        """
        self.manifest = manifest
        self.store = store
        self._corpus = corpus
        self._identity = identity
        folder = store.folder / "simulated"
        self._residuals = Residuals(folder / "residuals")
        """Of the averages."""
        self.nodes = {
            node: SimulatedNode(manifest.document, corpus, capacity, folder / node)
            for node, capacity in capacities.items()
        }
        self.ahead = 0
        """Steps that each node trains ahead while a round is averaged, with overlap."""

    @property
    def head(self) -> Signed[Commit]:
        """The last commit."""
        assert self.store.head is not None
        return self.store.head

    def heldout_loss(self, blocks: int) -> float:
        """Of the head, on so many held-out blocks, nats per token."""
        run = self.manifest.document
        return heldout_loss(run, self._corpus, committed(run, self.store), blocks)

    def run_round(self) -> tuple[Signed[Commit], View, float]:
        """One round: its commit, the nodes, and the seconds that it took."""
        started = time.monotonic()
        run, head = self.manifest.document, self.head
        view = View({node: self.record(node, head) for node in self.nodes})
        merge, base = self.merge(head.document)
        plan = make_plan(
            run,
            self.manifest.digest,
            self._identity.node_id,
            head.document,
            head.digest,
            view.nodes,
            view,
            merge,
        )
        digest = digest_of(canonical(plan))
        contributors = {node: self._contributor(node, plan, base) for node in self.nodes}
        offers = {
            node: self._train(node, plan, digest, base, contributor) for node, contributor in contributors.items()
        }
        reducer = self._reducer(plan, base)
        results = self.average(reducer, base, offers)
        makers = reducers(plan, {name: shard.size for name, shard in base.shards.items()})
        made = {name: (makers[name][0], result) for name, result in results.items()}
        commit = make_commit(plan, digest, self._identity.node_id, base, made, offers, 0.0)
        for shard in commit.shards.values():
            if (path := self.store.locate(shard.digest)) != self.store.path(shard.digest):
                self.store.take_in(path)
        self.store.adopt(seal(self._identity, commit))
        for node, contributor in contributors.items():
            last = self.nodes[node].last
            assert last is not None
            contributor.settle(commit, node, last.work)
            reducer.settle(commit, node)
            self._train_ahead(node)
        return self.head, view, time.monotonic() - started

    def merge(self, head: Commit) -> tuple[Merge | None, Commit]:
        """How the round begins, and its base."""
        run = self.manifest.document
        if not (alpha := strength(run, head.round)):
            return None, head
        donors = choose_donors(self.store, head, run.model, run.merge.donors)
        base = merge_state(self.store, head, alpha, donors)
        return Merge(alpha=alpha, donors=donors, state=base.state), base

    def average(self, reducer: Reducer, base: Commit, offers: Mapping[NodeId, Contribution]) -> Mapping[str, Result]:
        """The results of a round, by shard.

        Args:
            reducer: averages.
            base: what the round started from.
            offers: what the nodes hand in.
        """
        return asyncio.run(reducer.reduce(list(base.shards), offers))

    def record(self, node: NodeId, head: Signed[Commit]) -> NodeRecord:
        """What the node would say about itself."""
        simulated = self.nodes[node]
        return NodeRecord(
            run=self.manifest.digest,
            version=VERSION,
            name=node[-6:],
            role="trainer",
            addresses=(),
            commit=head.digest,
            capacity=simulated.capacity,
            experts=simulated.leases,
        )

    def _contributor(self, node: NodeId, plan: Plan, base: Commit) -> Contributor:
        folder = self.store.scratch(plan.round) / node
        folder.mkdir(exist_ok=True)
        return Contributor(self.manifest.document.encoding, base, self.store, self.nodes[node].residuals, folder)

    def _train(self, node: NodeId, plan: Plan, digest: str, base: Commit, contributor: Contributor) -> Contribution:
        simulated, run = self.nodes[node], self.manifest.document
        simulated.leases = plan.owners[node]
        task = make_task(plan, base, self.head, node, simulated.last, self.store, run.round.local_steps, {})
        work, failure = simulated.training.train(task)
        if failure:
            raise FloatingPointError(f"{node}: {failure}")
        for snapshot in work.shards.values():
            self.store.place(task.folder / snapshot)
        simulated.last = HandedIn(digest, plan.parent, base, work)
        return make_contribution(plan, digest, node, work, contributor.encode(work), 0.0)

    def _reducer(self, plan: Plan, base: Commit) -> Reducer:
        def complain(node: str, what: str) -> None:
            raise RuntimeError(f"{node}: {what}")

        return Reducer(
            plan,
            base,
            self.manifest.document.encoding,
            store=self.store,
            residuals=self._residuals,
            exchange=_Nowhere(),
            margin=0.0,
            complain=complain,
            rate=self.manifest.document.round.outer_rate,
        )

    def _train_ahead(self, node: NodeId) -> None:
        training = self.nodes[node].training
        for _ in range(self.ahead):
            if training.has_ahead:
                training.step_ahead()


def begin(
    run_file: RunFile,
    folder: Path,
    corpus: Corpus,
    *,
    nodes: int,
    experts: int | None = None,
    identity: Identity,
    make: Callable[..., Simulation] = Simulation,
) -> Simulation:
    """A simulation of the run of a run file, from its first weights. The same arguments give the same run.

    Args:
        run_file: what a person wrote.
        folder: for the state; new.
        corpus: the text.
        nodes: how many take part.
        experts: that each can train; its share if it is None.
        identity: signs the commits.
        make: called with the arguments of `Simulation`, for one that differs in something.
    """
    run = run_file.manifest(AUTHOR, corpus.fingerprint, corpus.num_blocks)
    manifest = Signed(run, NodeId(AUTHOR), digest_of(canonical(run)), b"")
    store = ShardStore.open(folder, manifest.digest)
    write_genesis(manifest, identity, store)
    capacity = min(experts or fair_share(run, nodes), run.model.num_experts)
    return make(manifest, store, corpus, dict.fromkeys(node_ids(nodes, run.seed), capacity), identity)


def run_simulation(
    run_file: RunFile,
    corpus: Corpus,
    *,
    nodes: int,
    experts: int | None,
    rounds: int,
    output: Path | None,
    console: Console,
) -> None:
    """Simulate a run and show its rounds, as a node does.

    Args:
        run_file, corpus, nodes, experts: as for `begin`.
        rounds: how many.
        output: a file for a line of JSON for each round, as in a node's `history.jsonl`; None for none.
        console: shows the rounds.

    Raises UserError when the run has no end and `rounds` is 0.
    """
    if not rounds:
        raise UserError("the run has no end (round.total = 0): say when to stop, --rounds N")
    with (
        tempfile.TemporaryDirectory(prefix="spes-simulation-") as name,
        contextlib.closing(Identity.ephemeral()) as identity,
    ):
        folder = Path(name)
        simulation = begin(run_file, folder / "store", corpus, nodes=nodes, experts=experts, identity=identity)
        run = simulation.manifest.document
        capacity = next(iter(simulation.nodes.values())).capacity
        console.fact("run", describe_run(run))
        console.fact("nodes", f"{nodes} in this process, each trains {capacity} of {run.model.num_experts} experts")
        ending = run.model_copy(update={"round": run.round.model_copy(update={"total": rounds})})
        history = History(output or folder / "history.jsonl", ending, console.round)
        for _ in range(rounds):
            history.add(*simulation.run_round())
        if run.round.heldout_blocks:
            final = simulation.heldout_loss(run.round.heldout_blocks)
            console.say(f"held-out loss of the last state: {final:.3f} nats per token")
