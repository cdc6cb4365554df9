"""What a snapshot shows to be wrong, and that nothing is said of what is not."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.health import examine
from node.snapshot import Phase, Sighting, Snapshot
from swarm.documents import Commit, Signed
from swarm.history import round_line
from swarm.release import VERSION
from tests import examples
from tests.examples import EXPERTS, NODES, RUN

ANN, BEN = NODES[:2]
EVERYTHING = tuple(range(EXPERTS))


def signed(commit: Commit) -> Signed[Commit]:
    return Signed(commit, ANN, RUN, b"")


def sighting(lost: bool = False, **fields: Any) -> Sighting:
    return Sighting(record=examples.record(**{"version": VERSION, "round": 2, **fields}), seen=100.0, lost=lost)


def healthy() -> Snapshot:
    """Two nodes of which one holds all experts, four seconds after round 2, which took ten."""
    commit = signed(examples.head(2, choices=((4, 4, 4, 4), (2, 2, 6, 6))))
    return Snapshot(
        version=1,
        time=104.0,
        manifest=Signed(examples.manifest(), ANN, RUN, b""),
        me=ANN,
        nodes={ANN: sighting(name="ann", experts=EVERYTHING), BEN: sighting(name="ben")},
        commit=commit,
        warmup=None,
        rounds=(round_line(commit, examples.manifest(), now=100.0, seconds=10.0, bytes_moved=0),),
        phases=(Phase(state="training", reason="round 3: up to 4 steps", since=101.0),),
        events=(),
    )


def troubles(snapshot: Snapshot) -> dict[str, str]:
    return {trouble.code: trouble.text for trouble in examine(snapshot)}


def with_node(node: str, **fields: Any) -> Snapshot:
    return replace(healthy(), nodes={**healthy().nodes, node: sighting(**fields)})


def test_of_a_healthy_run_nothing_is_said() -> None:
    assert troubles(healthy()) == {}


@pytest.mark.parametrize(
    ("snapshot", "code", "text"),
    [
        (with_node(ANN, experts=(0, 2)), "experts-uncovered", "no node holds expert 1, 3"),
        (with_node(ANN, experts=EVERYTHING, lost=True), "experts-uncovered", "no node holds expert 0, 1, 2, 3"),
        (replace(healthy(), time=100 + 4 * 10 + 6), "round-stalled", "46 s ago, usually one takes 10 s"),
        (with_node(BEN, name="ben", round=5), "node-behind", "holds round 2, others hold 5"),
        (with_node(BEN, name="ben", lost=True), "nodes-lost", "1 not heard of any more: ben"),
        (with_node(BEN, name="ben", version="0.0.1"), "versions-differ", f"version {VERSION} here, 0.0.1 elsewhere"),
        (with_node(BEN, name="ben", complaint="...xyz: it lied"), "peer-misbehaves", "ben says of ...xyz: it lied"),
        (
            replace(healthy(), commit=signed(examples.head(2, choices=((4, 4, 4, 4), (8, 8, 0, 0))))),
            "experts-dead",
            "2 experts get almost no tokens: 2 of layer 1, 3 of layer 1",
        ),
    ],
)
def test_what_is_wrong_is_said(snapshot: Snapshot, code: str, text: str) -> None:
    found = troubles(snapshot)
    assert text in found[code]


def test_the_limits_are_not_crossed_early() -> None:
    assert troubles(replace(healthy(), time=100 + 4 * 10 + 4)) == {}
    assert troubles(with_node(BEN, name="ben", round=4)) == {}
    assert troubles(with_node(BEN, name="ben", state="left", round=9, version="0.0.1")) == {}


def test_a_run_that_is_complete_needs_nobody() -> None:
    done = replace(healthy(), commit=signed(examples.head(3)), time=1e6)
    assert troubles(replace(done, nodes={ANN: sighting(state="left"), BEN: sighting(lost=True)})) == {}


def test_every_code_is_explained() -> None:
    root = Path(__file__).parent.parent
    codes = set(re.findall(r'Trouble\("([\w-]+)"', (root / "node" / "health.py").read_text()))
    table = re.findall(r"^\| `([\w-]+)` \| (warning|error) \|", (root / "docs" / "health.md").read_text(), re.MULTILINE)
    assert {code for code, _ in table} == codes and len(table) == len(codes)
