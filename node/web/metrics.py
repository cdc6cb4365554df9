"""A snapshot as OpenMetrics, for Prometheus and whatever else reads that."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from node.expert_load import dead, shares
from node.health import examine
from node.snapshot import Snapshot
from swarm.manifest import PROTOCOL
from swarm.records import State
from swarm.release import VERSION

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(snapshot: Snapshot) -> bytes:
    """The text form of a snapshot's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(snapshot))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Metrics(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All metrics of the swarm, then those of this node."""
        snapshot = self._snapshot
        run = snapshot.manifest.document
        facts = {"version": VERSION, "protocol": str(PROTOCOL), "run": run.name, "run_id": snapshot.manifest.digest}
        yield InfoMetricFamily("spes_build", "What this process is and which run it is in", value=facts)
        yield from self._run()
        yield from self._nodes()
        yield from self._me()
        yield self._health()

    def _health(self) -> Metric:
        found = Counter((trouble.code, trouble.severity) for trouble in examine(self._snapshot))
        health = GaugeMetricFamily("spes_health_warnings", "What is wrong, by kind", labels=["code", "severity"])
        for (code, severity), count in found.items():
            health.add_metric([code, severity], count)
        return health

    def _run(self) -> Iterator[Metric]:
        snapshot, commit = self._snapshot, self._snapshot.commit
        run = snapshot.manifest.document
        covered = len(snapshot.holders()) / run.model.num_experts
        yield _gauge("spes_experts_covered_ratio", "Share of the experts that somebody trains", covered)
        if commit is None:
            return
        document = commit.document
        yield _gauge("spes_round", "Last committed round", document.round)
        yield _counter("spes_tokens_processed", "Tokens that the run has trained on", document.tokens)
        yield _gauge(
            "spes_merge_alpha_ratio", "Strength of the next merge", snapshot.warmup.alpha if snapshot.warmup else 0.0
        )
        if document.round:
            yield _gauge("spes_training_loss", "Training loss of the last round, nats per token", document.loss)
            yield _gauge(
                "spes_utilisation_ratio", "Share of their time that nodes spend in training steps", document.busy
            )
            yield _gauge("spes_round_contributors", "Nodes whose work counted in the last round", len(document.shares))
            yield _gauge(
                "spes_round_missing", "Nodes that were planned in and did not contribute", len(document.missing)
            )
            yield _gauge(
                "spes_round_carried_shards", "Shards without a new version in the last round", len(document.carried)
            )
            yield _gauge("spes_round_training_seconds", "Training part of the last round", document.train_seconds)
            if document.reduce_seconds:
                yield _gauge("spes_round_averaging_seconds", "Rest of the last round", document.reduce_seconds[-1])
        if document.choices:
            yield _gauge(
                "spes_dead_experts", "Experts of all layers that get almost no tokens", len(dead(document.choices))
            )
            load = GaugeMetricFamily(
                "spes_expert_load_ratio", "Share of the choices, mean over layers", labels=["expert"]
            )
            for expert, layers in enumerate(zip(*shares(document.choices), strict=True)):
                load.add_metric([str(expert)], fmean(layers))
            yield load
        if document.heldout_loss is not None:
            yield _gauge(
                "spes_heldout_loss", "Held-out loss before the last round, nats per token", document.heldout_loss
            )

    def _nodes(self) -> Iterator[Metric]:
        states = Counter("lost" if s.lost else s.record.state for s in self._snapshot.nodes.values())
        nodes = GaugeMetricFamily("spes_swarm_nodes", "Nodes that this one knows of, by state", labels=["state"])
        for state in (*get_args(State), "lost"):
            nodes.add_metric([state], states[state])
        yield nodes

    def _me(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        if snapshot.me is None or (mine := snapshot.nodes.get(snapshot.me)) is None:
            return
        record, commit = mine.record, snapshot.commit
        moved = CounterMetricFamily("spes_bytes", "Bytes of shards and documents, by direction", labels=["direction"])
        moved.add_metric(["sent"], record.sent)
        moved.add_metric(["received"], record.received)
        yield moved
        yield _counter(
            "spes_node_tokens_processed", "Tokens that this node has trained on since it started", record.trained_tokens
        )
        yield _gauge("spes_node_step_seconds", "Time of one local step of this node", record.seconds_per_step)
        yield _gauge("spes_node_experts", "Experts that this node trains", len(record.experts))
        yield _gauge("spes_node_utilisation_ratio", "Share of its time that this node trains", record.utilisation)
        in_sync = commit is not None and record.digest == commit.document.state
        yield _gauge("spes_node_in_sync", "1 if this node holds the last state that it knows of", in_sync)
        state = GaugeMetricFamily("spes_node_state", "1 for the state that this node is in", labels=["state"])
        for name in get_args(State):
            state.add_metric([name], name == record.state)
        yield state


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=float(value))
