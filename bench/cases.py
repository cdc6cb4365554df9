"""Runs to compare: each is a simulation in a process of its own (`node.simulation`), all nodes in it, no network."""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.curves import Curve
from bench.expert_load import Load, measure
from bench.results_file import write_results
from bench.text import choose_text
from bootstrap.run_file import RunFile, change_settings, read_run_file, write_preset
from model.errors import SpesError
from node.corpus import load_corpus
from node.simulation import Simulation, begin
from swarm.identity import Identity

NODES = 4
EXPERTS = 8
STEPS = 200
"""Of the `demo` preset: its learning rate reaches the floor in the last one."""
LOCAL_STEPS = 10
BATCH_BLOCKS = 8
HELDOUT_BLOCKS = 192


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train on the same tokens."""

    name: str
    nodes: int = NODES
    experts: int = EXPERTS // NODES
    """That each of them trains."""
    batch_blocks: int = BATCH_BLOCKS
    local_steps: int = LOCAL_STEPS
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run file."""
    make: Callable[..., Simulation] = Simulation
    """What differs in the simulation itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to."""

    case: Case
    curves: list[Curve]
    """One for each seed."""
    loads: list[Load]

    @property
    def figures(self) -> dict[str, Any]:
        """For the results file."""
        case = asdict(self.case)
        del case["make"]  # its name says it
        return {
            "case": case,
            "curves": [asdict(curve) for curve in self.curves],
            "loads": [asdict(load) for load in self.loads],
            "loss": self.loss,
        }

    @property
    def loss(self) -> float:
        """Mean final loss."""
        return fmean(curve.losses[-1] for curve in self.curves)

    @property
    def each(self) -> str:
        """Final loss with each seed."""
        return " ".join(f"{curve.losses[-1]:.3f}" for curve in self.curves)


Checks = Sequence[tuple[str, bool]]
"""Claims, and whether they hold."""


def compare(
    name: str, description: str | None, cases: Sequence[Case], report: Callable[[Mapping[str, Outcome]], Checks]
) -> None:
    """The whole of a benchmark: train cases as the command line says, and exit with 1 if a claim does not hold.

    Args:
        name: of the benchmark.
        description: for its help.
        cases: that can be chosen.
        report: prints the outcomes, by the names of the cases, and returns what is claimed about them.
    """
    options = _options(name, description, cases)
    text, files = choose_text(options.data)
    chosen = [case for case in cases if not options.only or case.name in options.only]
    try:
        outcomes = _train_all(chosen, files, options)
    except SpesError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    checks = report({outcome.case.name: outcome for outcome in outcomes})
    print("", *(f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in checks), "", sep="\n")
    figures = {
        "text": text,
        "steps": options.steps,
        "seeds": options.seeds,
        "heldout_blocks": HELDOUT_BLOCKS,
        "cases": [outcome.figures for outcome in outcomes],
        "checks": [{"claim": claim, "holds": holds} for claim, holds in checks],
    }
    print("figures", write_results(name, figures))
    sys.exit(not all(holds for _, holds in checks))


def over(found: Mapping[str, Outcome], case: Case, other: Case, most: float) -> Checks:
    """The claim that a case ends at most so much over another one; none where they were not trained."""
    if case.name not in found or other.name not in found:
        return []
    gap = found[case.name].loss - found[other.name].loss
    return [(f"{case.name} over {other.name}: {gap:+.3f} (at most {most:+.3f})", gap <= most)]


def _options(name: str, description: str | None, cases: Sequence[Case]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in cases], help="these cases (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"fewer than {STEPS} for a quick look")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="train every case so many times (default: 2)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="so many at a time, each on a core")
    return parser.parse_args()


def _train_all(cases: Sequence[Case], files: Sequence[Path], options: argparse.Namespace) -> list[Outcome]:
    jobs = [(case, seed) for seed in range(options.seeds) for case in cases]
    found: dict[tuple[str, int], tuple[Curve, Load]] = {}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(_train, *zip(*jobs, strict=True), repeat(options.steps), repeat(files))
        for (case, seed), (curve, load) in zip(jobs, outcomes, strict=True):
            found[case.name, seed] = curve, load
            print(f"seed {seed}  {case.name:<36} {curve.losses[-1]:.4f} in {curve.seconds:.0f} s", flush=True)
    return [
        Outcome(
            case,
            curves=[found[case.name, seed][0] for seed in range(options.seeds)],
            loads=[found[case.name, seed][1] for seed in range(options.seeds)],
        )
        for case in cases
    ]


def _train(case: Case, seed: int, steps: int, files: Sequence[Path]) -> tuple[Curve, Load]:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="spes-case-") as name, closing(Identity.ephemeral()) as identity:
        folder = Path(name)
        run_file = read_case(folder / "run.toml", case, seed, steps, own_text=bool(files))
        corpus = load_corpus(run_file.data, seed, files)
        started = time.monotonic()
        simulation = begin(
            run_file,
            folder / "store",
            corpus,
            nodes=case.nodes,
            experts=case.experts,
            identity=identity,
            make=case.make,
        )
        points = list[tuple[int, float]]()
        for number in range(run_file.round.total):
            commit, *_ = simulation.run_round()
            if (loss := commit.document.heldout_loss) is not None:  # of the state before the round
                points.append((number * case.local_steps, loss))
        seconds = time.monotonic() - started
        load = measure(simulation, corpus, HELDOUT_BLOCKS)
        points.append((run_file.round.total * case.local_steps, simulation.heldout_loss(HELDOUT_BLOCKS)))
    curve = Curve(
        steps=[step for step, _ in points],
        losses=[loss for _, loss in points],
        tokens=simulation.head.document.tokens,
        planned_tokens=steps * case.nodes * case.batch_blocks * corpus.block_tokens,
        seconds=round(seconds, 1),
    )
    return curve, load


def read_case(path: Path, case: Case, seed: int, steps: int, *, own_text: bool) -> RunFile:
    """The `demo` preset with what differs in a case, written to `path`."""
    write_preset("demo", path)
    changes = {
        "run.seed": seed,
        "data.source": "files" if own_text else "builtin",
        "model.expert_size": 128,
        "round.total": steps // case.local_steps,
        "round.local_steps": case.local_steps,
        "round.batch_blocks": case.batch_blocks,
        "round.heldout_blocks": HELDOUT_BLOCKS,
        "round.overlap": False,
        "encoding.shared": "fp32",
        "encoding.experts": "fp32",
    }
    change_settings(path, {**changes, **case.changes})
    return read_run_file(path)
