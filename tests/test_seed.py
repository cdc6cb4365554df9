"""A seed trains nothing, keeps what is committed, and is enough to go on from when everybody else is gone."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootstrap.run_file import change_settings, write_preset
from node.local_swarm import Box, LocalSwarm
from node.stores import open_store

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


def until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.1)


def rounds_of(box: Box) -> list[dict[str, Any]]:
    """The rounds that a daemon has written down."""
    return [
        json.loads(line) for path in box.home.glob("runs/*/history.jsonl") for line in path.read_text().splitlines()
    ]


def test_a_seed_outlives_the_others_and_a_newcomer_goes_on_from_it(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    write_preset("tiny-test", run_file)
    change_settings(run_file, {"round.total": 0, "round.start_nodes": 1})
    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(run_file)
        first = swarm.start_node("first")
        until(lambda: rounds_of(first), "the first round")
        seed = swarm.start_seed("seed")
        until(lambda: len(rounds_of(seed)) >= 2, "two rounds that the seed has followed")
        assert swarm.rendezvous is not None
        for box in (first, swarm.rendezvous):
            box.process.kill()
            box.process.wait()
        _, store = open_store(seed.home)
        assert store.head is not None and store.head.document.owners.keys() == store.head.document.shares.keys()
        kept = store.head.document

        newcomer = swarm.start_node("newcomer")  # the seed's address is all it knows
        until(lambda: rounds_of(newcomer) and rounds_of(newcomer)[-1]["round"] > kept.round, "a round after the seed's")
        followed = {line["round"]: line["digest"] for line in rounds_of(seed)}
        assert all(followed.get(line["round"], line["digest"]) == line["digest"] for line in rounds_of(newcomer))
        assert open_store(newcomer.home)[1].head is not None
