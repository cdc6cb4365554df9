"""What does it save to train a quarter of the experts? Ordinary training and ours, side by side on one model.

Every contestant takes the same steps in turn, round after round, so that what else the machine does hits all of them;
the least time of each phase counts. Memory is what tensors take at the peak of a step, counted from their making.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.results_file import write_results
from model.architecture import FAMILIES, build_config
from model.engine import Engine
from model.initial import initial_values
from model.memory import Meter
from model.settings import ComputeSettings, LossSettings, ModelSettings, OptimizerSettings
from model.shards import layout

MODEL = ModelSettings(
    vocab_size=259,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    expert_size=512,
    num_experts=16,
    experts_per_token=2,
    max_length=128,
)
SEQUENCES, LENGTH = 8, 128
OWNED = (0, 5, 10, 15)
"""A quarter of the experts."""
OPTIMIZER = OptimizerSettings(learning_rate=1e-3)
BEST_FULL = "transformers grouped_mm"

PEAK_AT_MOST = 0.60
FRUGAL_PEAK_AT_MOST = 0.45
STEP_AT_MOST = 0.80


@dataclass(slots=True)
class Contestant:
    """One way to train, and what was measured of it: least seconds of each phase, peak bytes."""

    name: str
    build: Callable[[], "Trainee"]
    forward: float = field(default=float("inf"))
    backward: float = field(default=float("inf"))
    optimizer: float = field(default=float("inf"))
    peak: int = 0

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.forward + self.backward + self.optimizer


class Trainee(Protocol):
    """A model in training, whose step can be taken in phases."""

    def loss(self, tokens: Tensor) -> Tensor:
        """The training loss on `tokens` [b, S+1]."""

    def update(self) -> None:
        """Clip, take the optimiser's step, drop the gradient."""


