"""A run in one process: repeatable, and what real processes train."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.expert_load import measure
from bench.merged_moments import Change, MomentsSimulation, reset, scale
from bench.outer import Nesterov, OuterSimulation
from bootstrap.genesis import write_genesis
from bootstrap.run_file import change_settings, read_run_file, write_preset
from model.initial import initial_values
from node.corpus import Corpus, load_corpus
from node.local_swarm import LocalSwarm
from node.simulation import Simulation, begin, node_ids
from node.stores import find_run, open_store
from swarm import codec
from swarm.documents import Commit
from swarm.identity import Identity
from swarm.manifest import Encoding
from swarm.store import ShardStore, map_values, read_commit
from swarm.trainer import Task, Work

EXACT = {"encoding.shared": "fp32", "encoding.experts": "fp32", "round.overlap": False}
MERGE = {"merge.alpha": 0.5, "merge.every_steps": 4, "merge.first_steps": 40, "merge.donors": 2}


def run_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "run.toml"
    write_preset("tiny-test", path)
    change_settings(path, {"round.overlap": False, **changes})
    return path


@pytest.fixture
def identity(identities: list[Identity]) -> Identity:
    return identities[0]


def corpus_of(path: Path) -> Corpus:
    run = read_run_file(path)
    return load_corpus(run.data, run.run.seed, [])


def simulate(path: Path, identity: Identity, **how: Any) -> Simulation:
    run = read_run_file(path)
    return begin(run, path.parent / "store", corpus_of(path), **{"nodes": 2, "identity": identity, **how})


def rounds(simulation: Simulation, count: int) -> list[Commit]:
    return [simulation.run_round()[0].document for _ in range(count)]


def test_ids_are_ids_and_repeat(identity: Identity) -> None:
    ids = node_ids(50, 3)
    assert len(set(ids)) == 50 and ids[:4] == node_ids(4, 3) != node_ids(4, 4)
    assert {len(node) for node in ids} == {len(identity.node_id)}


@pytest.mark.parametrize("encoding", ["fp32", "int8"])
def test_the_same_run_again_has_the_same_bits(tmp_path: Path, identity: Identity, encoding: str) -> None:
    changes = {**MERGE, "encoding.shared": encoding, "encoding.experts": encoding}
    once, again = (rounds(simulate(run_file(tmp_path / name, **changes), identity), 4) for name in ("once", "again"))
    assert [commit.state for commit in once] == [commit.state for commit in again]
    assert [commit.loss for commit in once] == [commit.loss for commit in again]
    assert [commit.merge is not None for commit in once] == [False, False, True, False]
    assert once[-1].loss < once[0].loss, "it learns"
    other = rounds(simulate(run_file(tmp_path / "other", **changes, **{"run.seed": 9}), identity), 1)
    assert other[0].state != once[0].state


def test_nobody_trains_twice_and_every_expert_has_its_owner(tmp_path: Path, identity: Identity) -> None:
    simulation = simulate(run_file(tmp_path), identity)
    commits = rounds(simulation, 3)
    for commit in commits:
        owned = sorted(expert for experts in commit.owners.values() for expert in experts)
        assert owned == [0, 1, 2, 3] and len(commit.shares) == 2 and not commit.carried
        assert not commit.ledger.returned and not commit.ledger.reserved
    block_tokens = corpus_of(tmp_path / "run.toml").block_tokens
    assert commits[-1].ledger.cursor * block_tokens == commits[-1].tokens


def test_with_all_experts_everywhere_and_as_many_owners_everything_is_averaged(
    tmp_path: Path, identity: Identity
) -> None:
    simulation = simulate(run_file(tmp_path, **{**EXACT, "round.owners_per_expert": 2}), identity, experts=4)
    (commit,) = rounds(simulation, 1)
    assert all(experts == (0, 1, 2, 3) for experts in commit.owners.values())
    assert all(len(commit.shares) == 2 and not update.without for update in commit.updates.values())


def test_what_was_trained_ahead_counts_in_the_next_round(tmp_path: Path, identity: Identity) -> None:
    path = run_file(tmp_path, **{"round.overlap": True})
    simulation = simulate(path, identity)
    simulation.ahead = 1
    tasks = list[Task]()

    def watched(train: Callable[[Task], tuple[Work, str]]) -> Callable[[Task], tuple[Work, str]]:
        def look(task: Task) -> tuple[Work, str]:
            tasks.append(task)
            return train(task)

        return look

    for node in simulation.nodes.values():
        node.training.__dict__["train"] = watched(node.training.train)
    commits = rounds(simulation, 3)
    local_steps = read_run_file(path).round.local_steps
    assert all(share.steps == local_steps for commit in commits for share in commit.shares.values())
    assert all(task.counted and task.references for task in tasks[2:])


@pytest.mark.parametrize("encoding", ["fp32", "int8"])
def test_of_the_change_of_a_round_the_outer_rate_is_taken_over(
    tmp_path: Path, identity: Identity, encoding: Encoding
) -> None:
    """Of averages and of experts with one owner."""
    changes = {"encoding.shared": encoding, "encoding.experts": encoding, "round.outer_rate": 0.25}
    simulation = simulate(run_file(tmp_path, **changes), identity)
    before = {name: values.copy() for name, values in values_of(simulation).items()}
    (first,) = rounds(simulation, 1)
    assert first.updates.keys() == before.keys()
    for name, update in first.updates.items():
        travelled = simulation.store.locate(update.encoded.digest).read_bytes()
        told = codec.decode(encoding, np.frombuffer(travelled, "u1"), before[name].size)
        change = told - before[name] if encoding == "fp32" else told
        assert np.abs(change).max() > 0
        expected = before[name] + np.float32(0.25) * change
        assert values_of(simulation)[name].tobytes() == expected.astype("<f4").tobytes()
    assert rounds(simulation, 2)[-1].loss < first.loss, "it goes on from there"


# what the benchmark compares with


def values_of(simulation: Simulation) -> dict[str, np.ndarray]:
    shards = simulation.head.document.shards
    return {name: map_values(simulation.store.path(shard.digest)) for name, shard in shards.items()}


def test_an_outer_step_of_1_without_momentum_is_the_average(tmp_path: Path, identity: Identity) -> None:
    plain = simulate(run_file(tmp_path / "plain", **EXACT), identity)
    outer, nesterov = (
        simulate(run_file(tmp_path / name, **EXACT), identity, make=partial(OuterSimulation, how))
        for name, how in (("outer", Nesterov(1.0, 0.0)), ("nesterov", Nesterov(0.7, 0.9)))
    )
    for simulation in (plain, outer, nesterov):
        simulation.run_round()
    run = plain.manifest.document
    genesis = {shard.name: values.ravel() for shard, values in initial_values(run.model, run.seed)}
    for name, values in values_of(plain).items():
        np.testing.assert_allclose(values_of(outer)[name], values, rtol=0, atol=1e-6)
        step = 0.7 * 1.9 * (values - genesis[name])
        np.testing.assert_allclose(values_of(nesterov)[name], genesis[name] + step, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("change", "same"), [(lambda moments, alpha: moments, True), (reset, False), (scale, False)])
def test_moments_are_changed_at_a_merge_and_only_there(
    tmp_path: Path, identity: Identity, change: Change, same: bool
) -> None:
    plain = rounds(simulate(run_file(tmp_path / "plain", **MERGE), identity), 3)
    path = run_file(tmp_path / "changed", **MERGE)
    others = rounds(simulate(path, identity, make=partial(MomentsSimulation, change)), 3)
    assert [commit.state for commit in plain[:2]] == [commit.state for commit in others[:2]]
    assert plain[2].merge is not None and (plain[2].state == others[2].state) == same


def test_the_load_of_the_experts_adds_up(tmp_path: Path, identity: Identity) -> None:
    path = run_file(tmp_path)
    simulation = simulate(path, identity)
    rounds(simulation, 1)
    load = measure(simulation, corpus_of(path), 8)
    assert 0.25 <= load.most <= 0.5, "of four experts two are chosen"
    assert 0.3 < load.own < 0.7 and 0 <= load.dead <= 6


@pytest.mark.swarm
@pytest.mark.timeout(240)
def test_real_processes_train_the_same(tmp_path: Path, identity: Identity) -> None:
    """The same nodes, with keys, on the same run: the losses of a swarm are those of its simulation."""
    rhythm = {"round.total": 3, "round.start_nodes": 2, "round.local_steps": 2, "round.outer_rate": 0.75}
    changes = {**EXACT, **MERGE, **rhythm}
    path = run_file(tmp_path, **changes)
    with LocalSwarm(tmp_path / "swarm") as swarm:
        swarm.start_rendezvous(path)
        nodes = [swarm.start_node(f"node-{number}", "--experts", "2", "--device", "cpu") for number in range(2)]
        for box in nodes:
            assert box.process.wait(timeout=180) == 0, box.log.read_text()
    manifest, folder = find_run(nodes[0].home)
    real = [read_commit(folder, manifest.digest, number) for number in (1, 2, 3)]
    told = [commit.document for commit in real if commit is not None]
    assert len(told) == 3 and all(share.steps == 2 for commit in told for share in commit.shares.values())

    store = ShardStore.open(tmp_path / "simulated", manifest.digest)
    write_genesis(manifest, identity, store)
    simulation = Simulation(manifest, store, corpus_of(path), dict.fromkeys(told[0].owners, 2), identity)
    for node, experts in told[0].owners.items():
        simulation.nodes[node].leases = experts  # who claimed which is a matter of who came first
    simulated = rounds(simulation, 3)
    assert [commit.owners for commit in simulated] == [commit.owners for commit in told]
    for commit, other in zip(told, simulated, strict=True):
        assert commit.loss == pytest.approx(other.loss, abs=1e-5)
        assert commit.heldout_loss == pytest.approx(other.heldout_loss, abs=1e-5)
        assert (commit.tokens, commit.ledger) == (other.tokens, other.ledger)
        assert (commit.merge is None) == (other.merge is None)
    _, reached = open_store(nodes[0].home)
    for name, shard in simulation.head.document.shards.items():
        np.testing.assert_allclose(reached.values(name), map_values(store.path(shard.digest)), rtol=0, atol=1e-5)
