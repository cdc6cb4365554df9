"""Merging the experts of a committed state: the leader chooses the donors, and every node computes the same bits."""

import hashlib
import os

import numpy as np
import torch

from model.merge import merge_experts, select_donors
from model.settings import ModelSettings
from swarm.documents import Commit, Merge
from swarm.shard_names import expert_shards
from swarm.store import ShardStore, map_values

CHUNK_BYTES = 64 << 20
"""Of all experts of a layer together, merged at a time."""

Donors = tuple[tuple[tuple[int, ...], ...], ...]


def choose_donors(store: ShardStore, commit: Commit, model: ModelSettings, donors: int) -> Donors:
    """The donors of each expert of each layer, from a state that is in the store; the gates of one layer are in memory
    at a time. This reads a third of all experts, so it belongs into a thread.

    Args:
        store: has the state.
        commit: names its shards.
        model: their shapes.
        donors: K; the others where there are fewer.
    """
    top_k = min(donors, model.num_experts - 1)
    if not top_k:
        return tuple(((),) for _ in range(model.num_layers))
    chosen = []
    for layer in range(model.num_layers):
        files = [store.locate(commit.shards[name].digest) for name in expert_shards(layer, model.num_experts)]
        size = model.expert_size * model.hidden_size
        # an expert's shard begins with its gate projection, [F, D]
        gates = torch.from_numpy(np.stack([map_values(file)[:size] for file in files]))
        rows = select_donors(gates.view(len(files), model.expert_size, model.hidden_size), top_k)
        chosen.append(tuple(tuple(row) for row in rows.tolist()))
    return tuple(chosen)


def merge_state(store: ShardStore, commit: Commit, alpha: float, donors: Donors) -> Commit:
    """Merge the experts of a state that is in the store. The new values go into the scratch folder of the round after
    it. This reads and writes all experts, so it belongs into a thread.

    Args:
        store: has the state, and takes the new values.
        commit: names its shards.
        alpha, donors: of the `Merge`.

    Returns:
        The commit as if it had committed the merged experts: the base of the round.
    """
    shards = dict(commit.shards)
    for layer, rows in enumerate(donors):
        names = expert_shards(layer, len(rows))
        for name, digest in zip(names, _merge_layer(store, commit, names, rows, alpha), strict=True):
            shards[name] = shards[name].model_copy(update={"digest": digest})
    return commit.model_copy(update={"shards": shards})


def is_fit(merge: Merge | None, alpha: float, model: ModelSettings, donors: int) -> bool:
    """Whether a plan merges as the run says: so strongly, and each expert with so many different others.

    Args:
        merge: of the plan.
        alpha: what the run says, 0 for no merge.
        model, donors: of the manifest.
    """
    if merge is None or not alpha:
        return merge is None and not alpha
    experts, top_k = model.num_experts, min(donors, model.num_experts - 1)
    return (
        merge.alpha == alpha
        and len(merge.donors) == model.num_layers
        and all(len(rows) == experts for rows in merge.donors)
        and all(
            len(row) == len({*row} - {expert}) == top_k and max(row, default=0) < experts
            for rows in merge.donors
            for expert, row in enumerate(rows)
        )
    )


def _merge_layer(
    store: ShardStore, commit: Commit, names: list[str], donors: tuple[tuple[int, ...], ...], alpha: float
) -> list[str]:
    """The digests of the merged shards of one layer, which are in the scratch folder then."""
    folder = store.scratch(commit.round + 1)
    values = [map_values(store.locate(commit.shards[name].digest)) for name in names]
    parts = [folder / f".merged.{name}.part" for name in names]
    hashes = [hashlib.sha256() for _ in names]
    step = max(1, CHUNK_BYTES // (4 * len(names)))
    for part in parts:
        part.unlink(missing_ok=True)
    for start in range(0, values[0].size, step):
        block = torch.from_numpy(np.stack([each[start : start + step] for each in values]))
        for row, part, hashed in zip(merge_experts(block, donors, alpha).numpy(), parts, hashes, strict=True):
            hashed.update(row)
            with open(part, "ab") as file:
                file.write(row)
    digests = [hashed.hexdigest() for hashed in hashes]
    for part, digest in zip(parts, digests, strict=True):
        if store.find(digest) is None:
            os.replace(part, folder / digest)
            store.place(folder / digest)
        else:  # equal experts stay what they are, and where they are
            part.unlink()
    return digests
