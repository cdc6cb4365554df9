"""Does a swarm learn like ordinary training? The same model trained three ways, all through the product's processes.

swarm        four nodes with two experts each
centralised  one node that takes the tokens of all four in every step
alone        one node with a quarter of the tokens: what a volunteer gets without the others
"""

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.curves import Curve, draw, table
from bench.results_file import RESULTS, write_results
from bench.text import SHAKESPEARE, choose_text
from bootstrap.run_file import change_settings, write_preset
from model.errors import SpesError, UserError
from node.corpus import load_corpus
from node.evaluation import committed, heldout_loss
from node.local_swarm import LocalSwarm
from node.stores import open_store

ROUNDS = 20
"""Of the `demo` preset: its learning rate reaches the floor in the last one."""
EXPERTS = 8
EXPERT_SIZE = 128
"""As in the reference: half of the preset's."""
HELDOUT_BLOCKS = 192
"""For every point of the curves, so that all of them are measured on the same text."""
MARGIN_SECONDS = 60
"""On a busy machine a round may take so much longer than the one before: that costs time, and no tokens."""

# A reference in one process, on the same text, reached 2.14 and 2.17 with two seeds; twice the noise is allowed for.
SWARM_AT_MOST = 2.20
OVER_CENTRALISED_AT_MOST = 0.22
UNDER_ALONE_AT_LEAST = 0.03


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to train."""

    name: str
    nodes: int
    batch_blocks: int
    """In one step of one node."""
    threads: int
    """Of one node."""


CONTESTANTS = (
    Contestant("swarm", nodes=4, batch_blocks=8, threads=1),
    Contestant("centralised", nodes=1, batch_blocks=32, threads=2),
    Contestant("alone", nodes=1, batch_blocks=8, threads=2),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One claim about the final losses."""

    claim: str
    holds: bool
    applies: bool
    """Whether it is about this text and this number of rounds."""

    def __str__(self) -> str:
        verdict = ("ok" if self.holds else "FAILED") if self.applies else "n/a"
        return f"{verdict:<6}  {self.claim}"


def main() -> None:
    """Train three times, report, and exit with 1 if a claim does not hold."""
    options = _options()
    try:
        text, data = choose_text(options.data)
        with _folder(options.keep) as folder:
            curves = {
                each.name: _train(each, folder / each.name, data, options.rounds, options.seed) for each in CONTESTANTS
            }
    except SpesError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    checks = _checks(curves, full=options.rounds == ROUNDS, shakespeare=text == SHAKESPEARE)
    print("", *table(curves), "", *checks, "", sep="\n")
    figures = {
        "text": text,
        "rounds": options.rounds,
        "seed": options.seed,
        "heldout_blocks": HELDOUT_BLOCKS,
        "runs": {each.name: asdict(each) | asdict(curves[each.name]) for each in CONTESTANTS},
        "checks": [asdict(check) for check in checks],
    }
    print("figures", write_results("convergence", figures))
    print("picture", draw(curves, f"Held-out loss, {text}", RESULTS / "convergence.png"))
    sys.exit(any(check.applies and not check.holds for check in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.convergence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"fewer than {ROUNDS} for a quick look")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the text")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for what the processes leave")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="spes-bench-") as folder:
            yield Path(folder)
    elif keep.exists():
        raise UserError(f"{keep} is there already; name a new folder: --keep DIR")
    else:
        yield keep


def _train(contestant: Contestant, folder: Path, data: Sequence[Path], rounds: int, seed: int) -> Curve:
    """One run from its first process to its last; its folder is new. Raises SpesError when a process ends early."""
    print(f"\n{contestant.name}: {contestant.nodes} x {contestant.batch_blocks} blocks in each step", flush=True)
    folder.mkdir(parents=True)
    run_file = folder / "run.toml"
    _write_run_file(run_file, contestant, rounds, seed, own_text=bool(data))
    started = time.monotonic()
    with LocalSwarm(folder, data, threads=contestant.threads) as swarm:
        swarm.start_rendezvous(run_file)
        for number in range(1, contestant.nodes + 1):
            experts = EXPERTS // contestant.nodes
            swarm.start_node(f"node-{number}", "--experts", str(experts), "--device", "cpu")
        swarm.run_to_end(rounds, _show)
        seconds = time.monotonic() - started
    return _curve(contestant, folder / "rendezvous", data, seconds)


def _show(line: str) -> None:
    if re.match(r"\s*(round|\d+/\d+)\s", line):
        print(line, flush=True)


def _curve(contestant: Contestant, home: Path, data: Sequence[Path], seconds: float) -> Curve:
    """What the rendezvous has left in its folder, with the loss of the final state."""
    (history,) = home.glob("runs/*/history.jsonl")
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    manifest, store = open_store(home)
    corpus = load_corpus(manifest.data, manifest.seed, data)
    final = heldout_loss(manifest, corpus, committed(manifest, store), HELDOUT_BLOCKS)
    steps = [manifest.round.local_steps * number for number in range(len(lines) + 1)]
    return Curve(
        steps=steps,
        # A line tells of the state that its round started from.
        losses=[*(line["heldout_loss"] for line in lines), final],
        tokens=lines[-1]["tokens"],
        planned_tokens=steps[-1] * contestant.nodes * contestant.batch_blocks * corpus.block_tokens,
        seconds=round(seconds, 1),
    )


def _write_run_file(path: Path, contestant: Contestant, rounds: int, seed: int, *, own_text: bool) -> None:
    """The `demo` preset with what differs here."""
    write_preset("demo", path)
    changes = {
        "run.name": contestant.name,
        "run.seed": seed,
        "data.source": "files" if own_text else "builtin",
        "model.expert_size": EXPERT_SIZE,
        "round.total": rounds,
        "round.overlap": False,  # so that all have trained on as many tokens
        "round.batch_blocks": contestant.batch_blocks,
        "round.heldout_blocks": HELDOUT_BLOCKS,
        "round.start_nodes": contestant.nodes,
        "round.margin_seconds": MARGIN_SECONDS,
    }
    change_settings(path, changes)


def _checks(curves: Mapping[str, Curve], *, full: bool, shakespeare: bool) -> list[Check]:
    swarm, centralised, alone = (curves[name].losses[-1] for name in ("swarm", "centralised", "alone"))
    over, under = swarm - centralised, alone - swarm
    return [
        Check(
            f"swarm ends at {swarm:.3f} (at most {SWARM_AT_MOST:.2f} on Shakespeare in {ROUNDS} rounds)",
            swarm <= SWARM_AT_MOST,
            applies=full and shakespeare,
        ),
        Check(
            f"swarm ends {over:+.3f} over centralised (at most {OVER_CENTRALISED_AT_MOST:+.2f} in {ROUNDS} rounds)",
            over <= OVER_CENTRALISED_AT_MOST,
            applies=full,
        ),
        Check(
            f"swarm ends {under:+.3f} under alone (at least {UNDER_ALONE_AT_LEAST:+.2f} in {ROUNDS} rounds)",
            under >= UNDER_ALONE_AT_LEAST,
            applies=full,
        ),
        Check(
            "every run trained on all the tokens planned",
            all(curve.tokens == curve.planned_tokens for curve in curves.values()),
            applies=True,
        ),
    ]


if __name__ == "__main__":
    main()
