"""What a person sees in the terminal: aligned rows, a line to paste, and reasons only when they last."""

from dataclasses import replace

import pytest

from node.console import HEADER, LASTING_SECONDS, REASON_SECONDS, Console, describe_run, join_line, round_row
from swarm.history import RoundLine
from tests import examples
from tests.examples import ROUND

LINE = RoundLine(
    time=0.0,
    round=2,
    rounds=20,
    commit="ab" * 32,
    digest="cd" * 32,
    loss=5.25,
    heldout_loss=5.5,
    tokens=1000,
    tokens_per_second=12_345.6,
    nodes=3,
    missing=1,
    covered=7,
    experts=8,
    alpha=0.0,
    carried=0,
    utilisation=0.756,
    bytes_moved=2_500_000,
    seconds=12.4,
)


def columns(line: RoundLine) -> dict[str, str]:
    """The cells of a row by the words of the header above them."""
    row, cells, start = round_row(line), {}, 0
    for word in HEADER.split():
        stop = HEADER.index(word, start) + len(word)
        cells[word] = row[start:stop].strip() if word != "next" else row[start:].strip()
        start = stop
    return cells


def test_a_row_tells_the_round_under_its_words() -> None:
    assert columns(LINE) == {
        "round": "2/20",
        "loss": "5.250",
        "held-out": "5.500",
        "tokens/s": "12,346",
        "busy": "76%",
        "nodes": "3/4",
        "experts": "7/8",
        "moved": "2.5 MB",
        "next": "in 12 s",
    }


def test_what_is_not_known_is_a_dash() -> None:
    unknown = columns(replace(LINE, heldout_loss=None, seconds=0.0, utilisation=0.0))
    assert [unknown[word] for word in ("held-out", "tokens/s", "busy", "next")] == ["-"] * 4


def test_the_last_round_is_the_last_and_a_run_without_end_has_none() -> None:
    assert columns(replace(LINE, round=20))["next"] == "done"
    endless = columns(replace(LINE, round=20, rounds=0))
    assert (endless["round"], endless["next"]) == ("20", "in 12 s")


def test_the_header_stands_above_the_first_row_only(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for number in (1, 2):
        console.round(replace(LINE, round=number))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == HEADER and len(lines) == 3 and HEADER not in lines[1:]


def test_a_run_in_one_line() -> None:
    assert describe_run(examples.manifest()) == ("small: 2 layers, width 32, 4 experts, top-2; 3 rounds of 4 steps")
    endless = examples.manifest(round=ROUND.model_copy(update={"total": 0}), initial_state="ab" * 32)
    assert "rounds without end of 4 steps; begun with checkpoint abababababab" in describe_run(endless)


def test_the_line_to_paste_reaches_this_box_from_outside_if_it_can() -> None:
    here, there = "/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/203.0.113.5/tcp/1/p2p/Qm"
    assert join_line([here, there]) == f"spes-node join --peers {there}"
    assert join_line([here]) == f"spes-node join --peers {here}"


def test_a_reason_is_shown_when_it_lasts_and_not_at_every_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("node.console.time.monotonic", lambda: now)
    console = Console()

    def shown(state: str, reason: str, after: float) -> str:
        nonlocal now
        now += after
        console.state(state, reason)
        return capsys.readouterr().out.strip()

    assert shown("waiting", "for a", 0.0) == ""
    assert shown("waiting", "for a", LASTING_SECONDS + 0.1) == "for a"
    assert shown("waiting", "for a", REASON_SECONDS + 0.1) == "", "it was said"
    assert shown("waiting", "for b", 0.0) == "for b"
    assert shown("waiting", "for c", REASON_SECONDS - 0.1) == "", "a countdown is not shown at every second"
    assert shown("training", "round 2", REASON_SECONDS) == "", "what goes well needs no reason"
    assert shown("waiting", "for d", 0.0) == "", "it has only begun"
