"""The board: waiting without polling, what is refused, and who is excused."""

import asyncio
import time
from typing import Any

import pytest

from swarm.board import MOVING_SECONDS, ROUNDS_AHEAD, Board
from swarm.documents import Contribution, Document, Leave, Plan, Reduction, Signed
from tests import examples

DIGEST = examples.digest("plan")
ALICE, BOB = examples.NODES[:2]


def signed(document: Document, signer: str = ALICE) -> Signed[Any]:
    return Signed(document, signer, DIGEST, b"")


def plan(number: int) -> Plan:
    return examples.plan(ALICE, round=number)


def reduction(*names: str, number: int = 1) -> Reduction:
    return examples.reduction(ALICE, round=number, results=dict.fromkeys(names, examples.result("new", ALICE)))


def contribution(node: str, number: int = 1) -> Contribution:
    return examples.contribution(node, round=number)


def leave(node: str, number: int) -> Leave:
    return Leave(run=examples.RUN, node=node, round=number)


def test_until_returns_what_appears_and_looks_at_every_change() -> None:
    looks = list[int]()

    async def scenario() -> None:
        board = Board()

        def ready() -> Signed[Plan] | None:
            looks.append(len(looks))
            return board.plans.get(1, {}).get(ALICE)

        waiting = asyncio.create_task(board.until(ready, 10.0))
        await asyncio.sleep(0)
        board.post(signed(contribution(BOB)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        posted = signed(plan(1))
        board.post(posted)
        assert await waiting is posted

    asyncio.run(scenario())
    assert len(looks) == 3


def test_until_gives_up_at_the_deadline_and_looks_a_last_time() -> None:
    async def scenario() -> None:
        board = Board()
        assert await board.until(lambda: board.plans.get(1), 0.01) is None
        assert await board.until(lambda: "at once", 0.0) == "at once"
        answers = iter([None, "late"])
        assert await board.until(lambda: next(answers), 0.01) == "late"

    asyncio.run(scenario())


def test_changed_wakes_everybody_at_once_and_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        board = Board()
        await board.changed(0.01)
        waiting = [asyncio.create_task(board.changed(60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        board.notify()
        async with asyncio.timeout(1.0):
            await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_rounds_outside_the_window_are_refused() -> None:
    board = Board()
    board.advance(5)
    accepted = {number: board.post(signed(plan(number))) == "" for number in range(4, 10)}
    assert accepted == {4: False, 5: False, 6: True, 7: True, 8: False, 9: False}
    assert board.plans.keys() == {6, 5 + ROUNDS_AHEAD}
    assert "round 9" in board.post(signed(contribution(ALICE, 9))) and not board.contributions


def test_advance_forgets_finished_rounds() -> None:
    board = Board()
    for number in (1, 2):
        board.post(signed(plan(number)))
        board.post(signed(contribution(ALICE, number)))
        board.post(signed(reduction("embed", number=number)))
    board.advance(1)
    assert (set(board.plans), set(board.contributions)) == ({2}, {(2, DIGEST)})
    assert board.reductions.keys() == {(2, DIGEST)}
    assert board.committed == 1


def test_a_smaller_reduction_never_replaces_a_larger_one() -> None:
    board = Board()

    def known() -> set[str]:
        return set(board.reductions[1, DIGEST][ALICE].document.results)

    board.post(signed(reduction("embed")))
    board.post(signed(reduction("embed", "head")))
    assert known() == {"embed", "head"}
    board.post(signed(reduction("embed")))
    assert known() == {"embed", "head"}


def test_documents_are_kept_by_signer() -> None:
    board = Board()
    board.post(signed(contribution(ALICE), ALICE))
    board.post(signed(contribution(BOB), BOB))
    board.post(signed(contribution(BOB), BOB))
    assert board.contributions[1, DIGEST].keys() == {ALICE, BOB}


def test_who_has_left_is_excused_until_it_could_be_back() -> None:
    board = Board()
    board.advance(3)
    assert not board.excused(BOB, 4)
    board.post(signed(leave(BOB, 3), BOB))
    assert board.excused(BOB, 4) and not board.excused(BOB, 5)
    board.post(signed(leave(BOB, 2), BOB))
    assert board.excused(BOB, 4), "an older goodbye that arrives late changes nothing"


def test_who_is_lost_is_excused_until_it_is_heard_of() -> None:
    board = Board()
    board.lose(BOB)
    assert board.excused(BOB, 1) and not board.excused(ALICE, 1)
    board.advance(1)
    assert board.excused(BOB, 2), "to find it lost costs time, once"
    board.hear(BOB)
    assert not board.excused(BOB, 2)
    board.lose(ALICE)
    board.post(signed(contribution(ALICE, 2)))
    assert not board.excused(ALICE, 2)


def test_a_record_that_goes_on_shows_that_a_lost_node_lives() -> None:
    board = Board()
    board.advance(5)
    board.lose(BOB)
    for number in (3, 5):
        board.see(BOB, number)
        assert board.excused(BOB, 6), "it may have told that before it died"
    board.see(BOB, 6)
    assert not board.excused(BOB, 6)
    board.advance(6)
    board.lose(BOB)
    board.see(BOB, 6)
    assert board.excused(BOB, 7), "it is lost anew"


def test_who_tells_of_newer_rounds_is_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = Board()
    assert not board.is_moving(BOB), "nothing is known of it"
    board.see(BOB, 3)
    assert board.is_moving(BOB)
    now += MOVING_SECONDS
    board.see(BOB, 3)
    assert not board.is_moving(BOB), "it tells the same again"
    board.see(BOB, 4)
    assert board.is_moving(BOB)
    board.lose(BOB)
    board.see(BOB, 4)
    assert not board.is_moving(BOB), "it told that before it was lost"
    board.see(BOB, 5)
    assert board.is_moving(BOB)


def test_who_has_just_come_is_moving_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = Board()
    board.see(BOB, 7)
    for _ in range(2):
        now += MOVING_SECONDS
        board.see(BOB, 4, arriving=True)  # it was started again from an older disk
        assert board.is_moving(BOB)
        now += MOVING_SECONDS
        board.see(BOB, 4, arriving=True)
        assert not board.is_moving(BOB), "it takes its time"
        board.see(BOB, 7)
        assert not board.is_moving(BOB)


def test_a_document_is_judged_once_until_the_head_moves() -> None:
    board, looks = Board(), list[str]()

    def judge() -> bool:
        looks.append("again")
        return False

    assert [board.verdict(DIGEST, judge) for _ in range(3)] == [False] * 3 and len(looks) == 1
    board.advance(1)
    assert not board.verdict(DIGEST, judge) and len(looks) == 2
