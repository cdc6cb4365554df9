"""The `status` command: the swarm as its DHT records and its last commit tell it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.control import ask
from node.observer import Observer
from node.remote_commits import read_commit
from node.snapshot import as_json as to_json
from node.units import quantity, size
from swarm.discovery import find_manifest
from swarm.documents import Commit, Signed
from swarm.exchange import Exchange
from swarm.identity import Identity, short
from swarm.manifest import Manifest
from swarm.membership import read_view, read_warmup
from swarm.network import Network
from swarm.records import View
from swarm.warmup import Warmup

MOST_TEXT = 300
"""Letters of one line of health, which may contain what peers say."""


async def report(peers: Sequence[str], run_id: str | None, *, as_json: bool) -> None:
    """Print the state of the swarm behind these peers. Raises Unreachable and UserError."""
    network = await Network.start(Identity.ephemeral(), peers=peers, client=True)
    try:
        manifest = await find_manifest(network, run_id)
        view = await read_view(network, manifest.digest)
        stage = await read_warmup(network, manifest) if manifest.document.merge.alpha else None
        commit = await read_commit(Exchange(network, manifest.digest, handler=None), view)
    finally:
        await network.close()
    summary = summarise(manifest, view, commit, stage)
    print(json.dumps(summary, indent=2) if as_json else as_text(summary))


def show(home: Path, *, as_json: bool) -> None:
    """Print the state of the swarm as the node in this folder sees it. Raises UserError when none runs there."""
    state = ask(home, {"do": "state"})
    print(json.dumps(state, indent=2) if as_json else as_text(state))


def summarise(
    manifest: Signed[Manifest], view: View, commit: Signed[Commit] | None, stage: Warmup | None = None
) -> dict[str, Any]:
    """The report as JSON-able data.

    Args:
        manifest: the run.
        view: who is there.
        commit: the last one.
        stage: where the run stands in its warm-up, as it is kept for all.
    """
    observer = Observer(manifest)
    observer.see(view)
    if commit is not None:
        observer.adopt(commit)
    snapshot = observer.snapshot()
    if commit is None or stage is None or stage.round >= commit.document.round:  # else it is kept a beat later
        snapshot = replace(snapshot, warmup=stage)
    return to_json(snapshot, rounds=False)


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
    if not summary["nodes"]:
        lines.append("no node is there")
    if run["rounds"] and number == run["rounds"]:
        lines += ["", "the run is complete"]
    if summary["health"]:
        lines += ["", "Health:"]
    for trouble in summary["health"]:
        text = _clean(trouble["text"], MOST_TEXT)
        lines.append(f"  {trouble['severity']:<7} {trouble['code']:<17} {text}: {trouble['action']}")
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
