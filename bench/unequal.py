"""What does one weak line cost the others? Four real daemons behind equal lines, of which one becomes a tenth.

The node behind it should still take part, weigh less, and not hold the others up. Needs a lab of hosts, so root.
"""

import argparse
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.results_file import write_results
from bench.watched_node import Node, until
from bootstrap.run_file import change_settings, write_preset
from model.errors import SpesError
from node.lab.lab import Lab, unavailable
from node.local_swarm import LocalSwarm, Place

NODES = 4
RATE_MBIT = 20.0
WEAK_MBIT = 2.0
DELAY_MS = 20.0
LOCAL_STEPS = 90
"""For rounds of more than half a minute on two cores: a weak line needs 14 s for what a node has to send in a round,
and as long for what it has to receive."""
SETTLING_ROUNDS = 2
"""After a line has changed."""
ROUNDS = 4
PATIENCE_SECONDS = 600.0
LONGER_AT_MOST = 1.5
"""Times as long as before a round may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some rounds, as one of the strong nodes saw them."""

    lines: str
    round_seconds: float
    """Median."""
    counted: int
    """Rounds that count the node whose line is weak, or will be."""
    rounds: int
    share: float
    """Of all tokens of these rounds, what that node has trained; a quarter is what everybody has."""
    busy: float
    """Part of their time that all nodes spent in training steps, a mean."""
    sent: float
    """Bytes that the node sent in a round, with everything that was on its line."""
    received: float


def main() -> None:
    """Measure, report, and exit with 1 if a claim does not hold."""
    argparse.ArgumentParser(prog="python -m bench.unequal", description=__doc__).parse_args()
    if reason := unavailable():
        print(f"bench: {reason}", file=sys.stderr)
        sys.exit(2)
    with (
        tempfile.TemporaryDirectory(prefix="spes-bench-") as folder,
        Lab(NODES + 1, delay_ms=DELAY_MS, rate_mbit=RATE_MBIT) as lab,
        LocalSwarm(Path(folder)) as swarm,
    ):
        try:
            phases = _measure(lab, swarm, Path(folder))
        except SpesError as error:
            print(f"bench: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    equal, weak = phases
    checks = [
        (
            f"a weak line makes rounds at most {LONGER_AT_MOST} times as long",
            weak.round_seconds <= LONGER_AT_MOST * equal.round_seconds,
        ),
        ("the node behind it takes part in at least half of the rounds", 2 * weak.counted >= weak.rounds),
        ("and weighs less there", weak.share < equal.share),
    ]
    print("", *_table(phases), "", *(f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in checks), sep="\n")
    figures = {
        "rate_mbit": RATE_MBIT,
        "weak_mbit": WEAK_MBIT,
        "delay_ms": DELAY_MS,
        "local_steps": LOCAL_STEPS,
        "phases": [asdict(phase) for phase in phases],
        "checks": [{"claim": claim, "holds": holds} for claim, holds in checks],
    }
    print("\nfigures", write_results("unequal", figures))
    sys.exit(not all(holds for _, holds in checks))


def _measure(lab: Lab, swarm: LocalSwarm, folder: Path) -> list[Phase]:
    places = {host: Place(lab.address(host), functools.partial(lab.exec, host)) for host in lab.hosts}
    swarm.start_rendezvous(_write_run_file(folder), place=places[NODES + 1])
    nodes = [Node(swarm.start_node(f"node-{host}", place=places[host])) for host in range(1, NODES + 1)]
    for node in nodes:
        until(lambda node=node: node.has_joined, f"{node.box.name} joins")  # type: ignore[misc]
        node.watch()
    until(lambda: any(line["nodes"] == NODES for line in nodes[0].history()), "a round of all nodes", PATIENCE_SECONDS)
    phases = [_phase("all equal", lab, nodes)]
    lab.set(NODES, rate_mbit=WEAK_MBIT)
    phases.append(_phase(f"one with {WEAK_MBIT / RATE_MBIT:g} of the others' rate", lab, nodes))
    return phases


def _phase(lines: str, lab: Lab, nodes: Sequence[Node]) -> Phase:
    witness, weak = nodes[0], nodes[-1]

    def reach(number: int) -> None:
        until(lambda: witness.round >= number, f"round {number}", PATIENCE_SECONDS)

    first = witness.round + SETTLING_ROUNDS
    reach(first)
    before = lab.traffic(NODES)
    reach(first + ROUNDS)
    traffic = lab.traffic(NODES) - before
    numbers = range(first + 1, first + ROUNDS + 1)
    commits = [commit.document for number in numbers if (commit := witness.commit(number)) is not None]
    times = [witness.adopted(number) for number in range(first, first + ROUNDS + 1)]
    shares = [commit.shares for commit in commits]
    phase = Phase(
        lines=lines,
        round_seconds=statistics.median(later - earlier for earlier, later in itertools.pairwise(times)),
        counted=sum(weak.id in share for share in shares),
        rounds=len(commits),
        share=sum(share[weak.id].tokens for share in shares if weak.id in share)
        / sum(each.tokens for share in shares for each in share.values()),
        busy=statistics.fmean(commit.busy for commit in commits),
        sent=traffic.sent_payload / ROUNDS,
        received=traffic.received_payload / ROUNDS,
    )
    print(_row(phase), flush=True)
    return phase


def _write_run_file(folder: Path) -> Path:
    """The `demo` preset without an end, with longer rounds."""
    path = folder / "run.toml"
    write_preset("demo", path)
    changes = {"total": 0, "local_steps": LOCAL_STEPS, "start_nodes": NODES, "margin_seconds": 20}
    change_settings(path, {f"round.{key}": value for key, value in changes.items()})
    return path


def _row(phase: Phase) -> str:
    cells = (
        phase.lines,
        f"{phase.round_seconds:.1f} s",
        f"{phase.counted} of {phase.rounds}",
        f"{phase.share:.0%}",
        f"{phase.busy:.0%}",
        f"{phase.sent / 1e6:.2f} MB",
        f"{phase.received / 1e6:.2f} MB",
    )
    return f"| {' | '.join(cells)} |"


def _table(phases: Sequence[Phase]) -> list[str]:
    return [
        "| lines | a round | it is counted | of the tokens | busy | it sends | it receives |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *map(_row, phases),
    ]


if __name__ == "__main__":
    main()
