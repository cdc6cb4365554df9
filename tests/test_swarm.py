"""Invariants of the design on real swarms: daemons, trainers and hivemind peers as processes on loopback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bootstrap.run_file import change_settings, write_preset
from model.engine import Engine
from model.initial import initial_values
from node.corpus import load_corpus
from node.local_swarm import Box, LocalSwarm
from node.stores import open_store
from swarm import blocks
from swarm.documents import Commit, open_document, state_digest
from swarm.manifest import Manifest
from swarm.shard_names import expert_of
from swarm.store import file_digest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(480)]

WAIT_SECONDS = 180.0


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    """A swarm whose processes all end with the test."""
    with LocalSwarm(tmp_path) as local:
        yield local
    for box in local.nodes:  # pytest shows this of a test that fails
        print(f"--- {box.name}", *box.log.read_text().splitlines()[-40:], sep="\n")


EXACT = {"encoding.shared": "fp32", "encoding.experts": "fp32", "round.overlap": False}
"""Changes of a run in which nothing is rounded on the way, and each round has the steps that it says."""


def write_run(folder: Path, changes: dict[str, Any]) -> Path:
    """The tiny-test preset with some dotted keys changed; returns the run file."""
    path = folder / "run.toml"
    write_preset("tiny-test", path)
    change_settings(path, changes)
    return path


def until(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until a condition holds; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)


def history(box: Box) -> list[dict[str, Any]]:
    """The rounds that a daemon has written down."""
    paths = list(box.home.glob("runs/*/history.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def commits(box: Box) -> list[Commit]:
    """All commits that a node has adopted, in order."""
    manifest_path = next(box.home.glob("runs/*/manifest"))
    run_id = open_store(box.home)[1].run_id
    found = []
    written = (path for path in (manifest_path.parent / "commits").iterdir() if path.name.isdigit())
    for path in sorted(written, key=lambda path: int(path.name)):
        document = open_document(path.read_bytes(), run_id).document
        assert isinstance(document, Commit)
        found.append(document)
    return found


def disk_state(box: Box) -> tuple[int, str]:
    """Round and state digest of a node, from the bytes on its disk."""
    _, store = open_store(box.home)
    assert store.head is not None
    shards = store.head.document.shards
    return store.head.document.round, state_digest({n: file_digest(store.path(s.digest)) for n, s in shards.items()})


def descendants(box: Box) -> list[psutil.Process]:
    """All processes that a daemon has started."""
    processes: list[psutil.Process] = psutil.Process(box.process.pid).children(recursive=True)
    return processes


def last_round(box: Box) -> int:
    """The last round that a daemon has written down; 0 before the first."""
    rounds = history(box)
    return int(rounds[-1]["round"]) if rounds else 0


def test_every_node_holds_the_same_bits_after_every_commit(
    swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of threads they compute with, and whether a round begins with a merge or not."""
    merging = {"merge.alpha": 0.5, "merge.every_steps": 6, "merge.first_steps": 60, "merge.donors": 2}
    changes = {"round.total": 4, "round.start_nodes": 3, "round.local_steps": 3}
    swarm.start_rendezvous(write_run(tmp_path, {**changes, **merging}))
    nodes = []
    for number in range(3):
        monkeypatch.setenv("OMP_NUM_THREADS", str(number + 1))
        nodes.append(swarm.start_node(f"node-{number}"))
    for box in nodes:
        assert box.process.wait(timeout=WAIT_SECONDS) == 0, box.log.read_text()
    assert swarm.rendezvous is not None
    boxes = [*nodes, swarm.rendezvous]
    assert {disk_state(box) for box in boxes} == {(4, history(nodes[0])[-1]["digest"])}
    told = [[(line["round"], line["digest"]) for line in history(box)] for box in boxes]
    assert [number for number, _ in told[0]] == [1, 2, 3, 4]
    assert all(lines == told[0] for lines in told)
    assert all(line["covered"] == line["experts"] == 4 and line["nodes"] == 3 for line in history(nodes[0]))
    assert [line["alpha"] for line in history(nodes[0])] == [0.0, 0.0, 0.45, 0.0]
    owners = commits(nodes[0])[-1].owners
    assert sorted(expert for experts in owners.values() for expert in experts) == [0, 1, 2, 3]
    assert all(experts for experts in owners.values()), "every node has got an expert without being told which"


def test_one_node_alone_is_ordinary_training_bit_for_bit(swarm: LocalSwarm, tmp_path: Path) -> None:
    rounds = 5
    run_file = write_run(tmp_path, {**EXACT, "round.total": rounds, "round.start_nodes": 1, "round.local_steps": 1})
    swarm.start_rendezvous(run_file)
    node = swarm.start_node("alone")
    assert node.process.wait(timeout=WAIT_SECONDS) == 0, node.log.read_text()

    manifest, store = open_store(node.home)
    engine, losses = ordinary_training(manifest, rounds)
    for shard in engine.shards:
        assert np.array_equal(engine.read(shard.name), store.values(shard.name)), shard.name
    assert [line["loss"] for line in history(node)] == losses


