"""Evaluates a state of the model on held-out text, without a swarm."""

from collections.abc import Iterable, Iterator

import numpy as np

from model.engine import Engine
from model.shards import Shard, layout
from node.corpus import Corpus
from swarm.manifest import Manifest
from swarm.store import ShardStore


def heldout_loss(
    manifest: Manifest, corpus: Corpus, state: Iterable[tuple[Shard, np.ndarray]], num_blocks: int
) -> float:
    """Mean cross entropy in nats per token on `num_blocks` held-out blocks of the corpus, in fp32 on the CPU.

    `state` is every shard with its flat fp32 values [numel]: `committed` or `model.initial.initial_values`.
    """
    engine = Engine(manifest.model, manifest.loss, manifest.optimizer)
    for shard, values in state:
        engine.load(shard.name, values)
    found = engine.evaluate(corpus.heldout_blocks(num_blocks))
    return found.nats / found.tokens


def committed(manifest: Manifest, store: ShardStore) -> Iterator[tuple[Shard, np.ndarray]]:
    """Yields every shard with its values in the last commit of `store`."""
    for shard in layout(manifest.model):
        yield shard, store.values(shard.name)
