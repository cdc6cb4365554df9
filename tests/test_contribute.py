"""What a node hands in: its training in the run's encoding, and what that leaves out in the next one."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from swarm import codec
from swarm.contribute import Contributor, encoding_of
from swarm.documents import Commit, Encoded, Share
from swarm.identity import Identity
from swarm.manifest import Encoding, EncodingSettings
from swarm.store import map_values
from swarm.trainer import Work
from tests import examples
from tests.nodes import Node

ENCODINGS = get_args(Encoding)
LOSSY = [encoding for encoding in ENCODINGS if not codec.carries_values(encoding)]
EXPERT = "layer.0.expert.1"
SIZES = {"embed": 700, EXPERT: 130}
Arrays = dict[str, np.ndarray]


def arrays(seed: int, scale: float = 1.0) -> Arrays:
    """Values of every shard."""
    draw = np.random.default_rng(seed)
    return {name: (draw.standard_normal(size) * scale).astype("<f4") for name, size in SIZES.items()}


def sum_of(*terms: Arrays) -> Arrays:
    return {name: sum((term[name] for term in terms), np.zeros(size, "<f4")) for name, size in SIZES.items()}


def uniform(encoding: Encoding) -> EncodingSettings:
    return EncodingSettings(shared=encoding, experts=encoding)


class Owner:
    """A node that trains both shards, round after round."""

    def __init__(self, identity: Identity, folder: Path, settings: EncodingSettings) -> None:
        self.base = arrays(0)
        manifest = examples.manifest(encoding=settings)
        self.settings = settings
        self.node = Node(identity, folder, {n: v.tobytes() for n, v in self.base.items()}, manifest)
        self.work = self.train({})

    def train(self, values: Mapping[str, np.ndarray]) -> Work:
        """A snapshot with these values."""
        number = self.node.head.document.round + 1
        shards = {name: self.node.keep(array.tobytes(), number).digest for name, array in values.items()}
        self.work = Work(
            tokens=8, steps=1, used_blocks=1, loss=1.0, heldout_nats=0.0, heldout_tokens=0,
            seconds=1.0, busy_seconds=1.0, seconds_per_step=1.0, shards=shards,
        )  # fmt: skip
        return self.work

    def contributor(self) -> Contributor:
        store, head = self.node.store, self.node.head.document
        return Contributor(self.settings, head, store, self.node.residuals, store.scratch(head.round + 1))

    def decoded(self, handed_in: Mapping[str, Encoded]) -> Arrays:
        """The numbers in what was handed in."""
        found = {}
        for name, shard in handed_in.items():
            path = self.node.store.find(shard.digest)
            assert path is not None and path.stat().st_size == shard.size
            found[name] = codec.decode(encoding_of(self.settings, name), path.read_bytes(), SIZES[name]).copy()
        return found

    def residual(self, name: str) -> np.ndarray | None:
        path = self.node.residuals.find("handed-in", name)
        return np.array(map_values(path)) if path is not None else None

    def commit(self, *, shares: tuple[str, ...], without: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> Commit:
        """The commit of the round, in which these shards have changed: all, unless they are named."""
        return examples.commit(
            round=1,
            updates={name: examples.update(self.node.me, without=without) for name in names or SIZES},
            shares=dict.fromkeys(shares, Share(tokens=8, steps=1)),
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_experts_and_what_is_shared_have_their_own_encoding() -> None:
    settings = EncodingSettings(shared="bf16", experts="int4")
    assert [encoding_of(settings, name) for name in ("embed", EXPERT, "layer.0.shared")] == ["bf16", "int4", "bf16"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_handed_in_has_the_size_of_the_encoding_and_the_numbers_of_the_training(
    identities: list[Identity], folder: Path, encoding: Encoding
) -> None:
    owner = Owner(identities[0], folder, uniform(encoding))
    trained = sum_of(owner.base, change := arrays(1, 0.01))
    handed_in = owner.contributor().encode(owner.train(trained))
    assert {name: shard.size for name, shard in handed_in.items()} == {
        name: codec.encoded_size(encoding, size) for name, size in SIZES.items()
    }
    for name, numbers in owner.decoded(handed_in).items():
        if encoding == "fp32":
            assert handed_in[name].digest == owner.work.shards[name], "the snapshot itself travels"
            assert np.array_equal(numbers, trained[name])
        else:
            step = np.abs(change[name]).max() / {"bf16": 256, "int8": 127, "int4": 7}[encoding]
            assert np.abs(numbers - change[name]).max() <= step


@pytest.mark.parametrize("encoding", LOSSY)
def test_what_one_round_leaves_out_is_in_the_next(identities: list[Identity], folder: Path, encoding: Encoding) -> None:
    owner = Owner(identities[0], folder, uniform(encoding))
    me, trained, sent = owner.node.me, arrays(0, 0.0), arrays(0, 0.0)
    for seed in (1, 2):
        trained = sum_of(trained, change := arrays(seed, 0.01))
        contributor = owner.contributor()
        sent = sum_of(sent, owner.decoded(contributor.encode(owner.train(sum_of(owner.base, change)))))
        contributor.settle(owner.commit(shares=(me,)), me, owner.work)
    for name in SIZES:
        residual = owner.residual(name)
        assert residual is not None and np.abs(residual).max() > 0
        assert np.allclose(sent[name] + residual, trained[name], rtol=0, atol=1e-6), "nothing is lost"


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_feedback_makes_the_sum_of_many_rounds_right(
    identities: list[Identity], folder: Path, encoding: Encoding
) -> None:
    """Changes that a single round rounds to nothing arrive all the same."""
    owner = Owner(identities[0], folder, uniform(encoding))
    me, change = owner.node.me, {name: np.full(size, 1e-3, "<f4") for name, size in SIZES.items()}
    for values in change.values():
        values[0] = 1.0  # the scale of the first block
    sent = arrays(0, 0.0)
    for _ in range(100):
        contributor = owner.contributor()
        sent = sum_of(sent, owner.decoded(contributor.encode(owner.train(sum_of(owner.base, change)))))
        contributor.settle(owner.commit(shares=(me,)), me, owner.work)
    step = 1 / {"int8": 127, "int4": 7}[encoding]
    for name in SIZES:
        assert np.abs(sent[name] - 100 * change[name]).max() <= step


@pytest.mark.parametrize(
    ("case", "kept"),
    [("counted", False), ("no share", True), ("without this node", True), ("shard carried", True)],
)
def test_a_residual_is_replaced_only_when_the_contribution_counts(
    identities: list[Identity], folder: Path, case: str, kept: bool
) -> None:
    owner = Owner(identities[0], folder, uniform("int4"))
    me = owner.node.me
    first = owner.contributor()
    first.encode(owner.train(sum_of(owner.base, arrays(1))))
    first.settle(owner.commit(shares=(me,)), me, owner.work)
    before = owner.residual(EXPERT)
    assert before is not None
    second = owner.contributor()
    second.encode(owner.train(sum_of(owner.base, arrays(2))))
    match case:
        case "counted":
            commit = owner.commit(shares=(me,))
        case "no share":
            commit = owner.commit(shares=(examples.NODES[0],))
        case "without this node":
            commit = owner.commit(shares=(me,), without=(me,))
        case _:
            commit = owner.commit(shares=(me,), names=("embed",))
    second.settle(commit, me, owner.work)
    after = owner.residual(EXPERT)
    assert after is not None and np.array_equal(before, after) == kept


def test_an_expert_that_moves_on_leaves_no_residual(identities: list[Identity], folder: Path) -> None:
    owner = Owner(identities[0], folder, uniform("int8"))
    me = owner.node.me
    for names in (tuple(SIZES), ("embed",)):
        contributor = owner.contributor()
        trained = sum_of(owner.base, arrays(1))
        contributor.encode(owner.train({name: trained[name] for name in names}))
        contributor.settle(owner.commit(shares=(me,)), me, owner.work)
    assert owner.residual("embed") is not None and owner.residual(EXPERT) is None


def test_a_round_without_a_step_keeps_what_is_still_to_be_sent(identities: list[Identity], folder: Path) -> None:
    owner = Owner(identities[0], folder, uniform("int8"))
    me = owner.node.me
    contributor = owner.contributor()
    contributor.encode(owner.train(sum_of(owner.base, arrays(1))))
    contributor.settle(owner.commit(shares=(me,)), me, owner.work)
    idle = owner.contributor()
    assert idle.encode(owner.train({})) == {}
    idle.settle(owner.commit(shares=()), me, owner.work)
    assert all(owner.residual(name) is not None for name in SIZES)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_no_number_is_not_handed_in(
    identities: list[Identity], folder: Path, encoding: Encoding, poison: float
) -> None:
    owner = Owner(identities[0], folder, uniform(encoding))
    trained = sum_of(owner.base, arrays(1))
    trained[EXPERT][77] = poison
    with pytest.raises(FloatingPointError):
        owner.contributor().encode(owner.train(trained))
    assert owner.residual(EXPERT) is None


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_change_that_no_fp32_holds_is_not_handed_in(
    identities: list[Identity], folder: Path, encoding: Encoding
) -> None:
    owner = Owner(identities[0], folder, uniform(encoding))
    far = {name: np.full(size, 3.3e38, "<f4") for name, size in SIZES.items()}
    with pytest.raises(FloatingPointError):
        owner.contributor().encode(owner.train(far))
