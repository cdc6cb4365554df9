"""A network that falls into two halves: both go on, and when it is whole again one chain is everybody's."""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.run_file import change_settings, write_preset
from node.lab.lab import Lab, unavailable
from node.local_swarm import Box, LocalSwarm, Place
from node.stores import open_store
from swarm.replica import weight
from swarm.store import read_commit

REASON = unavailable()
pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600), pytest.mark.skipif(bool(REASON), reason=REASON)]

RUN = {
    "total": 0,
    "start_nodes": 4,
    "local_steps": 1500,
    "train_seconds": 8,
    "margin_seconds": 8,
    "lease_seconds": 4,
}
"""More steps than fit into a round: it lasts `train_seconds` and a little more, whatever the machine. A lost peer is
dialled every 15 s at least, so that the halves find each other within two rounds."""
APART_ROUNDS = 3
"""Rounds that each half commits on its own."""
TOGETHER_ROUNDS = 3
"""Rounds of the winning chain within which everybody is on it again."""
STATUS_SECONDS = 150
"""On a machine that is as busy as it gets, the imports of a command alone take some 20 s."""
Line = dict[str, Any]
"""Of a history, see `swarm.history.RoundLine`."""


def write_run(folder: Path) -> Path:
    """The tiny-test preset with the settings of RUN; returns the run file."""
    path = folder / "run.toml"
    write_preset("tiny-test", path)
    change_settings(path, {f"round.{key}": value for key, value in RUN.items()})
    return path


def history(box: Box) -> list[Line]:
    """The commits that a daemon has adopted, in this order."""
    return [
        json.loads(line) for path in box.home.glob("runs/*/history.jsonl") for line in path.read_text().splitlines()
    ]


def last_round(box: Box) -> int:
    """Round of the last of them; 0 before the first."""
    return int(history(box)[-1]["round"]) if history(box) else 0


def of_everybody(boxes: Iterable[Box], since: int) -> list[Line]:
    """The commits from round `since` on that all of these daemons have adopted."""
    adopted = [{line["commit"]: line for line in history(box) if line["round"] >= since} for box in boxes]
    common = set.intersection(*map(set, adopted))
    return sorted((line for digest, line in adopted[0].items() if digest in common), key=lambda line: line["round"])


def ancestors(box: Box, line: Line) -> set[str]:
    """The chain of commits that leads to one, itself included, as far as this daemon has it."""
    _, store = open_store(box.home)
    chain, digest, number = set(), line["commit"], line["round"]
    while (commit := read_commit(store.folder, store.run_id, number)) is not None and commit.digest == digest:
        chain.add(digest)
        digest, number = commit.document.parent, number - 1
    return chain


def until(condition: Callable[[], Any], what: str, seconds: float) -> None:
    """Wait until a condition holds; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)


def status(lab: Lab, host: int, peers: str) -> dict[str, Any]:
    """What `spes-node status` says in a host."""
    command = [sys.executable, "-m", "node", "status", "--peers", peers, "--json"]
    process = lab.exec(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=STATUS_SECONDS)
    assert process.returncode == 0, errors
    report: dict[str, Any] = json.loads(output)
    return report


def addresses(report: dict[str, Any]) -> dict[str, str]:
    """Where each node of a status report listens."""
    return {node["name"]: node["addresses"][0] for node in report["nodes"]}


def test_both_halves_go_on_and_one_chain_wins(tmp_path: Path) -> None:
    with Lab(5, delay_ms=5, rate_mbit=100) as lab, LocalSwarm(tmp_path) as swarm:
        places = {host: Place(lab.address(host), functools.partial(lab.exec, host)) for host in lab.hosts}
        swarm.start_rendezvous(write_run(tmp_path), place=places[5])
        nodes = [swarm.start_node(f"node-{host}", place=places[host]) for host in range(1, 5)]
        assert swarm.rendezvous is not None
        halves = [nodes[:2], [*nodes[2:], swarm.rendezvous]]
        everybody = [box for half in halves for box in half]
        until(lambda: any(line["nodes"] == 4 for line in history(nodes[0])), "a round of all four", 120)
        where = addresses(status(lab, 1, swarm.address))
        assert where.keys() == {box.name for box in everybody}

        # two halves, each a swarm of its own
        fork = max(map(last_round, everybody)) + 1  # the round in progress may still be everybody's
        lab.split([[1, 2], [3, 4, 5]])
        until(lambda: min(map(last_round, everybody)) >= fork + APART_ROUNDS, "rounds apart", 180)
        apart = [of_everybody(half, fork + 1) for half in halves]
        assert not {line["commit"] for line in apart[0]} & {line["commit"] for line in apart[1]}
        assert not {line["digest"] for line in apart[0]} & {line["digest"] for line in apart[1]}
        for half, lines, host in zip(halves, apart, (1, 5), strict=True):
            assert len(lines) >= APART_ROUNDS
            assert all(line["nodes"] <= 2 for line in lines)
            assert any(line["covered"] == line["experts"] for line in lines), "orphaned experts have new owners"
            report = status(lab, host, where[half[0].name])
            assert addresses(report).keys() == {box.name for box in half}
            assert report["state"] in {line["digest"] for line in history(half[0])}

        # one network again, and one chain
        lab.join()
        parted = [history(half[0])[-1] for half in halves]
        until(lambda: of_everybody(everybody, fork + 1), "a commit that everybody has", 120)
        first = of_everybody(everybody, fork + 1)[0]
        won = [ahead["commit"] in ancestors(half[0], first) for half, ahead in zip(halves, parted, strict=True)]
        assert sorted(won) == [False, True], "the chain of one half goes on"
        winner = parted[won.index(True)]
        assert first["round"] <= winner["round"] + TOGETHER_ROUNDS

        # all four train on it, and hold the same bits
        until(lambda: any(line["nodes"] == 4 for line in of_everybody(everybody, first["round"])), "all four", 120)
        for box in everybody:
            weights = [weight(line["tokens"], line["round"], line["commit"]) for line in history(box)]
            assert weights == sorted(set(weights)), f"{box.name} has moved to a chain with fewer tokens"
        told = [{line["round"]: line["digest"] for line in history(box)} for box in everybody]
        last = max(set.intersection(*map(set, told)))
        for number in range(first["round"], last + 1):
            assert len({digests[number] for digests in told if number in digests}) == 1, f"round {number}"
        until(lambda: is_whole(status(lab, 3, swarm.address), everybody), "everybody in sync", 120)


def is_whole(report: dict[str, Any], everybody: Collection[Box]) -> bool:
    """Whether every daemon is in a status report, with the state of the last commit."""
    synchronised = {node["name"] for node in report["nodes"] if node["in_sync"]}
    return synchronised == {box.name for box in everybody}
