"""What does a lost node cost the others? Real daemons on this box lose one of four, in each phase of a round.

killed   SIGKILL for all of its processes; then it is started again from its disk
stopped  SIGSTOP for all of its processes; then SIGCONT, after which it must come back by itself

At the end all nodes and the rendezvous are killed at once, and started again.
"""

import argparse
import contextlib
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.faults import MOMENTS, Case, Field, Outage
from bench.results_file import write_results
from bootstrap.run_file import change_settings, write_preset
from model.errors import SpesError
from node.local_swarm import LocalSwarm

NODES = 4
LOCAL_STEPS = 10
"""For rounds of about five seconds on two cores."""
MARGIN_SECONDS = 5
LEASE_SECONDS = 10
ENCODING = "int8"
COST_AT_MOST = 1.5
"""Rounds that the survivors may lose."""
BACK_AT_MOST = 2
"""Rounds until a node contributes again that was started from its disk: the one in progress, and the next."""
UNOWNED_AT_MOST = 1
"""Rounds in a row in which an expert may have no owner that contributes."""


def main() -> None:
    """Lose nodes in every way, report, and exit with 1 if a claim does not hold."""
    options = _options()
    started = time.monotonic()
    cases: list[Case] = []
    outage, trouble = None, ""
    with _folder(options.keep) as folder, LocalSwarm(folder) as swarm:
        run_file = folder / "run.toml"
        _write_run_file(run_file, options.steps)
        try:
            field = Field(swarm, run_file, NODES)
            for moment, how in itertools.product(MOMENTS, ("killed", "stopped")):
                if re.search(options.only, f"{how} {moment.name}"):
                    cases.append(field.hit(moment, how))
                    print(_row(cases[-1]), flush=True)
                    _write(cases, None, "", options.steps, started)  # all of it takes long: what is known is kept
            if re.search(options.only, "outage"):
                outage = field.fail_altogether()
        except SpesError as error:  # what was measured before is still worth its report
            trouble = str(error)
    checks = _checks(cases, outage, trouble)
    print("", *_table(cases), "", *_outage_lines(outage), "", *checks, "", sep="\n")
    print("figures", _write(cases, outage, trouble, options.steps, started))
    sys.exit(any(check.startswith("FAILED") for check in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="these cases, such as 'stopped leader' or 'outage'")
    parser.add_argument("--steps", type=int, default=LOCAL_STEPS, metavar="N", help="local steps in a round")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for what the processes leave")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="spes-bench-") as folder:
            yield Path(folder)
    else:
        keep.mkdir(parents=True)
        yield keep


def _write_run_file(path: Path, steps: int) -> None:
    """The `demo` preset with what differs here."""
    write_preset("demo", path)
    changes = {
        "round.total": 0,
        "round.local_steps": steps,
        "round.start_nodes": NODES,
        "round.margin_seconds": MARGIN_SECONDS,
        "round.lease_seconds": LEASE_SECONDS,
        "encoding.shared": ENCODING,
        "encoding.experts": ENCODING,
    }
    change_settings(path, changes)


def _write(cases: Sequence[Case], outage: Outage | None, trouble: str, steps: int, started: float) -> Path:
    figures = {
        "nodes": NODES,
        "local_steps": steps,
        "margin_seconds": MARGIN_SECONDS,
        "lease_seconds": LEASE_SECONDS,
        "encoding": ENCODING,
        "seconds": round(time.monotonic() - started),
        "cases": [asdict(case) for case in cases],
        "outage": asdict(outage) if outage is not None else None,
        "checks": _checks(cases, outage, trouble),
    }
    return write_results("recovery", figures)


def _row(case: Case) -> str:
    sent = {None: "", True: " (it got out)", False: " (it did not get out)"}[case.sent]
    cells = [
        f"{case.how}: {case.moment}{sent}",
        f"{case.round_seconds:.1f} s",
        f"{case.next_commit:+.2f}",
        f"{case.cost:+.2f} ({case.cost * case.round_seconds:+.1f} s)",
        "yes" if case.same_bits else "NO",
        str(case.unowned),
        f"{case.back} ({case.back_seconds:.1f} s)",
    ]
    return f"| {' | '.join(cells)} |"


def _table(cases: Sequence[Case]) -> list[str]:
    return [
        "| lost node | a round | next commit | cost | same bits | without owner | back after |",
        "|---|---:|---:|---:|---|---:|---:|",
        *map(_row, cases),
    ]


def _outage_lines(outage: Outage | None) -> list[str]:
    if outage is None:
        return []
    after = f"{outage.joined_seconds:+.1f} s after the last node had joined"
    return [
        f"all killed at round {outage.round} (a round took {outage.round_seconds:.1f} s) and started again:",
        f"next commit {outage.seconds:.1f} s after the first start, {after}, by {outage.contributors} nodes;",
        f"{'the same chain' if outage.same_chain else 'ANOTHER CHAIN'}; "
        f"all {NODES} contribute in round {outage.round + outage.full_rounds}",
    ]


def _checks(cases: Sequence[Case], outage: Outage | None, trouble: str) -> list[str]:
    restarted = [case for case in cases if case.how == "killed"]
    claims = [
        (f"no case costs the survivors more than {COST_AT_MOST} rounds", all(c.cost <= COST_AT_MOST for c in cases)),
        ("all have the same bits in every round", all(c.same_bits for c in cases)),
        (
            f"no expert is without an owner for more than {UNOWNED_AT_MOST} round",
            all(c.unowned <= UNOWNED_AT_MOST for c in cases),
        ),
        (
            "a node that is started again contributes in the round after the one in progress",
            all(case.back <= BACK_AT_MOST for case in restarted),
        ),
        ("after an outage the run goes on where it was", outage is None or outage.same_chain),
        (f"the benchmark could go on{f': {trouble}' if trouble else ''}", not trouble),
    ]
    return [f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in claims]


if __name__ == "__main__":
    main()
