"""The rule by which a round puts its contributions together is that of SPES as released: shared parameters and routers
are averaged, experts come from their owners."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from swarm.exchange import Exchange
from swarm.identity import Identity
from swarm.manifest import EncodingSettings
from swarm.reduce import Reducer
from swarm.store import map_values
from tests import examples
from tests.nodes import Node, Offers

RELEASED = Path(__file__).parent / "data" / "released_spes.npz"
"""See `tests/test_merge.py`."""
MOE = "transformer.blocks.0.ffn"
SHARED = {"embed": "transformer.wte.weight", "layer.0.shared": f"{MOE}.router.layer.weight"}
MATRICES = [f"{MOE}.experts.mlp.expert_{matrix}" for matrix in ("w1", "v1", "w2")]
NODES = examples.NODES[:3]


def shard(arrays: Mapping[str, np.ndarray], prefix: str, names: list[str]) -> bytes:
    return b"".join(arrays[f"{prefix}.{name}"].astype("<f4").tobytes() for name in names)


def test_the_released_server_gives_the_same(identities: list[Identity], tmp_path: Path) -> None:
    with np.load(RELEASED) as file:
        arrays = dict(file)
    parts = {
        **{name: [parameter] for name, parameter in SHARED.items()},
        **{f"layer.0.expert.{e}": [f"{matrix}.{e}" for matrix in MATRICES] for e in range(2 * len(NODES))},
    }
    expected = {name: shard(arrays, "aggregate.result", found) for name, found in parts.items()}
    settings = EncodingSettings(shared="fp32", experts="fp32")
    base = {name: bytes(len(data)) for name, data in expected.items()}
    node = Node(identities[0], tmp_path / "store", base, examples.manifest(encoding=settings))
    offers = {}
    for number, owner in enumerate(NODES):
        mine = [*SHARED, *(f"layer.0.expert.{2 * number + e}" for e in range(2))]
        kept = {name: node.keep(shard(arrays, f"aggregate.node{number}", parts[name])) for name in mine}
        offers[owner] = examples.contribution(owner, tokens=64, shards=kept)
    reducer = Reducer(
        examples.plan(*NODES),
        node.head.document,
        settings,
        store=node.store,
        residuals=node.residuals,
        exchange=cast(Exchange, Offers({})),
        margin=1.0,
        complain=lambda who, why: None,
    )
    results = asyncio.run(reducer.reduce(list(parts), offers))
    for name, data in expected.items():
        values = map_values(node.store.locate(results[name].values))
        np.testing.assert_allclose(values, np.frombuffer(data, "<f4"), rtol=0, atol=1e-6)
        assert name in SHARED or values.tobytes() == data, "an expert is its owner's, to the bit"
