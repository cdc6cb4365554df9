"""A reducer: the token-weighted mean of what can be had and is sound, in the run's encoding, with nothing lost."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

import numpy as np
import pytest

from swarm import codec
from swarm.documents import Contribution, Encoded, Plan, Result
from swarm.exchange import Exchange, Writer
from swarm.identity import Identity
from swarm.manifest import Encoding, EncodingSettings
from swarm.reduce import Reducer
from swarm.store import map_values
from tests import examples
from tests.nodes import Node, Offers

ENCODINGS = get_args(Encoding)
LOSSY = [encoding for encoding in ENCODINGS if not codec.carries_values(encoding)]
ANN, BEN, CAT = examples.NODES[:3]
SIZE = 700
BASE = np.random.default_rng(0).standard_normal(SIZE).astype("<f4")


def change(seed: int, scale: float = 0.01) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SIZE) * scale).astype("<f4")


def handed_in(encoding: Encoding, delta: np.ndarray) -> bytes:
    """A contribution that says that the shard has changed by `delta`."""
    return codec.encode(encoding, BASE + delta if codec.carries_values(encoding) else delta)


def mean(encoding: Encoding, contributions: Mapping[str, tuple[int, bytes]]) -> np.ndarray:
    """The token-weighted mean of what contributions say, as the shard's new values."""
    total = sum(tokens for tokens, _ in contributions.values())
    delta = sum(
        tokens / total * codec.decode(encoding, data, SIZE).astype("f8") for tokens, data in contributions.values()
    )
    return np.asarray(delta if codec.carries_values(encoding) else BASE + delta)


class Bench:
    """A reducer of one shard, whose store holds what others offer, or that has to fetch it."""

    def __init__(self, identity: Identity, folder: Path, encoding: Encoding, base: np.ndarray = BASE) -> None:
        self.encoding: Encoding = encoding
        self.settings = EncodingSettings(shared=encoding, experts="fp32")
        self.node = Node(identity, folder, {"embed": base.tobytes()}, examples.manifest(encoding=self.settings))
        self.calls = Offers({})
        self.complaints: dict[str, str] = {}
        self.plan: Plan = examples.plan(ANN, BEN, CAT)

    def reducer(self, margin: float = 5.0) -> Reducer:
        return Reducer(
            self.plan,
            self.node.head.document,
            self.settings,
            store=self.node.store,
            residuals=self.node.residuals,
            exchange=cast(Exchange, self.calls),
            margin=margin,
            complain=self.complaints.__setitem__,
        )

    def reduce(self, contributions: Mapping[str, tuple[int, bytes]], reducer: Reducer | None = None) -> Result | None:
        """Average what nodes offer: tokens and bytes by node. All of it is here already."""
        offers = {node: offer(node, tokens, self.node.keep(data)) for node, (tokens, data) in contributions.items()}
        return self.reduce_offers(offers, reducer)

    def reduce_offers(self, offers: Mapping[str, Contribution], reducer: Reducer | None = None) -> Result | None:
        return asyncio.run((reducer or self.reducer()).reduce(["embed"], offers)).get("embed")

    def values(self, result: Result) -> np.ndarray:
        """The new values that a result promises."""
        path = self.node.store.find(result.values)
        assert path is not None
        return np.array(map_values(path))

    def sent(self, result: Result) -> np.ndarray:
        """The numbers that travel."""
        path = self.node.store.find(result.encoded.digest)
        assert path is not None and path.stat().st_size == result.encoded.size
        return codec.decode(self.encoding, path.read_bytes(), SIZE).copy()

    def residual(self) -> np.ndarray | None:
        path = self.node.residuals.find("averaged", "embed")
        return np.array(map_values(path)) if path is not None else None

    def settle(self, reducer: Reducer, result: Result, by: str) -> None:
        update = examples.update(by).model_copy(update={"encoded": result.encoded})
        reducer.settle(examples.commit(round=1, updates={"embed": update}), self.node.me)


def offer(node: str, tokens: int, shard: Encoded) -> Contribution:
    return examples.contribution(node, tokens=tokens, shards={"embed": shard})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_result_is_the_mean_by_tokens(identities: list[Identity], folder: Path, encoding: Encoding) -> None:
    bench = Bench(identities[0], folder, encoding)
    offers = {ANN: (300, handed_in(encoding, change(1))), BEN: (100, handed_in(encoding, change(2)))}
    result = bench.reduce(offers)
    assert result is not None and result.contributors == (ANN, BEN)
    assert result.encoded.size == codec.encoded_size(encoding, SIZE)
    error = np.abs(bench.values(result) - mean(encoding, offers)).max()
    assert error <= {"fp32": 2e-7, "bf16": 2e-4, "int8": 4e-4, "int4": 6e-3}[encoding]
    if encoding == "fp32":
        assert result.values == result.encoded.digest and bench.residual() is None
    else:
        assert np.array_equal(bench.values(result), BASE + bench.sent(result)), "what everybody will compute"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_contribution_is_the_result_as_it_is(identities: list[Identity], folder: Path, encoding: Encoding) -> None:
    bench, data = Bench(identities[0], folder, encoding), handed_in(encoding, change(1))
    reducer = bench.reducer()
    result = bench.reduce({BEN: (100, data)}, reducer)
    assert result is not None
    assert (result.encoded, result.contributors) == (examples.encoded(data), (BEN,))
    bench.settle(reducer, result, by=bench.node.me)
    assert bench.residual() is None, "nothing was rounded a second time"


