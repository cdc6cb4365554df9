"""The view of a swarm: put together from many looks, none of which may take anybody away who is there."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop
from hivemind.utils import get_dht_time

from swarm.documents import Signed, canonical
from swarm.identity import NodeId
from swarm.membership import RECORDS_PER_SECOND, Lookout, Membership
from swarm.network import Network, Stored
from swarm.records import BUCKETS, NodeRecord, record_key, record_keys
from swarm.validator import MAX_RECORD_BYTES
from tests import examples
from tests.examples import NODES, RUN

ANN, BEN, CAT = NODES[:3]


class Dht:
    """What looks find, one after the other, and which of them were thorough."""

    def __init__(self, *looks: Mapping[NodeId, Stored]) -> None:
        self._looks: Iterator[Mapping[NodeId, Stored]] = iter(looks)
        self._last: Mapping[NodeId, Stored] = {}
        self.thorough: list[bool] = []
        self.node_id = ANN
        self.book = SimpleNamespace(update=lambda seen: None)

    async def read(self, keys: Sequence[str], *, thorough: bool) -> Mapping[NodeId, Stored]:
        assert list(keys) == record_keys(RUN)
        self.thorough.append(thorough)
        self._last = next(self._looks, self._last)
        return self._last


def stored(record: NodeRecord | bytes, seconds: float = 60.0) -> Stored:
    value = record if isinstance(record, bytes) else canonical(record)
    return Stored(value, get_dht_time() + seconds)


def lookout(*looks: Mapping[NodeId, Stored]) -> Lookout:
    return Lookout(cast(Network, Dht(*looks)), RUN)


def membership(dht: Dht, lease_seconds: float) -> Membership:
    rounds = examples.ROUND.model_copy(update={"lease_seconds": lease_seconds})
    manifest = Signed(examples.manifest(round=rounds), ANN, RUN, b"")
    return Membership(cast(Network, dht), manifest, examples.record(name="ann"), lambda: (3, 4))


def test_a_record_counts_until_it_ends_whatever_a_look_misses() -> None:
    async def scenario() -> None:
        ben, cat = examples.record(name="ben"), examples.record(name="cat")
        found = lookout({BEN: stored(ben), CAT: stored(cat, 0.05)}, {}, {})
        assert await found.look(thorough=True) == {BEN: ben, CAT: cat}
        assert await found.look(thorough=False) == {BEN: ben, CAT: cat}
        while get_dht_time() < found._found[CAT][0].until:
            await asyncio.sleep(0.01)
        assert await found.look(thorough=False) == {BEN: ben}

    uvloop.run(scenario())


def test_of_two_records_of_a_node_the_one_that_lasts_longer_counts() -> None:
    async def scenario() -> None:
        new, old = stored(examples.record(round=2)), stored(examples.record(round=1), 50.0)
        found = lookout({BEN: new}, {BEN: old}, {BEN: stored(examples.record(round=3), 70.0)})
        assert [(await found.look(thorough=True))[BEN].round for _ in range(3)] == [2, 2, 3]

    uvloop.run(scenario())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"junk",
        canonical(examples.record(run="cd" * 32)),
        canonical(examples.record(protocol=1)),
        canonical(examples.record())[:-1],
    ],
)
def test_what_is_no_record_of_the_run_is_left_out(value: bytes) -> None:
    found = lookout({BEN: stored(value), CAT: stored(examples.record(name="cat"))})
    assert uvloop.run(found.look(thorough=True)).keys() == {CAT}


def test_every_node_has_a_key_of_its_runs_and_they_are_spread() -> None:
    keys = [record_key(RUN, NodeId(f"Qm{number}")) for number in range(20 * BUCKETS)]
    assert set(keys) == set(record_keys(RUN)) and len(set(keys)) == BUCKETS
    assert max(keys.count(key) for key in set(keys)) < 3 * 20
    assert not set(record_keys(RUN)) & set(record_keys("cd" * 32))


def test_the_longest_record_is_not_too_long() -> None:
    texts = dict.fromkeys(("version", "name", "reason", "device", "complaint"), "x" * 120)
    digests = dict.fromkeys(("commit", "digest"), "ab" * 32)
    numbers = dict.fromkeys(("round", "tokens", "uplink", "trained_tokens", "sent", "received"), 2**63 - 1)
    addresses = (f"/ip4/203.0.113.5/tcp/31337/p2p/{ANN}",) * 4
    longest = examples.record(**texts, **digests, **numbers, addresses=addresses, experts=tuple(range(4096)))
    assert len(canonical(longest)) + len("[signature:]") + 344 < MAX_RECORD_BYTES, "2048 bits, in base64"


def test_everybody_is_asked_at_first_and_then_once_in_a_leases_life() -> None:
    async def scenario() -> None:
        dht = Dht()
        member = membership(dht, lease_seconds=10.0)
        now = asyncio.get_running_loop().time
        start = now()
        while now() < start + 1.0:
            await member.refresh()
            await asyncio.sleep(0.02)
        assert dht.thorough[0] and not any(dht.thorough[1:])
        assert 2 <= len(dht.thorough) <= 5, "a view of a moment ago is not looked for again"

    uvloop.run(scenario())


def test_a_large_swarm_is_looked_at_less_often() -> None:
    async def scenario() -> None:
        many = {NodeId(f"Qm{number}"): stored(examples.record()) for number in range(4 * RECORDS_PER_SECOND)}
        dht = Dht(many)
        member = membership(dht, lease_seconds=100.0)
        for _ in range(10):
            assert len((await member.refresh()).nodes) == len(many) + 1
            await asyncio.sleep(0.05)
        assert len(dht.thorough) == 1, "it takes four seconds until the next look"

    uvloop.run(scenario())


def test_a_node_knows_itself_best() -> None:
    async def scenario() -> None:
        member = membership(Dht({ANN: stored(examples.record(name="old"))}), lease_seconds=10.0)
        member.lease((1, 2))
        view = await member.refresh()
        assert view.nodes[ANN].name == "ann" and view.nodes[ANN].sent == 3 and view.holders() == {1: [ANN], 2: [ANN]}

    uvloop.run(scenario())
