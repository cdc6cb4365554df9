"""Does the method work? SPES beside ordinary training, full copies, DiLoCo and one node alone, at equal tokens.

Every case is a simulation in one process (`node.simulation`): the product's own engine, encodings, averages and merges,
all nodes of a run, no network. Held-out loss of Shakespeare in nats per byte, some seeds, and how busy the experts are.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.curves import Curve, draw
from bench.expert_load import Load, measure
from bench.merged_moments import MomentsSimulation, reset, scale
from bench.outer import Nesterov, OuterSimulation
from bench.results_file import RESULTS, write_results
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
MERGE = {"merge.alpha": 0.1, "merge.every_steps": LOCAL_STEPS, "merge.first_steps": STEPS // 2, "merge.donors": 2}
DILOCO = Nesterov(learning_rate=0.7, momentum=0.9)
"""As published (arXiv 2311.08105)."""

OVER_CENTRALISED_AT_MOST = 0.22
OVER_FULL_COPIES_AT_MOST = 0.09
INT8_WITHIN = 0.03
TWO_OWNERS_WITHIN = 0.026
"""Two owners are not worse than one, as far as that can be told: two seeds differ by as much."""
UNDER_ALONE_AT_LEAST = 0.03


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


CENTRALISED = Case("centralised", nodes=1, experts=EXPERTS, batch_blocks=NODES * BATCH_BLOCKS)
FULL_COPIES = Case("full copies", experts=EXPERTS, changes={"round.owners_per_expert": NODES})
SPES = Case("SPES")
INT8 = Case("SPES, int8", changes={"encoding.shared": "int8", "encoding.experts": "int8"})
TWO_OWNERS = Case("SPES, 2 owners", experts=2 * EXPERTS // NODES, changes={"round.owners_per_expert": 2})
ALONE = Case("one node alone", nodes=1, experts=EXPERTS)
CASES = (
    CENTRALISED,
    FULL_COPIES,
    Case(
        "DiLoCo, Nesterov 0.7/0.9", experts=EXPERTS, changes=FULL_COPIES.changes, make=partial(OuterSimulation, DILOCO)
    ),
    SPES,
    Case("SPES, merging", changes=MERGE),
    Case("SPES, merging, moments scaled", changes=MERGE, make=partial(MomentsSimulation, scale)),
    Case("SPES, merging, moments reset", changes=MERGE, make=partial(MomentsSimulation, reset)),
    INT8,
    TWO_OWNERS,
    Case("SPES, H 5", local_steps=5),
    Case("SPES, H 40", local_steps=40),
    ALONE,
)


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


def main() -> None:
    """Train every case with every seed, report, and exit with 1 if a claim does not hold."""
    options = _options()
    text, files = choose_text(options.data)
    try:
        outcomes = _compare(files, options)
    except SpesError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    checks = _checks({outcome.case.name: outcome for outcome in outcomes})
    print("", *_table(outcomes), "", sep="\n")
    print(*(f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in checks), "", sep="\n")
    figures = {
        "text": text,
        "steps": options.steps,
        "seeds": options.seeds,
        "heldout_blocks": HELDOUT_BLOCKS,
        "cases": [outcome.figures for outcome in outcomes],
        "checks": [{"claim": claim, "holds": holds} for claim, holds in checks],
    }
    print("figures", write_results("method", figures))
    curves = {outcome.case.name: outcome.curves[0] for outcome in outcomes}
    print("picture", draw(curves, f"Held-out loss, {text}, seed 0", RESULTS / "method.png"))
    sys.exit(not all(holds for _, holds in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.method", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"fewer than {STEPS} for a quick look")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="train every case so many times (default: 2)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="so many at a time, each on a core")
    return parser.parse_args()


def _compare(files: Sequence[Path], options: argparse.Namespace) -> list[Outcome]:
    cases = [case for case in CASES if not options.only or case.name in options.only]
    jobs = [(case, seed) for seed in range(options.seeds) for case in cases]
    found: dict[tuple[str, int], tuple[Curve, Load]] = {}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(_train, *zip(*jobs, strict=True), repeat(options.steps), repeat(files))
        for (case, seed), (curve, load) in zip(jobs, outcomes, strict=True):
            found[case.name, seed] = curve, load
            print(f"seed {seed}  {case.name:<30} {curve.losses[-1]:.4f} in {curve.seconds:.0f} s", flush=True)
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
    with tempfile.TemporaryDirectory(prefix="spes-method-") as name, closing(Identity.ephemeral()) as identity:
        folder = Path(name)
        run_file = _run_file(folder / "run.toml", case, seed, steps, own_text=bool(files))
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
        losses, tokens = list[float](), 0
        for _ in range(run_file.round.total):
            commit, *_ = simulation.run_round()
            assert commit.document.heldout_loss is not None
            losses.append(commit.document.heldout_loss)
            tokens = commit.document.tokens
        seconds = time.monotonic() - started
        load = measure(simulation, corpus, HELDOUT_BLOCKS)
        losses.append(simulation.heldout_loss(HELDOUT_BLOCKS))
    curve = Curve(
        steps=[number * case.local_steps for number in range(run_file.round.total + 1)],
        losses=losses,
        tokens=tokens,
        planned_tokens=steps * case.nodes * case.batch_blocks * corpus.block_tokens,
        seconds=round(seconds, 1),
    )
    return curve, load


def _run_file(path: Path, case: Case, seed: int, steps: int, *, own_text: bool) -> RunFile:
    """The `demo` preset with what differs here."""
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


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    reference = next((outcome.loss for outcome in outcomes if outcome.case is CENTRALISED), None)
    lines = [
        "| | held-out loss | each seed | over centralised | dead experts | busiest expert | own experts | seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for outcome in outcomes:
        each = " ".join(f"{curve.losses[-1]:.3f}" for curve in outcome.curves)
        over = f"{outcome.loss - reference:+.3f}" if reference is not None else "-"
        loads = outcome.loads
        own = f"{fmean(load.own for load in loads):.1%}" if outcome.case.experts < EXPERTS else "-"
        lines.append(
            f"| {outcome.case.name} | {outcome.loss:.3f} | {each} | {over} | {fmean(x.dead for x in loads):.1f} | "
            f"{fmean(x.most for x in loads):.1%} | {own} | {fmean(curve.seconds for curve in outcome.curves):.0f} |"
        )
    return lines


def _checks(found: Mapping[str, Outcome]) -> list[tuple[str, bool]]:
    """The claims about cases that were trained."""

    def over(case: Case, other: Case, most: float, what: str) -> list[tuple[str, bool]]:
        if case.name not in found or other.name not in found:
            return []
        gap = found[case.name].loss - found[other.name].loss
        return [(f"{case.name} {what} {other.name}: {gap:+.3f} (at most {most:+.3f})", gap <= most)]

    return [
        *over(SPES, CENTRALISED, OVER_CENTRALISED_AT_MOST, "over"),
        *over(SPES, FULL_COPIES, OVER_FULL_COPIES_AT_MOST, "over"),
        *over(INT8, SPES, INT8_WITHIN, "over"),
        *over(TWO_OWNERS, SPES, TWO_OWNERS_WITHIN, "over"),
        *over(SPES, ALONE, -UNDER_ALONE_AT_LEAST, "over"),
    ]


if __name__ == "__main__":
    main()