@pytest.mark.parametrize("encoding", LOSSY)
def test_what_one_average_leaves_out_is_in_the_next(
    identities: list[Identity], folder: Path, encoding: Encoding
) -> None:
    bench = Bench(identities[0], folder, encoding)
    sent, wanted = np.zeros(SIZE), np.zeros(SIZE)
    for seed in (1, 3):
        offers = {
            node: (tokens, handed_in(encoding, change(seed + place)))
            for place, (node, tokens) in enumerate({ANN: 300, BEN: 100}.items())
        }
        reducer = bench.reducer()
        result = bench.reduce(offers, reducer)
        assert result is not None
        sent += bench.sent(result)
        wanted += mean(encoding, offers) - BASE
        bench.settle(reducer, result, by=bench.node.me)
    residual = bench.residual()
    assert residual is not None and np.abs(residual).max() > 0
    assert np.allclose(sent + residual, wanted, rtol=0, atol=1e-6)


def test_a_residual_is_kept_until_an_average_of_this_node_is_committed(
    identities: list[Identity], folder: Path
) -> None:
    bench = Bench(identities[0], folder, "int4")

    def offers(seed: int) -> dict[str, tuple[int, bytes]]:
        return {node: (100, handed_in("int4", change(seed + place))) for place, node in enumerate((ANN, BEN))}

    reducer = bench.reducer()
    result = bench.reduce(offers(1), reducer)
    assert result is not None and bench.residual() is None, "not before the commit"
    bench.settle(reducer, result, by=bench.node.me)
    first = bench.residual()
    assert first is not None
    reducer = bench.reducer()
    result = bench.reduce(offers(5), reducer)
    assert result is not None
    reducer.settle(examples.commit(round=1), bench.node.me)  # carried
    bench.settle(reducer, result, by=BEN)  # a stand-in's result was taken
    assert np.array_equal(first, np.array(bench.residual()))
    bench.settle(reducer, result, by=bench.node.me)
    assert not np.array_equal(first, np.array(bench.residual()))


def test_a_plan_that_led_nowhere_leaves_no_residual(identities: list[Identity], folder: Path) -> None:
    """What was averaged for another plan of the same round is still among the files of the round."""
    bench = Bench(identities[0], folder, "int8")
    assert bench.reduce({node: (100, handed_in("int8", change(ord(node[2])))) for node in (ANN, BEN)}) is not None
    reducer = bench.reducer()
    result = bench.reduce({CAT: (100, handed_in("int8", change(3)))}, reducer)
    assert result is not None
    bench.settle(reducer, result, by=bench.node.me)
    assert bench.residual() is None


# what is left out


def with_bytes(data: bytes, changes: Mapping[int, bytes]) -> bytes:
    changed = bytearray(data)
    for place, new in changes.items():
        changed[place : place + len(new)] = new
    return bytes(changed)


NAN, INF = examples.floats(float("nan")), examples.floats(float("inf"))
POISON: list[tuple[Encoding, dict[int, bytes]]] = [
    ("fp32", {4 * 77: NAN}),
    ("fp32", {4 * 77: INF}),
    ("bf16", {2 * 77: b"\xc0\x7f"}),
    ("int8", {0: NAN}),
    ("int8", {0: INF}),
    ("int8", {260: examples.floats(-1.0)}),
    ("int8", {4 + 77: b"\x80"}),
    ("int4", {4 + 7: b"\x38"}),
    ("int4", {4 + 7: b"\x83"}),
]


@pytest.mark.parametrize(("encoding", "poison"), POISON)
def test_a_contribution_of_what_no_encoder_writes_is_left_out_by_name(
    identities: list[Identity], folder: Path, encoding: Encoding, poison: dict[int, bytes]
) -> None:
    """Not a number, a negative scale, or the lowest code: -128 in int8, -8 in int4."""
    bench, good = Bench(identities[0], folder, encoding), handed_in(encoding, change(1))
    bad = with_bytes(handed_in(encoding, change(2)), poison)
    result = bench.reduce({ANN: (100, good), BEN: (300, bad)})
    assert result is not None
    assert (result.contributors, result.encoded) == ((ANN,), examples.encoded(good))
    assert bench.complaints == {BEN: "its contribution to embed is not finite"}
    assert bench.reduce({BEN: (300, bad)}) is None, "nobody has a sound one: it is carried"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("change_of_size", [-2, 4, 1 << 40])