class Plain:
    """transformers' model with its own loss, all of it trained with fused AdamW."""

    def __init__(self, experts_implementation: str) -> None:
        config = build_config(MODEL)
        config._experts_implementation = experts_implementation
        self.model = FAMILIES[MODEL.family].model(config)
        with torch.no_grad():
            for shard, values in initial_values(MODEL, seed=0):
                for piece, part in zip(shard.pieces, shard.split(values), strict=True):
                    self.model.get_parameter(piece.parameter)[piece.start : piece.stop] = torch.from_numpy(part)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def loss(self, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].contiguous()
        output = self.model(tokens[:, :-1], labels=targets, shift_labels=targets, output_router_logits=True)
        loss: Tensor = output.loss
        return loss

    def update(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Spes:
    """The product's engine with a part of the experts."""

    def __init__(self, compute: ComputeSettings, owned: Sequence[int]) -> None:
        self.engine = Engine(MODEL, LossSettings(), OPTIMIZER, experts=owned, compute=compute)
        for shard, values in initial_values(MODEL, seed=0):
            self.engine.load(shard.name, values)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.engine.loss(tokens)[0]

    def update(self) -> None:
        self.engine.update(0, self.engine.gradient_norm())


def main() -> None:
    """Measure, report, and exit with 1 if a claim does not hold."""
    options = _options()
    torch.set_num_threads(options.threads)
    contestants = [
        Contestant("transformers eager", lambda: Plain("eager")),
        Contestant(BEST_FULL, lambda: Plain("grouped_mm")),
        Contestant("all experts", lambda: _spes(range(MODEL.num_experts))),
        Contestant("a quarter", lambda: _spes()),
        Contestant("a quarter, recompute", lambda: _spes(recompute=True)),
        Contestant("a quarter, checkpoint", lambda: _spes(checkpoint=True)),
        Contestant("a quarter, int8", lambda: _spes(frozen="int8")),
        Contestant("a quarter, int8, recompute", lambda: _spes(frozen="int8", recompute=True)),
        Contestant(
            "a quarter, int8, recompute, 8-bit AdamW", lambda: _spes(frozen="int8", recompute=True, adam_8bit=True)
        ),
        Contestant("one of 16", lambda: _spes(OWNED[:1])),
    ]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, MODEL.vocab_size, (SEQUENCES, LENGTH + 1)))
    for contestant in contestants:
        contestant.peak = _peak(contestant, tokens)
    trainees = [contestant.build() for contestant in contestants]
    for number in range(options.steps):
        print(f"\rstep {number + 1} of {options.steps}", end="", file=sys.stderr)
        for contestant, trainee in zip(contestants, trainees, strict=True):
            _time_step(contestant, trainee, tokens)
    print(file=sys.stderr)
    print("\n".join(_table(contestants)))
    checks = _checks({contestant.name: contestant for contestant in contestants})
    print("", *(f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in checks), "", sep="\n")
    figures = {
        "parameters": sum(shard.numel for shard in layout(MODEL)),
        "tokens_per_step": SEQUENCES * LENGTH,
        "threads": options.threads,
        "steps": options.steps,
        "contestants": {
            c.name: {**{k: v for k, v in asdict(c).items() if k not in ("name", "build")}, "step": c.step}
            for c in contestants
        },
        "checks": [{"claim": claim, "holds": holds} for claim, holds in checks],
    }
    print("figures", write_results("engine", figures))
    sys.exit(not all(holds for _, holds in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each contestant (default: 20)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    return parser.parse_args()


def _spes(owned: Sequence[int] = OWNED, **compute: object) -> Spes:
    return Spes(ComputeSettings.model_validate(compute), owned)


def _peak(contestant: Contestant, tokens: Tensor) -> int:
    """Bytes of tensors alive at the peak of a second step: values, moments, gradients and activations."""
    meter = Meter()
    with meter:
        trainee = contestant.build()
        for _ in range(2):
            meter.mark()
            trainee.loss(tokens).backward()  # type: ignore[no-untyped-call]
            trainee.update()
    return meter.peak


def _time_step(contestant: Contestant, trainee: Trainee, tokens: Tensor) -> None:
    start = time.perf_counter()
    loss = trainee.loss(tokens)
    forward = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    backward = time.perf_counter()
    trainee.update()
    end = time.perf_counter()
    contestant.forward = min(contestant.forward, forward - start)
    contestant.backward = min(contestant.backward, backward - forward)
    contestant.optimizer = min(contestant.optimizer, end - backward)


def _table(contestants: Sequence[Contestant]) -> list[str]:
    best = next(contestant for contestant in contestants if contestant.name == BEST_FULL)
    lines = [
        f"| {'':<40} | peak MB | of full | forward ms | backward ms | optimiser ms | step ms | of full | tokens/s |",
        f"|{'-' * 42}|" + "---:|" * 8,
    ]
    for each in contestants:
        lines.append(
            f"| {each.name:<40} | {each.peak / 1e6:7.1f} | {each.peak / best.peak:7.2f} | {each.forward * 1e3:10.0f} | "
            f"{each.backward * 1e3:11.0f} | {each.optimizer * 1e3:12.0f} | {each.step * 1e3:7.0f} | "
            f"{each.step / best.step:7.2f} | {SEQUENCES * LENGTH / each.step:8.0f} |"
        )
    return lines


def _checks(by_name: dict[str, Contestant]) -> list[tuple[str, bool]]:
    full, quarter = by_name[BEST_FULL], by_name["a quarter"]
    frugal = by_name["a quarter, int8, recompute"]
    fastest = min(full.step, by_name["transformers eager"].step)
    return [
        (
            f"peak with a quarter <= {PEAK_AT_MOST} of full: {quarter.peak / full.peak:.2f}",
            quarter.peak <= PEAK_AT_MOST * full.peak,
        ),
        (
            f"with int8 and recompute <= {FRUGAL_PEAK_AT_MOST}: {frugal.peak / full.peak:.2f}",
            frugal.peak <= FRUGAL_PEAK_AT_MOST * full.peak,
        ),
        (
            f"step with a quarter <= {STEP_AT_MOST} of the fastest full: {quarter.step / fastest:.2f}",
            quarter.step <= STEP_AT_MOST * fastest,
        ),
    ]


if __name__ == "__main__":
    main()
