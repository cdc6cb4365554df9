"""The tally of a round: who has handed in and is believed, what is averaged, whom to wait for, and when it is over."""

import asyncio
from pathlib import Path

import pytest

from swarm.documents import Commit, Contribution, Encoded, Plan, Result, ShardState, Share, Signed, digest_of
from swarm.identity import Identity
from swarm.tally import Tally
from tests import examples
from tests.examples import NODES, ROUND
from tests.nodes import Node

VALUES = {"embed": b"four", "layer.0.expert.0": b"eight...", "layer.0.expert.1": b"also 8.."}
NEW = {name: data[::-1] for name, data in VALUES.items()}
STEP_BLOCKS = ROUND.batch_blocks


class Seat:
    """One of three members of a round; the other two have ids only."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self.node = Node(identity, folder, VALUES, examples.manifest())
        self.me, self.ben, self.cat = self.node.me, *NODES[1:3]
        roster = {node: examples.record() for node in (self.me, self.ben, self.cat)}
        plan = examples.planned(roster, self.node.head.document, self.node.context.manifest)
        owners = {self.me: (), self.ben: (0,), self.cat: (1,)}
        document: Plan = plan.model_copy(update={"parent": self.node.head.digest, "owners": owners})
        self.plan = examples.posted(document)
        self.tally = Tally(self.node.context, self.plan, self.node.head.document)

    def owned(self, node: str) -> dict[str, Encoded]:
        names = ["embed", *(f"layer.0.expert.{expert}" for expert in self.plan.document.owners.get(node, ()))]
        return {name: Encoded(digest=examples.digest(f"{name} of {node}"), size=4) for name in names}

    def hand_in(self, node: str, **fields: object) -> Signed[Contribution]:
        block_tokens = self.node.context.manifest.data.block_tokens
        honest = {
            "plan": self.plan.digest,
            "steps": 1,
            "used_blocks": STEP_BLOCKS,
            "tokens": STEP_BLOCKS * block_tokens,
            "shards": self.owned(node),
        }
        signed = examples.posted(examples.contribution(node, **{**honest, **fields}))
        assert self.node.board.post(signed) == ""
        return signed

    def hand_in_all(self) -> None:
        for node in (self.me, self.ben, self.cat):
            self.hand_in(node)

    def result(self, name: str, maker: str) -> Result:
        return examples.result(name, maker).model_copy(update={"values": digest_of(NEW[name])})

    def announce(self, node: str, *names: str, **results: Result) -> None:
        made = {**{name: self.result(name, node) for name in names}, **results}
        document = examples.reduction(node, plan=self.plan.digest, results=made)
        assert self.node.board.post(examples.posted(document)) == ""

    def hold(self, *names: str) -> None:
        for name in names:
            self.node.store.put(NEW[name])


@pytest.fixture
def seat(identities: list[Identity], tmp_path: Path) -> Seat:
    return Seat(identities[0], tmp_path / "store")


# contributions


def test_only_offers_of_members_for_this_plan_count(seat: Seat) -> None:
    mine = seat.hand_in(seat.me)
    seat.hand_in(NODES[4])
    seat.hand_in(seat.ben, plan=examples.digest("another plan"))
    assert seat.tally.offers() == {seat.me: mine}
    assert seat.tally.contributions() == {seat.me: mine.document}


def test_whoever_claims_too_much_is_named_once_and_not_waited_for(seat: Seat, caplog: pytest.LogCaptureFixture) -> None:
    seat.hand_in(seat.me)
    seat.hand_in(seat.ben, tokens=10**9)
    for _ in range(3):
        assert seat.tally.contributions().keys() == {seat.me}
    assert [seat.ben[-6:] in record.getMessage() for record in caplog.records] == [True]
    assert "claims more" in seat.node.complaint
    assert seat.tally.awaited_contributors() == [seat.cat]


def test_a_better_offer_of_the_same_node_is_judged_anew(seat: Seat) -> None:
    seat.hand_in(seat.ben, tokens=10**9)
    assert seat.tally.contributions() == {}
    honest = seat.hand_in(seat.ben)
    assert seat.tally.contributions() == {seat.ben: honest.document}


def test_whoever_is_gone_is_not_waited_for(seat: Seat) -> None:
    assert sorted(seat.tally.awaited_contributors()) == sorted([seat.me, seat.ben, seat.cat])
    seat.node.board.lose(seat.cat)
    seat.hand_in(seat.me)
    assert seat.tally.awaited_contributors() == [seat.ben]


def test_half_is_half_of_those_who_are_still_there(seat: Seat) -> None:
    assert not seat.tally.half_handed_in()
    seat.hand_in(seat.me)
    assert not seat.tally.half_handed_in(), "one of three"
    seat.node.board.lose(seat.cat)
    assert seat.tally.half_handed_in(), "one of two"


def test_nobody_is_no_half(seat: Seat) -> None:
    for node in (seat.me, seat.ben, seat.cat):
        seat.node.board.lose(node)
    assert not seat.tally.half_handed_in()


# results


def test_what_only_a_lost_maker_has_must_be_averaged_again(seat: Seat) -> None:
    seat.announce(seat.ben, "embed", "layer.0.expert.0")
    assert seat.tally.announced() == {"embed", "layer.0.expert.0"}
    seat.hold("embed")
    seat.node.board.lose(seat.ben)
    assert seat.tally.announced() == {"embed"}


def test_values_of_another_size_are_no_result(seat: Seat) -> None:
    """The digest of an object that is here, but of another shard."""
    seat.hold("embed", "layer.0.expert.0")
    lie = seat.result("layer.0.expert.0", seat.ben)
    assert seat.tally.holds("layer.0.expert.0", lie) and not seat.tally.holds("embed", lie)
    seat.announce(seat.ben, embed=lie)
    assert seat.tally.resolved() == {}


def test_results_are_those_that_are_here_and_stay_what_they_were(seat: Seat) -> None:
    maker, other = (node for node in seat.tally.order["embed"] if node != seat.me)
    seat.announce(maker, "embed")
    assert seat.tally.resolved() == {}
    seat.hold("embed")
    assert seat.tally.resolved() == {}, "what it was made of is not known here: it could count again"
    seat.hand_in_all()
    assert seat.tally.resolved() == {"embed": (maker, seat.result("embed", maker))}
    for later in (other, seat.me):
        seat.announce(later, "embed")
        assert seat.tally.resolved()["embed"][0] == maker, "everybody may have it already"


def test_a_result_that_only_this_node_has_is_not_committed_yet(seat: Seat) -> None:
    seat.hand_in_all()
    seat.hold("embed")
    seat.announce(seat.me, "embed")
    assert seat.tally.resolved() == {}
    for node in (seat.ben, seat.cat):
        seat.node.board.lose(node)
    assert seat.tally.resolved() == {"embed": (seat.me, seat.result("embed", seat.me))}, "nobody else is there"


def test_an_average_of_changes_that_are_all_alike_is_with_everybody(seat: Seat) -> None:
    """Nobody fetches what he has handed in himself. Weights that no text touches change by weight decay alone."""
    result = seat.result("embed", seat.me)
    for node in (seat.me, seat.ben, seat.cat):
        seat.hand_in(node, shards={**seat.owned(node), "embed": result.encoded})
    seat.hold("embed")
    seat.announce(seat.me, "embed")
    assert seat.tally.resolved() == {"embed": (seat.me, result)}


def test_a_result_with_the_bytes_of_another_shards_is_with_whoever_made_that(seat: Seat) -> None:
    seat.hand_in_all()
    seat.hold("embed")
    seat.announce(seat.me, "embed")
    assert seat.tally.resolved() == {}
    seat.announce(seat.ben, head=seat.result("embed", seat.me))
    assert seat.tally.resolved() == {"embed": (seat.me, seat.result("embed", seat.me))}


def test_results_of_strangers_are_none(seat: Seat) -> None:
    seat.hold("embed")
    seat.announce(NODES[4], "embed")
    assert seat.tally.announced() == set() and seat.tally.resolved() == {}
    seat.announce(seat.cat, "layer.0.expert.0")
    seat.hold("layer.0.expert.0")
    assert seat.tally.resolved() == {}, "it does not own that expert"


def test_the_reducers_that_are_waited_for_are_the_first_that_are_there(seat: Seat) -> None:
    names = list(VALUES)
    first = {name: seat.tally.order[name][0] for name in names}
    assert seat.tally.awaited_reducers(NODES[5]) == sorted(set(first.values()))
    assert seat.tally.awaited_reducers(first["embed"]) == sorted({*first.values()} - {first["embed"]})
    seat.node.board.lose(seat.ben)
    assert seat.ben not in seat.tally.awaited_reducers(NODES[5])
    for node in {seat.me, seat.cat}:
        seat.announce(node, *[name for name in names if node in seat.tally.order[name]])
    assert seat.tally.awaited_reducers(NODES[5]) == [], "who could average the last one is gone"


# the end


def test_a_round_is_complete_when_all_results_are_in(seat: Seat) -> None:
    seat.hand_in_all()
    seat.hold(*VALUES)
    seat.announce(seat.ben, "embed", "layer.0.expert.0")
    assert not seat.tally.is_complete(seat.tally.resolved())
    seat.announce(seat.cat, "layer.0.expert.1")
    assert seat.tally.resolved().keys() == VALUES.keys()
    assert seat.tally.is_complete(seat.tally.resolved())


def test_a_round_is_not_complete_while_somebody_may_hand_in(seat: Seat) -> None:
    seat.hand_in(seat.me)
    seat.hand_in(seat.ben)
    seat.hold(*VALUES)
    seat.announce(seat.ben, "embed", "layer.0.expert.0")
    assert not seat.tally.is_complete(seat.tally.resolved())
    seat.node.board.lose(seat.cat)
    assert seat.tally.is_complete(seat.tally.resolved()), "nobody has offered the last expert"


def test_a_shard_that_nobody_is_left_to_average_is_not_waited_for(seat: Seat) -> None:
    seat.hand_in_all()
    seat.hold("embed", "layer.0.expert.0")
    seat.announce(seat.ben, "embed", "layer.0.expert.0")
    assert not seat.tally.is_complete(seat.tally.resolved())
    seat.node.board.lose(seat.cat)
    assert seat.tally.is_complete(seat.tally.resolved()), "its only owner is gone"


def test_a_shard_that_was_offered_without_a_token_is_not_waited_for(seat: Seat) -> None:
    for node in (seat.me, seat.ben, seat.cat):
        seat.hand_in(node, tokens=0, steps=0, used_blocks=0)
    assert seat.tally.is_complete({})


def test_the_commit_of_the_round_is_the_boards(seat: Seat) -> None:

    async def found() -> Signed[Commit] | None:
        return seat.tally.commit()

    assert asyncio.run(found()) is None
    assert seat.node.board.post(seat.plan) == ""
    document = examples.commit(
        round=1,
        parent=seat.node.head.digest,
        plan=seat.plan.digest,
        leader=seat.ben,
        shards={**examples.states(VALUES), "embed": ShardState(version=1, digest=digest_of(b"new!"), size=4)},
        updates={"embed": examples.update(seat.ben)},
        shares={seat.ben: Share(tokens=1, steps=1)},
        tokens=1,
    )
    commit = examples.posted(document)
    seat.node.board.post(commit)
    assert asyncio.run(found()) == commit
