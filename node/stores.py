"""Finds the runs and the states that a daemon has left on this box, without a network."""

from pathlib import Path

from model.errors import UserError
from swarm.documents import Signed, open_manifest
from swarm.manifest import Manifest
from swarm.store import ShardStore


def find_run(home: Path, run_id: str | None = None) -> tuple[Signed[Manifest], Path]:
    """The manifest of the run in a daemon's folder, and the folder of its shard store.

    Args:
        home: folder of the daemon.
        run_id: beginning of the run's id, when the folder holds several.

    Raises:
        UserError: there is no such run, or there are several.
    """
    found = []
    for path in sorted(home.glob("runs/*/manifest")):
        signed = open_manifest(path.read_bytes())
        if signed.digest.startswith(run_id or ""):
            found.append((signed, path.parent))
    if not found:
        raise UserError(f"{home} holds no run. Name the folder of a node or of a rendezvous: --home DIR")
    if len(found) > 1:
        runs = ", ".join(f"{signed.document.name} {signed.digest[:12]}" for signed, _ in found)
        raise UserError(f"{home} holds several runs ({runs}). Choose one: --run ID")
    ((signed, folder),) = found
    return signed, folder


def open_store(home: Path, run_id: str | None = None) -> tuple[Manifest, ShardStore]:
    """The run in a daemon's folder, at its last complete commit. Arguments as for `find_run`.

    A daemon that goes on deletes objects of old commits: `swarm.held_state` is for long reads beside it.

    Raises:
        UserError: there is no such run, there are several, or it has no state yet.
    """
    signed, folder = find_run(home, run_id)
    store = ShardStore.read_only(folder, signed.digest)
    if store.head is None:
        raise UserError(f"{folder} has no complete state yet. Let the node finish its first synchronisation")
    return signed.document, store
