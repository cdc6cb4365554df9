"""What an observer makes of the views and commits that it is given: who is there, who was, and what happened."""

import json
from pathlib import Path

from node.observer import FORGET_SECONDS, Observer
from node.snapshot import as_json
from swarm.documents import Commit, ShardState, Share, Signed, canonical, digest_of
from swarm.history import RoundLine, read_lines, round_line
from swarm.identity import short
from swarm.records import NodeRecord, View
from tests import examples
from tests.examples import NODES, RUN, SHARDS

ANN, BEN, CAT = NODES[:3]
LEASE = examples.ROUND.lease_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def signed(commit: Commit) -> Signed[Commit]:
    return Signed(commit, ANN, digest_of(canonical(commit)), b"")


def observer(clock: Clock, rounds: list[RoundLine] | None = None) -> Observer:
    return Observer(Signed(examples.manifest(), ANN, RUN, b""), me=ANN, rounds=rounds or (), clock=clock)


def view(clock: Clock, **records: NodeRecord) -> View:
    """Records that were renewed a moment ago."""
    named = {{"ann": ANN, "ben": BEN, "cat": CAT}[name]: record for name, record in records.items()}
    return View(named, {node: clock.now + LEASE for node in named if node != ANN})


def told(seen: Observer) -> list[str]:
    return [event.text for event in seen.snapshot().events]


def states(seen: Observer) -> dict[str, str]:
    return {node["name"]: node["state"] for node in as_json(seen.snapshot())["nodes"]}


def test_a_node_whose_record_ends_is_lost_and_what_it_held_is_said() -> None:
    clock = Clock()
    seen = observer(clock)
    ann, ben = examples.record(name="ann", experts=(0, 1)), examples.record(name="ben", experts=(2, 3), round=7)
    seen.see(view(clock, ann=ann, ben=ben))
    assert seen.snapshot().holders() == {0: [ANN], 1: [ANN], 2: [BEN], 3: [BEN]}
    clock.now += LEASE
    seen.see(view(clock, ann=ann))
    (node,) = [node for node in as_json(seen.snapshot())["nodes"] if node["name"] == "ben"]
    assert (node["state"], node["seen"]) == ("lost", clock.now - LEASE)
    assert node["reason"] == "not heard of any more, last in round 7; it held experts 2, 3"
    assert told(seen) == ["ben is not heard of any more with experts 2, 3"]
    assert seen.snapshot().holders() == {0: [ANN], 1: [ANN]}, "a lease ends with its record"
    seen.see(view(clock, ann=ann, ben=ben))
    assert states(seen)["ben"] == "waiting" and told(seen)[-1] == "ben is back"


def test_a_node_that_has_left_is_not_lost() -> None:
    clock = Clock()
    seen = observer(clock)
    seen.see(view(clock, ann=examples.record(name="ann"), ben=examples.record(name="ben")))
    seen.see(view(clock, ann=examples.record(name="ann"), ben=examples.record(name="ben", state="left")))
    clock.now += LEASE
    seen.see(view(clock, ann=examples.record(name="ann")))
    assert states(seen)["ben"] == "left" and told(seen) == ["ben has left the swarm"]
    clock.now += FORGET_SECONDS + 1
    seen.see(view(clock, ann=examples.record(name="ann")))
    assert "ben" not in states(seen)


def test_who_comes_and_what_changes_is_told_and_what_was_there_before_is_not() -> None:
    clock = Clock()
    seen = observer(clock)
    seen.see(view(clock, ann=examples.record(name="ann", experts=(0,))))
    assert told(seen) == []
    ben = examples.record(name="ben")
    seen.see(view(clock, ann=examples.record(name="ann", experts=(0,)), ben=ben))
    ben = ben.model_copy(update={"experts": (1, 2), "complaint": "...abc: it sent wrong bytes"})
    seen.see(view(clock, ann=examples.record(name="ann", experts=(0,)), ben=ben))
    seen.see(view(clock, ann=examples.record(name="ann", experts=(0,)), ben=ben))
    assert told(seen) == ["ben has joined", "ben says of ...abc: it sent wrong bytes", "ben now trains experts 1, 2"]


def test_a_commit_tells_who_was_missing_and_what_was_carried() -> None:
    clock = Clock()
    seen = observer(clock)
    seen.see(view(clock, ann=examples.record(name="ann"), ben=examples.record(name="ben")))
    seen.adopt(signed(examples.head(1)))
    shards = {name: ShardState(version=2 if "expert.3" not in name else 1, digest=RUN, size=8) for name in SHARDS}
    seen.adopt(signed(examples.head(2, missing=(BEN, CAT), shards=shards)))
    assert told(seen) == [
        f"round 2 ended without ben, {short(CAT)}",
        "round 2 left 2 shards as they were: layer.0.expert.3, layer.1.expert.3",
    ]
    assert as_json(seen.snapshot())["expert_rounds"] == {"0": 2, "1": 2, "2": 2, "3": 1}


def test_phases_follow_one_another_and_a_new_reason_is_no_new_phase() -> None:
    clock = Clock()
    seen = observer(clock)
    for state, reason in (("training", "a"), ("averaging", "b"), ("averaging", "c")):
        clock.now += 1
        seen.tell(state, reason)  # type: ignore[arg-type]
    phases = seen.snapshot().phases
    assert [(phase.state, phase.reason, phase.since) for phase in phases] == [
        ("training", "a", 1001.0),
        ("averaging", "c", 1002.0),
    ]


def test_a_snapshot_does_not_change_any_more_and_is_plain_data() -> None:
    clock = Clock()
    rounds = list[RoundLine]()
    seen = observer(clock, rounds)
    seen.see(view(clock, ann=examples.record(name="ann")))
    seen.adopt(signed(examples.head(1)))
    before = seen.snapshot()
    data = as_json(before)
    assert json.loads(json.dumps(data)) == data
    seen.see(view(clock, ann=examples.record(name="ann", experts=(1,)), ben=examples.record(name="ben")))
    seen.adopt(signed(examples.head(2)))
    seen.tell("training", "now")
    assert as_json(before) == data and seen.snapshot().version > before.version


def test_the_time_that_is_left_follows_from_the_last_rounds() -> None:
    commit, run = signed(examples.head(1, shares={ANN: Share(tokens=100, steps=4)})), examples.manifest()
    lines = [round_line(commit, run, now=1.0, seconds=seconds, bytes_moved=0) for seconds in (30.0, 10.0, 12.0)]
    seen = observer(Clock(), lines)
    assert seen.snapshot().eta_seconds is None, "before the first commit nothing is known"
    seen.adopt(commit)
    assert seen.snapshot().eta_seconds == (run.round.total - 1) * 12.0
    assert lines[0].tokens_per_second == 100 / 30


def test_lines_of_rounds_are_read_again_but_for_what_a_crash_has_cut_off(tmp_path: Path) -> None:
    line = round_line(signed(examples.head(1)), examples.manifest(), now=1.0, seconds=2.0, bytes_moved=3)
    text = json.dumps({name: getattr(line, name) for name in RoundLine.__slots__})
    path = tmp_path / "history.jsonl"
    path.write_text(f'{text}\n{{"round": 1}}\n{text}\n{text[:40]}')
    assert [*read_lines(path)] == [line, line]
    assert [*read_lines(tmp_path / "none")] == []
