"""What do lossy encodings and overlap cost a swarm's learning?

Four nodes with two experts each, simulated in one process: the product's engine trains, and the product's codec makes
every contribution, average and commit, so that nothing but the network is left out. All cases train on the same tokens.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from bench.curves import Curve, draw
from bench.results_file import RESULTS, write_results
from bench.text import choose_text
from bootstrap.run_file import RunFile, read_preset
from model.engine import Engine
from model.errors import SpesError
from model.initial import initial_values
from model.shards import Shard, layout
from node.corpus import Corpus, load_corpus
from swarm import codec
from swarm.manifest import Encoding
from swarm.ranking import ranked
from swarm.store import map_values

NODES = 4
ROUNDS = 20
"""Of the `demo` preset: its learning rate reaches the floor in the last one."""
EXPERT_SIZE = 128
BATCH_BLOCKS = 4
"""Both half of the preset's, so that a run takes a minute."""
HELDOUT_BLOCKS = 192
EVALUATED_ROUNDS = 4
"""Rounds between two points of a curve."""
WITHIN = 0.01
"""Nats per byte that an encoding may cost to be the default."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to synchronise."""

    name: str
    shared: Encoding = "fp32"
    experts: Encoding = "fp32"
    feedback: bool = True
    """Whether what an encoding leaves out is sent later."""
    delay: int = 0
    """Local steps that a node goes on between its snapshot and the commit."""
    turn: int = 0
    """By how many nodes the experts are dealt further on: another swarm of the same kind, which shows the noise."""

    def encoding(self, shard: Shard) -> Encoding:
        """What travels of a shard."""
        return self.shared if shard.expert is None else self.experts


REFERENCE = Case("fp32")
CASES = (
    REFERENCE,
    Case("fp32, experts dealt anew", turn=1),
    Case("bf16", "bf16", "bf16"),
    Case("int8", "int8", "int8"),
    Case("int8 shared, int4 experts", "int8", "int4"),
    Case("int4", "int4", "int4"),
    Case("int8, no feedback", "int8", "int8", feedback=False),
    Case("int4, no feedback", "int4", "int4", feedback=False),
    Case("fp32, 2 steps ahead", delay=2),
    Case("fp32, 5 steps ahead", delay=5),
    Case("int8, 2 steps ahead", "int8", "int8", delay=2),
    Case("int8, 5 steps ahead", "int8", "int8", delay=5),
)
CANDIDATES = tuple(case for case in CASES if case.feedback and not case.delay and not case.turn)
"""For the default encoding."""


class Node:
    """A node without its daemon: an engine, and the files in its folder."""

    def __init__(self, number: int, case: Case, run: RunFile, corpus: Corpus, folder: Path) -> None:
        per_node = run.model.num_experts // NODES
        first = (number + case.turn) % NODES * per_node
        self.engine = Engine(run.model, run.loss, run.optimizer, experts=range(first, first + per_node))
        self.trained = frozenset(self.engine.trained_shards())
        self._number = number
        self._case = case
        self._rounds = run.round
        self._corpus = corpus
        self._folder = folder
        self._steps = 0
        folder.mkdir()

    def train(self, until: int) -> None:
        """Take local steps until there have been so many."""
        for step in range(self._steps, until):
            self.engine.train_step(self._corpus.blocks(self._blocks(step)), step)
        self._steps = until

    def _blocks(self, step: int) -> range:
        """The ids of a step: a round hands each node a range of its own."""
        number, within = divmod(step, self._rounds.local_steps)
        first = (number * NODES + self._number) * self._rounds.local_steps + within
        return range(first * BATCH_BLOCKS, (first + 1) * BATCH_BLOCKS)

    def take_snapshot(self) -> None:
        """Write every trained shard to a file."""
        for name in self.trained:
            self.engine.read(name).tofile(self._snapshot(name))

    def contribute(self, encoding: Encoding, name: str, base: Path) -> Path:
        """Encode what the snapshot has of a shard; returns the file."""
        encoded, residual, old = self._files(name, "contribution")
        with encoded.open("wb") as sink:
            codec.contribute(encoding, self._snapshot(name), base, old, sink, residual)
        return encoded

    def average(self, encoding: Encoding, name: str, contributions: Sequence[tuple[int, Path]], base: Path) -> Path:
        """Encode the mean of contributions; returns the file."""
        encoded, residual, old = self._files(name, "average")
        with encoded.open("wb") as sink:
            codec.average(encoding, contributions, base, old, sink, residual)
        return encoded

    def fold(self, name: str, committed: np.ndarray) -> None:
        """Take over a shard of the commit, with what was trained since the snapshot on top."""
        if name in self.trained and self._case.delay:
            committed = committed + (self.engine.read(name) - map_values(self._snapshot(name)))
        self.engine.load(name, committed)

    def _snapshot(self, name: str) -> Path:
        return self._folder / f"{name}.snapshot"

    def _files(self, name: str, kind: str) -> tuple[Path, Path, Path | None]:
        """Files for the bytes and for what they leave out; the latter again if it is there and to be sent."""
        residual = self._folder / f"{name}.{kind}.residual"
        old = residual if self._case.feedback and residual.exists() else None
        return self._folder / f"{name}.{kind}", residual, old


