"""The beginning of a run: its signed manifest, and the genesis weights in a shard store."""

from collections.abc import Callable
from pathlib import Path

from bootstrap.run_file import RunFile
from model.initial import initial_values
from model.shards import layout
from swarm.documents import Commit, Ledger, ShardState, Signed, seal
from swarm.identity import Identity
from swarm.manifest import Manifest
from swarm.store import ShardStore, run_folder, write_durably


def prepare_run(
    run_file: RunFile,
    identity: Identity,
    home: Path,
    *,
    fingerprint: str,
    num_blocks: int,
    say: Callable[[str], None],
) -> tuple[Signed[Manifest], ShardStore]:
    """The run of this author and run file, at its last commit if it was started before, else at its genesis.

    Args:
        run_file: what the person wrote.
        identity: the author's.
        home: folder of the daemon.
        fingerprint, num_blocks: of the corpus, see `swarm.manifest.DataSettings`.
        say: tells people what happens.

    Raises:
        UserError: there is no room on the disk, or the store is damaged.
    """
    manifest = seal(identity, run_file.manifest(identity.node_id, fingerprint, num_blocks))
    store = ShardStore.open(run_folder(home, manifest), manifest.digest)
    write_durably(store.folder / "manifest", manifest.wire)
    if store.head is not None:
        say(f"going on with run {manifest.document.name} at round {store.head.document.round}")
    else:
        write_genesis(manifest, identity, store)
        say(f"new run {manifest.document.name} {manifest.digest[:12]}")
    return manifest, store


def write_genesis(manifest: Signed[Manifest], identity: Identity, store: ShardStore) -> None:
    """Write the genesis weights and commit 0. Raises UserError when there is no room for them."""
    model = manifest.document.model
    store.require_space(sum(4 * shard.numel for shard in layout(model)))
    shards = {}
    for shard, values in initial_values(model, manifest.document.seed):
        data = values.astype("<f4", copy=False).tobytes()
        shards[shard.name] = ShardState(version=0, digest=store.put(data), size=len(data))
    genesis = Commit(
        run=manifest.digest,
        round=0,
        parent="",
        leader=identity.node_id,
        shards=shards,
        holders={},
        owners={},
        shares={},
        missing=(),
        tokens=0,
        ledger=Ledger(),
        loss=0.0,
        heldout_loss=None,
        train_seconds=0.0,
        reduce_seconds=0.0,
    )
    store.adopt(seal(identity, genesis))