def ordinary_training(manifest: Manifest, steps: int) -> tuple[Engine, list[float]]:
    """The same engine and data in this process, without a swarm."""
    corpus = load_corpus(manifest.data, manifest.seed, [])
    engine = Engine(manifest.model, manifest.loss, manifest.optimizer, experts=range(manifest.model.num_experts))
    for shard, values in initial_values(manifest.model, manifest.seed):
        engine.load(shard.name, values)
    batch = manifest.round.batch_blocks
    losses = [
        engine.train_step(corpus.blocks(range(step * batch, (step + 1) * batch)), step).cross_entropy
        for step in range(steps)
    ]
    return engine, losses


def test_with_sgd_and_one_step_a_round_equals_the_big_batch_step(swarm: LocalSwarm, tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        {
            **EXACT,
            "round.total": 1,
            "round.start_nodes": 2,
            "round.local_steps": 1,
            "optimizer.kind": "sgd",
            "optimizer.learning_rate": 0.5,
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.0,
            "optimizer.clip_norm": 0.0,
            "loss.load_balancing": 0.0,
        },
    )
    swarm.start_rendezvous(run_file)
    nodes = [swarm.start_node(f"node-{number}") for number in range(2)]
    for box in nodes:
        assert box.process.wait(timeout=WAIT_SECONDS) == 0, box.log.read_text()

    manifest, store = open_store(nodes[0].home)
    corpus = load_corpus(manifest.data, manifest.seed, [])
    batch = manifest.round.batch_blocks
    everything = corpus.blocks(range(2 * batch))
    big = Engine(manifest.model, manifest.loss, manifest.optimizer, experts=range(manifest.model.num_experts))
    for shard, values in initial_values(manifest.model, manifest.seed):
        big.load(shard.name, values)
    big.train_step(everything, 0)
    for shard in big.shards:
        if shard.expert is None:
            np.testing.assert_allclose(store.values(shard.name), big.read(shard.name), atol=1e-6, err_msg=shard.name)


def test_a_newcomer_takes_part_and_a_killed_node_stops_nobody(swarm: LocalSwarm, tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        {
            "round.total": 0,
            "round.start_nodes": 4,
            "model.num_experts": 8,
            "round.local_steps": 40,
            "round.lease_seconds": 4,
            "round.margin_seconds": 8,
        },
    )
    swarm.start_rendezvous(run_file)
    nodes = [swarm.start_node(f"node-{number}") for number in range(4)]
    until(lambda: last_round(nodes[0]) >= 1, "the first round")

    # a fifth node joins in the middle: it fetches the state, gets experts and contributes
    fifth = swarm.start_node("fifth")
    until(lambda: history(fifth), "the newcomer's first state")
    me = node_id(fifth)
    until(lambda: any(me in commit.shares for commit in commits(fifth)), "the newcomer's first contribution")
    first = next(commit for commit in commits(fifth) if me in commit.shares)
    assert first.owners[me], "the newcomer owns an expert"

    # one is killed while it owns experts
    victim = nodes[1]
    victim_id, orphans = node_id(victim), descendants(victim)
    assert len(orphans) == 2, "p2pd and the trainer"
    before = last_round(nodes[0])
    killed = time.monotonic()
    victim.process.kill()
    victim.process.wait()
    _, alive = psutil.wait_procs(orphans, timeout=5)
    assert not alive, f"left behind: {alive}"
    survivors = [nodes[0], nodes[2], nodes[3], fifth]
    until(lambda: last_round(nodes[0]) >= before + 4, "four rounds after the kill")
    assert time.monotonic() - killed < 60
    without = next(c.round for c in commits(nodes[0]) if c.round > before and victim_id not in c.shares)
    after = [commit for commit in commits(nodes[0]) if without <= commit.round <= without + 2]
    assert any(commit.experts_covered == frozenset(range(8)) and victim_id not in commit.owners for commit in after)

    # all survivors tell the same story, and I3: a shard that nobody contributed keeps its bits
    common = min(map(last_round, survivors))
    stories = [{line["round"]: line["digest"] for line in history(box)} for box in survivors]
    for number in range(first.round, common + 1):
        assert len({story[number] for story in stories if number in story}) == 1, f"round {number}"
    chain = commits(nodes[0])
    for earlier, commit in pairwise(chain):
        for name, shard in commit.shards.items():
            expert = expert_of(name)
            owned = expert is None or any(expert in commit.owners[node] for node in commit.shares)
            if not owned:
                assert shard == earlier.shards[name], f"round {commit.round}: {name} changed without its owner"

    # SIGTERM and SIGINT leave cleanly, and the others do not wait
    for box, number in ((nodes[2], signal.SIGTERM), (fifth, signal.SIGINT)):
        children = descendants(box)
        box.process.send_signal(number)
        assert box.process.wait(timeout=20) == 0, box.log.read_text()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"left behind: {alive}"
    at = last_round(nodes[0])
    until(lambda: last_round(nodes[0]) >= at + 2, "two rounds after two nodes left", 30)

    report = json.loads(spes("status", "--peers", swarm.address, "--json").stdout)
    present = {node["name"] for node in report["nodes"] if node["state"] != "left"}
    assert present == {"rendezvous", "node-0", "node-3"}
    assert report["experts_covered"] == report["experts"] == 8
    assert report["round"] >= at and report["loss"] > 0
    assert "node-3" in spes("status", "--peers", swarm.address).stdout