class Swarm:
    """Nodes that synchronise through files."""

    def __init__(self, case: Case, run: RunFile, corpus: Corpus, folder: Path) -> None:
        self._case = case
        self._run = run
        self._corpus = corpus
        self._folder = folder
        self._shards = layout(run.model)
        self._nodes = {f"{number}": Node(number, case, run, corpus, folder / f"{number}") for number in range(NODES)}
        self._reader = Engine(run.model, run.loss, run.optimizer)
        for shard, values in initial_values(run.model, run.run.seed):
            values.tofile(folder / shard.name)
            for node in self._nodes.values():
                node.engine.load(shard.name, values)

    def train(self, rounds: int) -> Iterator[tuple[int, float]]:
        """Yields optimiser steps of every node and held-out loss, from the first weights to the last commit."""
        steps = self._run.round.local_steps
        yield 0, self._heldout_loss()
        for number in range(1, rounds + 1):
            for node in self._nodes.values():
                node.train(until=number * steps)
                node.take_snapshot()
                node.train(until=number * steps + (self._case.delay if number < rounds else 0))
            for shard in self._shards:
                self._synchronise(shard, number)
            if number % EVALUATED_ROUNDS == 0 or number == rounds:
                yield number * steps, self._heldout_loss()

    def _synchronise(self, shard: Shard, number: int) -> None:
        name, encoding, base = shard.name, self._case.encoding(shard), self._folder / shard.name
        owners = {key: node for key, node in self._nodes.items() if name in node.trained}
        contributions = [(1, node.contribute(encoding, name, base)) for node in owners.values()]
        if len(owners) == 1:
            ((_, result),) = contributions
        else:
            # another reducer in each round, so that what an average leaves out comes late
            reducer, *_ = ranked(owners, name)
            result = owners[reducer].average(encoding, name, contributions, base)
        new = base.with_name(f"{name}.new")
        with new.open("wb") as sink:
            codec.apply(encoding, base, result, sink)
        new.replace(base)
        for node in self._nodes.values():
            node.fold(name, map_values(base))

    def _heldout_loss(self) -> float:
        """Of the commit, nats per byte."""
        for shard in self._shards:
            self._reader.load(shard.name, map_values(self._folder / shard.name))
        found = self._reader.evaluate(self._corpus.heldout_blocks(HELDOUT_BLOCKS))
        return found.nats / found.tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to, over all seeds."""

    case: Case
    share: float
    """Bytes of the whole model as it travels, 1 for fp32."""
    curves: list[Curve]
    """One for each seed."""
    over_fp32: list[float]
    """Final loss minus that of fp32, for each seed."""

    @property
    def loss(self) -> float:
        """Mean final loss."""
        return fmean(curve.losses[-1] for curve in self.curves)

    def __str__(self) -> str:
        each = " ".join(f"{over:+.3f}" for over in self.over_fp32)
        return f"{self.case.name:<28}{self.share:>8.3f}{self.loss:>8.3f}{fmean(self.over_fp32):>+10.3f}   {each}"


def main() -> None:
    """Train every case with every seed, and report."""
    options = _options()
    text, files = choose_text(options.data)
    try:
        outcomes = _compare(files, options.seeds, options.rounds, options.processes)
    except SpesError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    chosen = default(outcomes)
    print(f"\n{'':<28}{'bytes':>8}{'loss':>8}{'over fp32':>10}   for each seed", *outcomes, "", sep="\n")
    print(f"the smallest within {WITHIN} of fp32: {chosen.case.name}")
    figures = {
        "text": text,
        "rounds": options.rounds,
        "seeds": options.seeds,
        "heldout_blocks": HELDOUT_BLOCKS,
        "batch_blocks": BATCH_BLOCKS,
        "default": chosen.case.name,
        "cases": [asdict(outcome) | {"loss": outcome.loss} for outcome in outcomes],
    }
    print("figures", write_results("encodings", figures))
    curves = {outcome.case.name: outcome.curves[0] for outcome in outcomes if outcome.case.feedback}
    print("picture", draw(curves, f"Held-out loss, {text}, seed 0", RESULTS / "encodings.png"))


def default(outcomes: Sequence[Outcome]) -> Outcome:
    """The smallest encoding that costs at most WITHIN; fp32 when none does."""
    good = [each for each in outcomes if each.case in CANDIDATES and fmean(each.over_fp32) <= WITHIN]
    return min(good, key=lambda outcome: outcome.share)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.encodings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"fewer than {ROUNDS} for a quick look")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train every case so many times")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="train so many at a time, each on a core")
    return parser.parse_args()


def _compare(files: Sequence[Path], seeds: int, rounds: int, processes: int) -> list[Outcome]:
    jobs = [(case, seed) for seed in range(seeds) for case in CASES]
    curves: dict[tuple[Case, int], Curve] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (case, seed), curve in zip(
            jobs, pool.map(_train, *zip(*jobs, strict=True), repeat(rounds), repeat(files)), strict=True
        ):
            curves[case, seed] = curve
            print(f"seed {seed}  {case.name:<28} {curve.losses[-1]:.4f} in {curve.seconds:.0f} s", flush=True)
    shards = layout(_run(seed=0).model)
    return [
        Outcome(
            case,
            share=_size(case, shards) / _size(REFERENCE, shards),
            curves=[curves[case, seed] for seed in range(seeds)],
            over_fp32=[curves[case, seed].losses[-1] - curves[REFERENCE, seed].losses[-1] for seed in range(seeds)],
        )
        for case in CASES
    ]


def _size(case: Case, shards: Sequence[Shard]) -> int:
    return sum(codec.encoded_size(case.encoding(shard), shard.numel) for shard in shards)


def _run(seed: int, *, own_text: bool = False) -> RunFile:
    """The `demo` preset with what differs here."""
    run = read_preset("demo")
    return run.model_copy(
        update={
            "run": run.run.model_copy(update={"seed": seed}),
            "model": run.model.model_copy(update={"expert_size": EXPERT_SIZE}),
            "data": run.data.model_copy(update={"source": "files" if own_text else "builtin"}),
        }
    )


def _train(case: Case, seed: int, rounds: int, files: Sequence[Path]) -> Curve:
    """One run from its first weights to its last commit, on one core."""
    started = time.monotonic()
    torch.set_num_threads(1)
    run = _run(seed, own_text=bool(files))
    corpus = load_corpus(run.data, seed, files)
    with tempfile.TemporaryDirectory(prefix="spes-bench-") as folder:
        points = list(Swarm(case, run, corpus, Path(folder)).train(rounds))
    tokens = rounds * NODES * run.round.local_steps * BATCH_BLOCKS * corpus.block_tokens
    return Curve(
        steps=[step for step, _ in points],
        losses=[loss for _, loss in points],
        tokens=tokens,
        planned_tokens=tokens,
        seconds=round(time.monotonic() - started, 1),
    )


if __name__ == "__main__":
    main()
