"""Small valid documents and records: every field has a value here, and every field can be given another one."""

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from model.settings import LossSettings, ModelSettings, OptimizerSettings
from swarm.documents import (
    Commit,
    Contribution,
    Document,
    Encoded,
    Ledger,
    Member,
    Plan,
    Reduction,
    Result,
    ShardState,
    Signed,
    Update,
    canonical,
    digest_of,
)
from swarm.leader import make_plan
from swarm.manifest import DataSettings, Manifest, RoundSettings
from swarm.records import NodeRecord, View

RUN = "ab" * 32
NODES = ["Qm" + letter * 44 for letter in "ABCDEF"]
"""Ids of nodes that need no keys."""
ROUND = RoundSettings(total=3, local_steps=4, batch_blocks=2, train_seconds=30.0, margin_seconds=5.0)
EXPERTS = 4
SHARDS = ["embed", *(f"layer.{layer}.expert.{e}" for layer in range(2) for e in range(EXPERTS)), "head"]
"""Names of the shards of `head`."""
D = TypeVar("D", bound=Document)


def digest(text: str) -> str:
    """A digest that is the same for the same text."""
    return hashlib.sha256(text.encode()).hexdigest()


def floats(*values: float) -> bytes:
    """The bytes of a shard with these values."""
    return np.array(values, "<f4").tobytes()


def manifest(**fields: Any) -> Manifest:
    """A run of a model with two layers and four experts."""
    return Manifest(
        **{
            "name": "small",
            "author": NODES[0],
            "seed": 1,
            "model": ModelSettings(
                vocab_size=259,
                hidden_size=32,
                num_layers=2,
                num_heads=2,
                num_kv_heads=2,
                expert_size=16,
                num_experts=EXPERTS,
                experts_per_token=2,
                max_length=32,
            ),
            "loss": LossSettings(),
            "optimizer": OptimizerSettings(learning_rate=1e-3),
            "data": DataSettings(block_tokens=32),
            "round": ROUND,
            **fields,
        }
    )


def record(**fields: Any) -> NodeRecord:
    """A trainer that has room for all experts."""
    return NodeRecord(
        **{
            "run": RUN,
            "version": "1",
            "name": "node",
            "role": "trainer",
            "state": "waiting",
            "addresses": (),
            "capacity": EXPERTS,
            **fields,
        }
    )


def states(values: Mapping[str, bytes], version: int = 0) -> dict[str, ShardState]:
    """What a commit says about shards with these values."""
    return {name: ShardState(version=version, digest=digest_of(data), size=len(data)) for name, data in values.items()}


def encoded(data: bytes) -> Encoded:
    """How these bytes are announced."""
    return Encoded(digest=digest_of(data), size=len(data))


def result(text: str, *contributors: str) -> Result:
    """A result with digests that only its text tells."""
    return Result(
        encoded=Encoded(digest=digest(f"encoded {text}"), size=100), values=digest(text), contributors=contributors
    )


def update(reducer: str, data: bytes = b"change", **fields: Any) -> Update:
    """A shard got its new values from these bytes."""
    return Update(**{"encoded": encoded(data), "reducer": reducer, **fields})


def plan(*roster: str, **fields: Any) -> Plan:
    """A plan of the first round for these nodes; the first of them is its leader."""
    return Plan(
        **{
            "run": RUN,
            "round": 1,
            "parent": digest("commit 0"),
            "leader": (roster or NODES)[0],
            "roster": {node: Member(blocks=(), steps=4, heldout=(0, 0)) for node in roster},
            "owners": {},
            "uplinks": dict.fromkeys(roster, 0),
            "train_seconds": 30.0,
            "reduce_seconds": 5.0,
            **fields,
        }
    )


def contribution(node: str = NODES[0], **fields: Any) -> Contribution:
    """What a node hands in after four steps, without shards."""
    return Contribution(
        **{
            "run": RUN,
            "round": 1,
            "plan": digest("plan"),
            "node": node,
            "tokens": 100,
            "steps": 4,
            "used_blocks": 8,
            "loss": 5.0,
            "heldout_nats": 0.0,
            "heldout_tokens": 0,
            "train_seconds": 1.0,
            "busy": 0.0,
            "shards": {},
            **fields,
        }
    )


def reduction(node: str = NODES[0], **fields: Any) -> Reduction:
    """What a reducer announces, without results."""
    return Reduction(**{"run": RUN, "round": 1, "plan": digest("plan"), "node": node, "results": {}, **fields})


def commit(**fields: Any) -> Commit:
    """A genesis without shards."""
    return Commit(
        **{
            "run": RUN,
            "round": 0,
            "parent": "",
            "leader": NODES[0],
            "shards": {},
            "updates": {},
            "owners": {},
            "shares": {},
            "missing": (),
            "tokens": 0,
            "ledger": Ledger(),
            "loss": 0.0,
            "heldout_loss": None,
            "train_seconds": 0.0,
            "reduce_seconds": (),
            "busy": 0.0,
            **fields,
        }
    )


def head(number: int = 0, **fields: Any) -> Commit:
    """A commit in which every shard of a two-layer model has changed."""
    shards = {name: ShardState(version=number, digest=digest(f"old {name}"), size=400) for name in SHARDS}
    return commit(**{"round": number, "shards": shards, "tokens": 1000, "loss": 7.0, **fields})


def planned(
    roster: Mapping[str, NodeRecord], before: Commit, run: Manifest | None = None, view: View | None = None
) -> Plan:
    """The plan that the first node of the roster writes after a commit."""
    leader = next(iter(roster))
    return make_plan(run or manifest(), RUN, leader, before, digest("head"), roster, view or View(roster))


def posted(document: D) -> Signed[D]:
    """A document as it is on the board, by the node it names; its signature was checked by others."""
    signer: str = getattr(document, "leader", "") or getattr(document, "node", "")
    return Signed(document, signer, digest_of(canonical(document)), b"")
