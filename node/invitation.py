"""The line with which others join through a node: which of its addresses reach how far."""

import ipaddress
import json
from collections.abc import Sequence
from typing import Any, Literal

from model.errors import UserError

Reach = Literal["internet", "local network", "this machine"]
REACHES: tuple[Reach, ...] = ("internet", "local network", "this machine")


def reach(address: str) -> Reach:
    """From where a multiaddress may be dialled, as far as the address itself tells; a name counts for the internet."""
    kind, _, rest = address.lstrip("/").partition("/")
    if kind not in ("ip4", "ip6"):
        return "internet"
    host = ipaddress.ip_address(rest.partition("/")[0])
    if host.is_loopback:
        return "this machine"
    return "internet" if host.is_global else "local network"


def invitation(state: dict[str, Any], *, as_json: bool) -> None:
    """Print how to join through the node whose state this is, the farthest reach first. Raises UserError."""
    (me,) = [node for node in state["nodes"] if node["id"] == state["me"]] or [None]
    if me is None or not me["addresses"]:
        raise UserError("the node has no address yet. Try again in a moment")
    lines = {place: _join(found) for place in REACHES if (found := [a for a in me["addresses"] if reach(a) == place])}
    if as_json:
        print(json.dumps({"run": state["run"]["id"], "join": lines}, indent=2))
        return
    for place, line in lines.items():
        print(f"from {'the ' if place != 'this machine' else ''}{place}:\n  {line}")
    if "internet" not in lines:
        print(
            "Nobody can join over the internet with these. Forward the node's port on the router, and start it with "
            "--announce /ip4/PUBLIC_ADDRESS/tcp/PORT"
        )


def _join(addresses: Sequence[str]) -> str:
    return "spes-node join --peers " + " ".join(addresses)
