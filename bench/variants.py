"""Can it be better? What might close the gap between SPES and ordinary training, at equal tokens, and what it sends.

The model, the text and the simulation are those of `bench.method`. First one change at a time, then some together.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.cases import EXPERTS, NODES, STEPS, Case, Checks, Outcome, compare, over, read_case
from bench.method import CENTRALISED, FULL_COPIES, SPES
from bench.outer import Nesterov, OuterSimulation
from bench.seldom_averaged import SeldomSimulation
from bench.shared_moments import SharedMomentsSimulation
from bench.unequal_steps import UnequalSimulation
from model.shards import layout
from swarm.codec import encoded_size
from swarm.shard_names import expert_of

ROUTERS = r"layer\.\d+\.shared\.2"
"""In the model of this benchmark: the router and the norms of a layer."""
ENDS = r"(embed|head)(\.\d+)?"


def once(shard: str) -> float:
    """Every shard travels once in a round."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A case, and what it sends."""

    case: Case
    travels: Callable[[str], float] = once
    """How often a shard travels in a round."""


def variant(name: str, *, travels: Callable[[str], float] = once, **case: Any) -> Variant:
    """A change of SPES."""
    case["changes"] = {"round.heldout_blocks": 0, **case.get("changes", {})}
    return Variant(replace(SPES, name=name, **case), travels)


def seldom(shards: str, every: int) -> dict[str, Any]:
    """Some shards in every k-th round only."""
    return {
        "make": partial(SeldomSimulation, shards, every),
        "travels": lambda name: 1 / every if re.fullmatch(shards, name) else 1.0,
    }


def encoded(encoding: str, **changes: Any) -> dict[str, Any]:
    """All that travels in an encoding."""
    return {"changes": {"encoding.shared": encoding, "encoding.experts": encoding, **changes}}


def owners(count: int, encoding: str = "fp32", **changes: Any) -> dict[str, Any]:
    """So many nodes for each expert."""
    return {
        "experts": EXPERTS * count // NODES,
        **encoded(encoding, **{"round.owners_per_expert": count, **changes}),
    }


def with_moments(shard: str) -> float:
    """Two moments travel with every shared value."""
    return 3.0 if expert_of(shard) is None else 1.0


def rate(factor: float) -> dict[str, Any]:
    """The inner learning rate, times a factor."""
    return {"optimizer.learning_rate": round(factor * 3e-3, 6)}


def outer(*settings: Any) -> dict[str, Any]:
    """Averages through an outer optimiser."""
    return {"make": partial(OuterSimulation, Nesterov(*settings))}


MIXED = {"encoding.shared": "int8", "encoding.experts": "int4"}
BIG_BATCHES: dict[str, Any] = {"nodes": 1, "experts": EXPERTS, "batch_blocks": CENTRALISED.batch_blocks}

VARIANTS = (
    Variant(CENTRALISED),
    variant("centralised, outer rate 0.7", **BIG_BATCHES, **outer(0.7, 0.0)),
    Variant(FULL_COPIES),
    Variant(SPES),
    variant("rate x1.5", changes=rate(1.5)),
    variant("outer rate 0.5", **outer(0.5, 0.0)),
    variant("outer rate 0.7", **outer(0.7, 0.0)),
    variant("outer rate 0.7, shared alone", **outer(0.7, 0.0, False)),
    variant("outer rate 0.7, rate x1.5", changes=rate(1.5), **outer(0.7, 0.0)),
    variant("outer rate 1.3", **outer(1.3, 0.0)),
    variant("outer momentum 0.2", **outer(1.0, 0.2)),
    variant("moments averaged", make=SharedMomentsSimulation, travels=with_moments),
    variant("H 5, int8", local_steps=5, **encoded("int8")),
    variant("H 2, int8", local_steps=2, **encoded("int8")),
    variant("H 2, int8, outer rate 0.7", local_steps=2, **encoded("int8"), **outer(0.7, 0.0)),
    variant("2 owners, int8", **owners(2, "int8")),
    variant("4 owners, int8", **owners(4, "int8")),
    variant("routers every 4th round", **seldom(ROUTERS, 4)),
    variant("embedding and head every 4th", **seldom(ENDS, 4)),
    variant("a slow node, weights by tokens", make=partial(UnequalSimulation, 3.0, True)),
    variant("a slow node, equal weights", make=partial(UnequalSimulation, 3.0, False)),
    variant("H 5, 2 owners, int8, outer rate 0.7", local_steps=5, **owners(2, "int8"), **outer(0.7, 0.0)),
    variant("H 2, 2 owners, experts int4", local_steps=2, **owners(2, **MIXED)),
    variant("H 2, 2 owners, experts int4, outer rate 0.7", local_steps=2, **owners(2, **MIXED), **outer(0.7, 0.0)),
)


BEST = next(each for each in VARIANTS if each.case.name == "H 2, 2 owners, experts int4")
"""Of those that send no more than SPES, without the outer rate, which helps centralised training, too."""
OVER_CENTRALISED_AT_MOST = 0.10


def main() -> None:
    """Train every case with every seed, and report."""
    compare("variants", __doc__, [variant.case for variant in VARIANTS], _report)


def _report(found: Mapping[str, Outcome]) -> Checks:
    print("", *_table(found), sep="\n")
    return over(found, BEST.case, CENTRALISED, OVER_CENTRALISED_AT_MOST)


def _table(found: Mapping[str, Outcome]) -> list[str]:
    lines = ["| | held-out loss | each seed | over centralised | sent |", "|---|---:|---|---:|---:|"]
    reference = found[CENTRALISED.name].loss if CENTRALISED.name in found else None
    for each in VARIANTS:
        if outcome := found.get(each.case.name):
            gap = f"{outcome.loss - reference:+.3f}" if reference is not None else "-"
            lines.append(f"| {each.case.name} | {outcome.loss:.3f} | {outcome.each} | {gap} | {sent(each):.2f} |")
    return lines


def sent(variant: Variant) -> float:
    """Bytes that a node sends in the run, mean over the nodes, as a multiple of those of SPES."""
    return _bytes(variant) / _bytes(Variant(SPES))


def _bytes(variant: Variant) -> float:
    """A shard goes from all owners to one of them that averages it, and from there to all nodes."""
    case = variant.case
    with TemporaryDirectory() as folder:
        run = read_case(Path(folder, "run.toml"), case, 0, STEPS, own_text=False)
    total = 0.0
    for shard in layout(run.model):
        shared = expert_of(shard.name) is None
        count = case.nodes if shared else min(run.round.owners_per_expert, case.nodes)
        copies = (count - 1 + case.nodes - 1) / case.nodes
        encoding = run.encoding.shared if shared else run.encoding.experts
        total += copies * variant.travels(shard.name) * encoded_size(encoding, shard.numel)
    return total * run.round.total


if __name__ == "__main__":
    main()
