"""What `status` tells of a swarm: from records and the last commit alone, true, and nothing that a peer slips in."""

import json

import pytest

from node.status import as_text, summarise
from swarm.documents import Commit, Share, Signed, canonical, digest_of
from swarm.manifest import Manifest, MergeSettings
from swarm.records import NodeRecord, View
from swarm.warmup import warmup
from tests import examples
from tests.examples import EXPERTS, NODES, RUN

ANN, BEN, CAT = NODES[:3]
LAST = examples.head(2, loss=5.25, heldout_loss=5.5, busy=0.75, shares={ANN: Share(tokens=100, steps=4)})


def signed(commit: Commit) -> Signed[Commit]:
    return Signed(commit, ANN, digest_of(canonical(commit)), b"")


COMMIT = signed(LAST)


def manifest(**fields: object) -> Signed[Manifest]:
    return Signed(examples.manifest(**fields), NODES[0], RUN, b"")


def view(**records: NodeRecord) -> View:
    named = dict(zip(("ann", "ben", "cat"), NODES, strict=False))
    return View({named[name]: record for name, record in records.items()})


def text(seen: View, commit: Signed[Commit] | None = COMMIT) -> str:
    return as_text(summarise(manifest(), seen, commit))


def test_the_summary_is_what_records_and_the_commit_say() -> None:
    ann = examples.record(
        name="ann",
        experts=(0, 2),
        round=2,
        digest=LAST.state,
        utilisation=0.9,
        uplink=1 << 20,
        trained_tokens=100,
        sent=5,
        received=7,
    )
    seen = view(ann=ann, ben=examples.record(name="ben", experts=(2,), round=1, digest="old"))
    summary = summarise(manifest(), seen, COMMIT)
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["round"], summary["loss"], summary["heldout_loss"]) == (2, 5.25, 5.5)
    assert (summary["utilisation"], summary["tokens"], summary["state"]) == (0.75, 1000, LAST.state)
    assert (summary["experts"], summary["experts_covered"]) == (EXPERTS, 2)
    assert summary["leases"] == {"0": [ANN], "2": sorted([ANN, BEN])}
    first, second = summary["nodes"]
    assert (first["id"], first["experts"], first["in_sync"]) == (ANN, [0, 2], True)
    assert (first["utilisation"], first["uplink"], first["sent"], first["received"]) == (0.9, 1 << 20, 5, 7)
    assert (second["id"], second["in_sync"]) == (BEN, False)


def test_a_swarm_that_has_not_begun_has_no_loss() -> None:
    for commit in (None, signed(examples.head(0))):
        summary = summarise(manifest(), view(), commit)
        assert summary["loss"] is None and summary["heldout_loss"] is None
        assert "loss -" in as_text(summary) and "no node is there" in as_text(summary)


def test_experts_that_nobody_holds_are_named() -> None:
    ann, ben = examples.record(experts=(0, 1)), examples.record(experts=(2, 3))
    assert "no node holds expert" not in text(view(ann=ann, ben=ben))
    assert "no node holds expert 0, 1: join with another box" in text(view(ann=examples.record(), ben=ben))
    left = examples.record(experts=(0, 1), state="left")
    assert "no node holds expert 0, 1" in text(view(ann=left, ben=ben)), "whoever has left holds nothing"
    assert "the run is complete" in text(view(ann=ann, ben=ben), signed(examples.head(3)))


def test_a_node_that_did_wrong_is_named_by_whoever_saw_it() -> None:
    seen = view(ann=examples.record(name="ann", complaint="...xyz: it sent wrong bytes"), ben=examples.record())
    (line,) = [line for line in text(seen).splitlines() if "says of" in line]
    assert "peer-misbehaves" in line and "ann says of ...xyz: it sent wrong bytes: " in line
    assert "says of" not in text(view(ann=examples.record()))


def test_utilisation_that_is_not_known_is_no_zero() -> None:
    def row(share: float) -> str:
        (line,) = [
            line
            for line in text(view(ann=examples.record(name="ann", utilisation=share))).splitlines()
            if line.startswith("ann")
        ]
        return line

    assert " 87% " in row(0.87) and "%" not in row(0.0)


@pytest.mark.parametrize("field", ["name", "complaint"])
def test_control_characters_of_a_peer_do_not_reach_the_terminal(field: str) -> None:
    shown, plain = (text(view(ann=examples.record(**{field: value}))) for value in ("\x1b[2Jann\r\n" + "a" * 60, "ann"))
    assert "ann" in shown and not {"\x1b", "\r"} & set(shown)
    assert shown.count("\n") == plain.count("\n")


def test_the_warm_up_is_told_while_the_run_has_one() -> None:
    merge = MergeSettings(alpha=0.1, every_steps=8, first_steps=32)
    run = manifest(merge=merge, round=examples.ROUND.model_copy(update={"total": 0}))

    def told(run: Signed[Manifest], number: int) -> str:
        stage = warmup(run.document, number)
        summary = summarise(run, view(), COMMIT, stage)
        assert summary["warmup"] == warmup(run.document, max(number, LAST.round)).model_dump()
        return as_text(summary)

    assert "merging warm-up: experts are merged before round 5, alpha 0.05" in told(run, 3)
    assert "the merging warm-up is over" in told(run, 8)
    assert "before round 3, alpha 0.075" in told(run, 0), "the commit is that of round 2, whatever is kept"
    assert "merg" not in as_text(summarise(run, view(), COMMIT))
