"""The `ping` command: how long a node takes to answer, and what it holds."""

import json
import time
from collections.abc import Sequence

from model.errors import SpesError, UserError
from swarm.discovery import find_manifest
from swarm.exchange import CallFailed, Exchange
from swarm.identity import Identity, NodeId
from swarm.membership import read_view
from swarm.network import Network
from swarm.records import View


async def ping(peers: Sequence[str], run_id: str | None, wanted: str, count: int, *, as_json: bool) -> None:
    """Ask a node several times and print what comes back.

    Raises:
        UserError: there is no such node, or there are several.
        SpesError: it does not answer.
    """
    network = await Network.start(Identity.ephemeral(), peers=peers, client=True)
    try:
        manifest = await find_manifest(network, run_id)
        view = await read_view(network, manifest.digest)
        node = _find(view, wanted)
        exchange, times = Exchange(network, manifest.digest, handler=None), list[float]()
        for _ in range(count):
            began = time.monotonic()
            try:
                _, number = await exchange.ping(node)
            except CallFailed as error:
                raise SpesError(f"{view.call([node])} does not answer: {error}") from None
            times.append(1000 * (time.monotonic() - began))
            if not as_json:
                print(f"{view.call([node])} answers in {times[-1]:.1f} ms, it holds round {number}", flush=True)
    finally:
        await network.close()
    if as_json:
        print(json.dumps({"id": node, "milliseconds": times, "round": number}, indent=2))


def _find(view: View, wanted: str) -> NodeId:
    """The node with this name or end of its id. Raises UserError."""
    present = view.present()
    found = [node for node, record in present.items() if record.name == wanted or node.endswith(wanted.lstrip("."))]
    if len(found) != 1:
        known = ", ".join(f"{view.call([node])} {node[-6:]}" for node in sorted(present)) or "nobody"
        trouble = "several nodes are" if found else "no node is"
        raise UserError(f"{trouble} called {wanted}; there are: {known}")
    return found[0]