def test_a_contribution_of_another_size_is_not_even_fetched(
    identities: list[Identity], folder: Path, encoding: Encoding, change_of_size: int
) -> None:
    bench, good = Bench(identities[0], folder, encoding), handed_in(encoding, change(1))
    size = len(good) + change_of_size
    offers = {
        ANN: offer(ANN, 100, bench.node.keep(good)),
        BEN: offer(BEN, 100, Encoded(digest=examples.digest("large"), size=size)),
    }
    result = bench.reduce_offers(offers)
    assert result is not None and result.contributors == (ANN,)
    assert bench.complaints == {BEN: "its contribution to embed has the size of another shard"}
    assert bench.calls.asked == []


def test_the_digest_of_something_else_that_is_here_is_no_contribution(identities: list[Identity], folder: Path) -> None:
    bench = Bench(identities[0], folder, "int8")
    lie = Encoded(digest=bench.node.head.document.shards["embed"].digest, size=codec.encoded_size("int8", SIZE))
    assert bench.reduce_offers({BEN: offer(BEN, 100, lie)}) is None
    assert bench.complaints == {BEN: "its contribution to embed has the size of another shard"}


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("nodes", [(ANN,), (ANN, BEN)])
def test_a_shard_that_would_overflow_is_carried(
    identities: list[Identity], folder: Path, encoding: Encoding, nodes: Sequence[str]
) -> None:
    bench = Bench(identities[0], folder, encoding, base=np.full(SIZE, 2e38, "<f4"))
    data = codec.encode(encoding, np.full(SIZE, 2.5e38, "<f4"))
    reducer = bench.reducer()
    assert bench.reduce(dict.fromkeys(nodes, (100, data)), reducer) is None
    reducer.settle(examples.commit(round=1), bench.node.me)
    assert bench.residual() is None


def test_residuals_that_add_up_beyond_fp32_carry_the_shard(identities: list[Identity], folder: Path) -> None:
    bench = Bench(identities[0], folder, "bf16")
    huge = folder / "huge"
    huge.write_bytes(np.full(SIZE, 2e38, "<f4").tobytes())
    bench.node.residuals.replace("averaged", "embed", huge)
    data = codec.encode("bf16", np.full(SIZE, 2.5e38, "<f4"))
    assert bench.reduce(dict.fromkeys((ANN, BEN), (100, data))) is None


def test_a_contribution_without_tokens_weighs_nothing(identities: list[Identity], folder: Path) -> None:
    bench, data = Bench(identities[0], folder, "fp32"), handed_in("fp32", change(1))
    result = bench.reduce({ANN: (100, data), BEN: (0, handed_in("fp32", change(2)))})
    assert result is not None and result.contributors == (ANN,)
    assert bench.reduce({BEN: (0, data)}) is None
    assert bench.reduce({}) is None
    assert not bench.complaints


# what has to be fetched


def test_what_an_owner_does_not_give_is_missing_in_the_mean(identities: list[Identity], folder: Path) -> None:
    bench = Bench(identities[0], folder, "int8")
    data = {node: handed_in("int8", change(place)) for place, node in enumerate((ANN, BEN, CAT))}
    bench.calls = Offers({ANN: [data[ANN]], CAT: [data[CAT]]})
    offers = {node: offer(node, 100, examples.encoded(bytes_)) for node, bytes_ in data.items()}
    result = bench.reduce_offers(offers)
    assert result is not None and result.contributors == (ANN, CAT)
    assert {node for node, _ in bench.calls.asked} == {ANN, BEN, CAT}
    assert not bench.complaints, "to be gone is no offence"


def test_half_of_the_owners_do_not_wait_longer_than_the_margin_for_the_rest(
    identities: list[Identity], folder: Path
) -> None:
    class Hanging(Offers):
        async def fetch(self, node: str, wanted: Sequence[tuple[str, int]], writer: Writer) -> None:
            if node == CAT:
                await asyncio.Event().wait()
            await super().fetch(node, wanted, writer)

    bench = Bench(identities[0], folder, "fp32")
    data = {node: handed_in("fp32", change(place)) for place, node in enumerate((ANN, BEN, CAT))}
    bench.calls = Hanging({node: [bytes_] for node, bytes_ in data.items()})
    offers = {node: offer(node, 100, examples.encoded(bytes_)) for node, bytes_ in data.items()}
    result = bench.reduce_offers(offers, bench.reducer(margin=0.05))
    assert result is not None and result.contributors == (ANN, BEN)
