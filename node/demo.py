"""The demonstration: a rendezvous and four nodes as processes of their own on this box, training on real text."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bootstrap.run_file import change_settings, read_run_file, write_preset
from model.errors import UserError
from model.export import generate
from model.initial import initial_values
from node.console import Console
from node.corpus import load_corpus
from node.evaluation import committed, heldout_loss
from node.local_swarm import LocalSwarm
from node.run_export import export_run
from node.stores import open_store
from node.units import quantity, size
from swarm.documents import state_digest
from swarm.store import file_digest

NODES = 4
HELDOUT_BLOCKS = 192
"""Held-out blocks for the losses before and after."""
SAMPLE_PROMPT = "The "


def run_demo(output: Path, data: Sequence[Path], rounds: int | None) -> None:
    """Train the `demo` preset with four nodes and report.

    Args:
        output: folder of everything; a demonstration that is there already is replaced.
        data: files to train on instead of the embedded text.
        rounds: fewer rounds than the preset has.

    Raises:
        UserError: the data cannot be used, or `output` is something else than a demonstration.
        SpesError: a process ended before its time.
    """
    started = time.monotonic()
    console = Console()
    data = [path.resolve() for path in data]
    run_file = output / "run.toml"
    with TemporaryDirectory() as drafts:
        draft = Path(drafts) / "run.toml"
        write_preset("demo", draft)
        _adapt(draft, own_text=bool(data), rounds=rounds)
        run = read_run_file(draft)
        load_corpus(run.data, run.run.seed, data)  # what is wrong with the text is said before anything is replaced
        if _clear(output):
            console.say(f"Replacing the earlier demonstration in {output}")
        shutil.copy(draft, run_file)

    with LocalSwarm(output, data) as swarm:
        console.say(f"Starting a rendezvous and {NODES} nodes on this box; everything is kept in {output}")
        try:
            swarm.start_rendezvous(run_file, "--dashboard", "on")
            for number in range(1, NODES + 1):
                swarm.start_node(f"node-{number}")
            console.say("The rendezvous is up; the nodes join it and load the model, which takes half a minute")
            swarm.run_to_end(run.round.total, lambda line: console.say(line) if _is_news(line) else None)
        except KeyboardInterrupt:
            console.say("Stopping the nodes")
            raise
    summary = _summarise(output, swarm, started)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _tell(console, output, summary)


def _clear(output: Path) -> bool:
    """Remove an earlier demonstration, and tell if there was one; anything else that is in the way is the user's."""
    replaced = output.exists() and any(output.iterdir())
    if output.exists():
        if any(output.iterdir()) and not (output / "run.toml").exists():
            raise UserError(f"{output} is not empty and not a demonstration. Choose another folder: -o DIR")
        shutil.rmtree(output)
    output.mkdir(parents=True)
    return replaced


def _adapt(run_file: Path, *, own_text: bool, rounds: int | None) -> None:
    """Write the user's two choices into the run file, as a person would."""
    changes: dict[str, object] = {}
    if own_text:
        changes["data.source"] = "files"
    if rounds is not None:
        changes["round.total"] = rounds
    change_settings(run_file, changes)


def _is_news(line: str) -> bool:
    """Whether a line of the rendezvous is for this screen; nobody has to join here."""
    return bool(line) and "join --peers" not in line and not line.startswith(("Join", "run ", "new run", "home "))


def _summarise(output: Path, swarm: LocalSwarm, started: float) -> dict[str, Any]:
    """Export the final state and put the figures together, from what is on the nodes' disks."""
    manifest, store = open_store(swarm.nodes[0].home)
    assert store.head is not None
    commit = store.head.document
    states = [_state_on_disk(box.home) for box in swarm.nodes]
    export = output / "checkpoint"
    export_run(swarm.nodes[0].home, export)
    corpus = load_corpus(manifest.data, manifest.seed, swarm.data)
    before = heldout_loss(manifest, corpus, initial_values(manifest.model, manifest.seed), HELDOUT_BLOCKS)
    after = heldout_loss(manifest, corpus, committed(manifest, store), HELDOUT_BLOCKS)
    last = _history(output / "rendezvous")[-1]
    return {
        "loss_start": before,
        "loss_end": after,
        "rounds": commit.round,
        "nodes": len(commit.shares),
        "experts_covered": len(commit.experts_covered),
        "experts": manifest.model.num_experts,
        "digests_equal": len(set(states)) == 1 and states[0] == commit.state,
        "digest": commit.state,
        "tokens": commit.tokens,
        "seconds": round(time.monotonic() - started, 1),
        "bytes_moved": last["bytes_moved"],
        "export_dir": str(export),
        "sample": generate(export, SAMPLE_PROMPT, manifest.model.max_length - len(SAMPLE_PROMPT), seed=0),
    }


def _state_on_disk(home: Path) -> str:
    """The state digest of a node's last commit, from the bytes on its disk."""
    _, store = open_store(home)
    assert store.head is not None
    return state_digest({n: file_digest(store.path(s.digest)) for n, s in store.head.document.shards.items()})


def _history(home: Path) -> list[dict[str, Any]]:
    (path,) = home.glob("runs/*/history.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _tell(console: Console, output: Path, summary: dict[str, Any]) -> None:
    """The last screen."""
    console.say("")
    console.fact(
        "held-out",
        f"{summary['loss_start']:.3f} before, {summary['loss_end']:.3f} after, on more text than in the rows",
    )
    console.fact(
        "swarm",
        f"{summary['nodes']} nodes, {summary['experts_covered']}/{summary['experts']} experts, "
        f"{summary['rounds']} rounds, {quantity(summary['tokens'])} tokens, {size(summary['bytes_moved'])} moved, "
        f"{summary['seconds']:.0f} s",
    )
    same = "the same bits on every node" if summary["digests_equal"] else "NOT the same on every node"
    console.fact("state", f"{summary['digest'][:16]}, {same}")
    console.fact("sample", " ".join((SAMPLE_PROMPT + summary["sample"]).split()))
    console.fact("model", f"{summary['export_dir']} (for transformers.AutoModelForCausalLM)")
    console.fact("summary", str(output / "summary.json"))
