"""The beginning of a run: its signed manifest, and its first weights in a shard store."""

from collections.abc import Callable
from pathlib import Path

from bootstrap.run_file import RunFile
from bootstrap.warm_start import WarmStart
from model.errors import UserError
from model.initial import initial_values
from model.shards import layout
from swarm.documents import Commit, Ledger, Rejected, ShardState, Signed, open_manifest, seal
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
    start: WarmStart | None = None,
    say: Callable[[str], None],
) -> tuple[Signed[Manifest], ShardStore]:
    """The run of this author and run file, at its last commit if it was started before, else at its genesis.

    Args:
        run_file: what the person wrote.
        identity: the author's.
        home: folder of the daemon.
        fingerprint, num_blocks: of the corpus, see `swarm.manifest.DataSettings`.
        start: the checkpoint that the run begins with; None for random weights.
        say: tells people what happens.

    Raises:
        UserError: there is no room on the disk, the store is damaged, or this run was begun with a checkpoint.
    """
    state = start.state if start is not None else ""
    manifest = seal(identity, run_file.manifest(identity.node_id, fingerprint, num_blocks, state))
    if start is None and not run_folder(home, manifest).exists():
        _refuse_forgotten_start(manifest.document, home)
    store = ShardStore.open(run_folder(home, manifest), manifest.digest)
    write_durably(store.folder / "manifest", manifest.wire)
    if store.head is not None:
        say(f"going on with run {manifest.document.name} at round {store.head.document.round}")
    else:
        write_genesis(manifest, identity, store, start)
        say(f"new run {manifest.document.name} {manifest.digest[:12]}")
    return manifest, store


def _refuse_forgotten_start(manifest: Manifest, home: Path) -> None:
    """Raise UserError when this very run is here, begun with a checkpoint: without it, it would be another run."""
    for path in home.glob("runs/*/manifest"):
        try:
            earlier = open_manifest(path.read_bytes()).document
        except Rejected:  # of another release, so not this run
            continue
        if earlier.initial_state and earlier.model_copy(update={"initial_state": ""}) == manifest:
            raise UserError(
                f"{home} has run {manifest.name} begun with a checkpoint; give it again to go on (--init DIR), "
                "or change run.name for a new run with random weights"
            )


def write_genesis(
    manifest: Signed[Manifest], identity: Identity, store: ShardStore, start: WarmStart | None = None
) -> None:
    """Write the first weights and commit 0.

    Raises UserError when there is no room for them, or the checkpoint has changed since its digest was taken.
    """
    run = manifest.document
    store.require_space(sum(4 * shard.numel for shard in layout(run.model)))
    shards = {}
    for shard, values in start.values() if start is not None else initial_values(run.model, run.seed):
        data = values.astype("<f4", copy=False).tobytes()
        shards[shard.name] = ShardState(version=0, digest=store.put(data), size=len(data))
    genesis = Commit(
        run=manifest.digest,
        round=0,
        parent="",
        leader=identity.node_id,
        shards=shards,
        updates={},
        owners={},
        shares={},
        missing=(),
        tokens=0,
        ledger=Ledger(),
        loss=0.0,
        heldout_loss=None,
        train_seconds=0.0,
        reduce_seconds=(),
        busy=0.0,
    )
    if start is not None and genesis.state != run.initial_state:
        raise UserError(f"{start.checkpoint.folder} was changed while it was read; start again when it is complete")
    store.adopt(seal(identity, genesis))
