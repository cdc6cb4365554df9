"""How a newcomer learns which run it is joining: the author's manifest, from the DHT."""

import asyncio
import logging

from model.errors import Unreachable, UserError
from swarm.documents import Rejected, Signed, open_manifest
from swarm.manifest import PROTOCOL, Manifest
from swarm.membership import MANIFEST_KEY
from swarm.network import Network

SEARCH_SECONDS = 45.0
PAUSE_SECONDS = 0.5

log = logging.getLogger(__name__)


async def find_manifest(network: Network, run_id: str | None = None) -> Signed[Manifest]:
    """The manifest of the swarm's run.

    Args:
        network: joined.
        run_id: the run to join, or the beginning of its id; needed only where one swarm holds several runs.

    Raises:
        Unreachable: no manifest appears within SEARCH_SECONDS.
        UserError: there are several runs, or not the wanted one, or it needs another version of this program.
    """
    deadline = asyncio.get_running_loop().time() + SEARCH_SECONDS
    while not (known := await _read(network)):
        if asyncio.get_running_loop().time() > deadline:
            raise Unreachable(
                "the peers answer but none of them knows a run. Is the address that of a `spes-node bootstrap`?"
            )
        await asyncio.sleep(PAUSE_SECONDS)
    found = {digest: signed for digest, signed in known.items() if digest.startswith(run_id or "")}
    if len(found) != 1:
        runs = ", ".join(f"{signed.document.name} {digest[:12]}" for digest, signed in sorted(known.items()))
        trouble = "holds several runs" if found else f"has no run {run_id}; it holds"
        raise UserError(f"this swarm {trouble} ({runs}). Choose one: --run ID")
    (manifest,) = found.values()
    if manifest.document.protocol != PROTOCOL:
        raise UserError(
            f"the run speaks protocol {manifest.document.protocol}, this program {PROTOCOL}. "
            "Install the version of spes-node that the run uses"
        )
    return manifest


async def _read(network: Network) -> dict[str, Signed[Manifest]]:
    """Valid manifests by run id."""
    found = {}
    for node, record in (await network.read([MANIFEST_KEY])).items():
        try:
            signed = open_manifest(record.value)
        except Rejected as error:
            log.debug("manifest from %s: %s", node, error)
            continue
        found[signed.digest] = signed
    return found