def test_a_run_goes_on_from_the_disks(swarm: LocalSwarm, tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path, {"round.total": 0, "round.start_nodes": 2, "round.local_steps": 10, "round.lease_seconds": 4}
    )
    swarm.start_rendezvous(run_file)
    nodes = [swarm.start_node(f"node-{number}") for number in range(2)]
    until(lambda: last_round(nodes[0]) >= 2, "two rounds")
    swarm.stop()
    reached = max(disk_state(box)[0] for box in nodes)
    swarm.nodes.clear()

    swarm.start_rendezvous(run_file)
    again = [swarm.start_node(f"node-{number}") for number in range(2)]
    until(lambda: last_round(again[0]) >= reached + 2, "two more rounds")
    swarm.stop()
    chain = commits(again[0])
    assert [commit.round for commit in chain] == sorted({commit.round for commit in chain})
    for earlier, commit in pairwise(chain):
        if commit.round == earlier.round + 1:
            assert commit.tokens >= earlier.tokens
            assert commit.ledger.cursor >= earlier.ledger.cursor


def test_blocks_are_used_once(swarm: LocalSwarm, tmp_path: Path) -> None:
    swarm.start_rendezvous(write_run(tmp_path, {"round.total": 4, "round.start_nodes": 2, "round.local_steps": 3}))
    nodes = [swarm.start_node(f"node-{number}") for number in range(2)]
    for box in nodes:
        assert box.process.wait(timeout=WAIT_SECONDS) == 0, box.log.read_text()
    manifest, _ = open_store(nodes[0].home)
    last = commits(nodes[0])[-1]
    trained = last.tokens // manifest.data.block_tokens
    reserved = sum(map(blocks.count, last.ledger.reserved.values()))
    assert trained + blocks.count(last.ledger.returned) + reserved == last.ledger.cursor


def test_an_exported_checkpoint_is_the_nodes_model(swarm: LocalSwarm, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    swarm.start_rendezvous(write_run(tmp_path, {"round.total": 2, "round.start_nodes": 1}))
    node = swarm.start_node("alone")
    assert node.process.wait(timeout=WAIT_SECONDS) == 0, node.log.read_text()
    folder = tmp_path / "checkpoint"
    spes("export", "--home", str(node.home), "-o", str(folder))

    manifest, store = open_store(node.home)
    engine = Engine(manifest.model, manifest.loss, manifest.optimizer)
    for shard in engine.shards:
        engine.load(shard.name, store.values(shard.name))
    tokens = torch.from_numpy(load_corpus(manifest.data, manifest.seed, []).blocks(range(4)))[:, :-1]
    with torch.no_grad():
        ours = engine.model(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_stalled_node_is_left_out_and_comes_back(swarm: LocalSwarm, tmp_path: Path) -> None:
    run_file = write_run(
        tmp_path,
        {
            "round.total": 0,
            "round.start_nodes": 3,
            "round.local_steps": 10,
            "round.lease_seconds": 4,
            "round.margin_seconds": 8,
        },
    )
    swarm.start_rendezvous(run_file)
    nodes = [swarm.start_node(f"node-{number}") for number in range(3)]
    until(lambda: last_round(nodes[0]) >= 1, "the first round")
    stalled = nodes[2]
    processes = [psutil.Process(stalled.process.pid), *descendants(stalled)]
    for process in processes:
        process.suspend()
    try:
        at = last_round(nodes[0])
        until(lambda: last_round(nodes[0]) >= at + 3, "three rounds without the stalled node")
    finally:
        for process in processes:
            process.resume()
    me = node_id(stalled)
    back = last_round(nodes[0])
    until(
        lambda: any(me in commit.shares for commit in commits(nodes[0]) if commit.round > back),
        "a contribution of the node that came back",
    )
    # A node that was away skips the rounds it fetches the end of; what both have seen is the same.
    seen = {line["round"]: line["digest"] for line in history(nodes[0])}
    both = [line for line in history(stalled) if line["round"] in seen]
    assert both[-1]["round"] > at
    assert all(seen[line["round"]] == line["digest"] for line in both)


def node_id(box: Box) -> str:
    """The node id that a daemon printed on its first line."""
    match = re.search(r"\((Qm\w+)\)", box.log.read_text())
    assert match is not None, box.log.read_text()
    return match[1]


def spes(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line; fails with its output when it fails."""
    run = subprocess.run(
        [sys.executable, "-m", "node", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert run.returncode == 0, run.stderr
    return run
