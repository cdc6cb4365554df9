"""The `status` command: the swarm as its DHT records and its last commit tell it."""

import json
from collections.abc import Sequence
from typing import Any

from node.units import quantity, size
from swarm.discovery import find_manifest
from swarm.documents import Commit, Signed
from swarm.exchange import CallFailed, Exchange
from swarm.identity import Identity, NodeId
from swarm.manifest import Manifest
from swarm.membership import read_view, read_warmup
from swarm.network import Network
from swarm.patience import short
from swarm.records import NodeRecord, View
from swarm.replica import weight
from swarm.warmup import Warmup, warmup

SCHEMA = 1
"""Version of the JSON form."""


async def report(peers: Sequence[str], run_id: str | None, *, as_json: bool) -> None:
    """Print the state of the swarm behind these peers. Raises Unreachable and UserError."""
    network = await Network.start(Identity.ephemeral(), peers=peers, client=True)
    try:
        manifest = await find_manifest(network, run_id)
        view = await read_view(network, manifest.digest)
        stage = await read_warmup(network, manifest) if manifest.document.merge.alpha else None
        commit = await _last_commit(Exchange(network, manifest.digest, handler=None), view)
    finally:
        await network.close()
    summary = summarise(manifest, view, commit, stage)
    print(json.dumps(summary, indent=2) if as_json else as_text(summary))


async def _last_commit(exchange: Exchange, view: View) -> Commit | None:
    """The commit of the best chain, from any node that has it."""
    present = view.present()
    best_first = sorted(
        (node for node, record in present.items() if record.commit),
        key=lambda node: weight(present[node].tokens, present[node].round, present[node].commit),
        reverse=True,
    )
    for node in best_first:
        try:
            signed = await exchange.read(node, "commit", present[node].round)
        except CallFailed:
            continue
        if signed is not None and isinstance(signed.document, Commit):
            return signed.document
    return None


def summarise(
    manifest: Signed[Manifest], view: View, commit: Commit | None, stage: Warmup | None = None
) -> dict[str, Any]:
    """The report as JSON-able data."""
    run = manifest.document
    holders = view.holders()
    if stage is not None and commit is not None and commit.round > stage.round:  # kept for all, and told a beat later
        stage = warmup(run, commit.round)
    return {
        "schema": SCHEMA,
        "run": {"id": manifest.digest, "name": run.name, "rounds": run.round.total, "author": run.author},
        "round": commit.round if commit is not None else None,
        "warmup": stage.model_dump() if stage is not None else None,
        "loss": commit.loss if commit is not None and commit.round else None,
        "heldout_loss": commit.heldout_loss if commit is not None else None,
        "utilisation": commit.busy if commit is not None else None,
        "tokens": commit.tokens if commit is not None else None,
        "state": commit.state if commit is not None else None,
        "experts": run.model.num_experts,
        "experts_covered": len(holders),
        "leases": {str(expert): sorted(holders[expert]) for expert in sorted(holders)},
        "nodes": [_node(node, record, commit) for node, record in sorted(view.nodes.items())],
    }


def _node(node: NodeId, record: NodeRecord, commit: Commit | None) -> dict[str, Any]:
    return {
        "id": node,
        **record.model_dump(include={"name", "role", "state", "reason", "round", "digest", "version", "device"}),
        "experts": list(record.experts),
        "in_sync": commit is not None and record.digest == commit.state,
        "trained_tokens": record.trained_tokens,
        "utilisation": record.utilisation,
        "uplink": record.uplink,
        "complaint": record.complaint,
        "sent": record.sent,
        "received": record.received,
        "addresses": list(record.addresses),
    }


def as_text(summary: dict[str, Any]) -> str:
    """The report for people."""
    run, number = summary["run"], summary["round"]
    rounds = f"/{run['rounds']}" if run["rounds"] else ""
    heldout = f"{summary['heldout_loss']:.3f}" if summary["heldout_loss"] is not None else "-"
    loss = f"{summary['loss']:.3f}" if summary["loss"] is not None else "-"
    lines = [
        f"run {run['name']} {run['id'][:12]}   round {number if number is not None else '-'}{rounds}   loss {loss}   "
        f"held-out {heldout}   {quantity(summary['tokens'] or 0)} tokens   "
        f"experts {summary['experts_covered']}/{summary['experts']}",
        *_stage(summary["warmup"]),
        "",
        f"{'name':<18} {'id':<9} {'state':<10} {'round':>6} {'sync':<4} {'experts':<16} {'trained':>8} "
        f"{'busy':>5} {'sent':>9} {'received':>9}",
    ]
    for node in summary["nodes"]:
        experts = node["role"] if node["role"] != "trainer" else ",".join(map(str, node["experts"])) or "-"
        busy = f"{node['utilisation']:.0%}" if node["utilisation"] else "-"
        lines.append(
            f"{_clean(node['name'], 18):<18} {short(node['id']):<9} {node['state']:<10} {node['round']:>6} "
            f"{'yes' if node['in_sync'] else 'no':<4} {_clean(experts, 16):<16} {quantity(node['trained_tokens']):>8} "
            f"{busy:>5} {size(node['sent']):>9} {size(node['received']):>9}"
        )
    complaints = [(node["name"], node["complaint"]) for node in summary["nodes"] if node["complaint"]]
    if complaints:
        lines += ["", *(f"{_clean(name, 18)} says of {_clean(complaint, 120)}" for name, complaint in complaints)]
    if not summary["nodes"]:
        lines.append("no node is there")
    missing = [e for e in range(summary["experts"]) if str(e) not in summary["leases"]]
    finished = run["rounds"] and number == run["rounds"]
    if finished:
        lines += ["", "the run is complete"]
    elif missing:
        lines += [
            "",
            f"no node holds expert {', '.join(map(str, missing))}: join with another box, or allow more experts",
        ]
    return "\n".join(lines)


def _stage(stage: dict[str, Any] | None) -> list[str]:
    match stage:
        case {"phase": "warmup", "alpha": alpha, "next_round": number}:
            return [f"merging warm-up: experts are merged before round {number}, alpha {alpha:.3g}"]
        case {"phase": "steady"}:
            return ["the merging warm-up is over"]
    return []


def _clean(text: str, width: int) -> str:
    """A peer's text without control characters, cut to fit its column."""
    text = "".join(character for character in text if character.isprintable())
    return text if len(text) <= width else text[: width - 1] + "~"
