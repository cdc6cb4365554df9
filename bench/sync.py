"""How long does one synchronisation take, and what does it cost? The swarm's beside a parameter server's round.

The same tensors, among the same nodes, in the same places: hosts of a lab, each behind a slow line, and loopback. Every
contestant synchronises some times in a row; the first one opens the connections and is dropped.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from bench import hivemind_averager, parameter_server, sync_node
from bench.meter import Mark
from bench.results_file import write_results
from bench.stage import Actor, Stage, scene
from model.errors import SpesError
from model.settings import ModelSettings
from model.shards import layout
from node.lab.lab import unavailable
from node.units import size
from swarm.codec import encoded_size
from swarm.manifest import Encoding

SMALL = ModelSettings(
    vocab_size=2048,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    expert_size=256,
    num_experts=8,
    experts_per_token=2,
    max_length=32,
)
LARGE = SMALL.model_copy(update={"vocab_size": 8192, "hidden_size": 512, "num_heads": 8, "expert_size": 768})
ENCODED = {encoding: encoded_size(encoding, 1 << 20) / (4 << 20) for encoding in get_args(Encoding)}
"""Bytes of an encoding for one byte of fp32."""

WALL_AT_MOST = {"fp32": 0.3, "int8": 0.1}
"""Of the parameter server's."""
LIMIT_AT_MOST = 1.4
"""Times what the lines alone would need."""
BYTES_WITHIN = 0.05
INT8_BYTES_AT_MOST = 0.27
STATES_AT_MOST, SPARE_BYTES = 1.3, 256e6
"""Peak memory of a process: so many states of one node, and so much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where contestants meet."""

    name: str
    model: ModelSettings
    delay_ms: float = 0.0
    rate_mbit: float = 0.0
    """0 for loopback."""

    @property
    def shared(self) -> int:
        """Bytes of the shared part S, as fp32."""
        return sum(4 * shard.numel for shard in layout(self.model) if shard.expert is None)

    @property
    def experts(self) -> int:
        """Bytes of all experts E, as fp32."""
        return sum(4 * shard.numel for shard in layout(self.model) if shard.expert is not None)

    def bytes_each_way(self, nodes: int, encoding: str) -> float:
        """What every node has to send, and to receive, when all own the same share.

        Up 2S(N-1)/N + E_i(N-1), down 2S(N-1)/N + E - E_i; with E_i = E/N they are the same.
        """
        return ENCODED[encoding] * (2 * self.shared + self.experts) * (nodes - 1) / nodes


PLACES = {
    "lab": Place(name="lab", model=SMALL, delay_ms=20, rate_mbit=20),
    "loopback": Place(name="loopback", model=LARGE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one contestant."""

    place: str
    nodes: int
    contestant: str
    encoding: str
    wall: tuple[float, ...]
    """Seconds of each synchronisation, from its beginning to the moment when the last node had the result."""
    sent: tuple[float, ...]
    """Bytes in one synchronisation, by node."""
    received: tuple[float, ...]
    peak: int
    """Bytes of the largest process beyond its imports."""
    cpu: float
    """Seconds in one synchronisation, all processes together."""
    wire_busy: float
    """Part of a core that the lab's wire took; near 1 it would be the limit, and not the lines."""

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.wall)

    @property
    def cpu_per_gigabyte(self) -> float:
        """CPU seconds for each 10^9 bytes that were sent."""
        return self.cpu / sum(self.sent) * 1e9 if sum(self.sent) else 0.0


def main() -> None:
    """Measure, report, and exit with 1 if a claim does not hold."""
    options = _options()
    if options.rate is not None:
        PLACES["lab"] = replace(PLACES["lab"], rate_mbit=options.rate)
    found: list[Figures] = []
    try:
        for name in options.places:
            for nodes in options.nodes:
                found += _meet(PLACES[name], nodes, options.encodings, options.rounds + 1)
    except SpesError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    checks = [check for figures in found for check in _checks(figures, found)]
    print("", *_table(found), "", sep="\n")
    print(*(f"{'ok' if holds else 'FAILED':<6}  {claim}" for claim, holds in checks), "", sep="\n")
    results = {
        "places": {
            name: {
                **asdict(PLACES[name]),
                "model": PLACES[name].model.model_dump(),
                "shared_bytes": PLACES[name].shared,
                "expert_bytes": PLACES[name].experts,
            }
            for name in options.places
        },
        "synchronisations": options.rounds,
        "wire_busy_most": max(each.wire_busy for each in found),
        "figures": [{**asdict(each), "seconds": each.seconds} for each in found],
        "checks": [{"claim": claim, "holds": holds} for claim, holds in checks],
    }
    print("figures", write_results("sync", results))
    sys.exit(not all(holds for _, holds in checks))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.sync", description=__doc__)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES), help="default: both")
    parser.add_argument("--nodes", nargs="+", type=int, choices=(2, 4, 8), default=[4, 8], help="default: 4 8")
    parser.add_argument("--encodings", nargs="+", choices=ENCODED, default=["fp32", "int8"], help="default: fp32 int8")
    parser.add_argument(
        "--rate",
        type=float,
        metavar="MBIT",
        help="of the lab's lines (default: 20); slow ones leave the CPUs more time",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measured synchronisations (default: 3)")
    options = parser.parse_args()
    if "lab" in options.places and (reason := unavailable()):
        parser.error(f"{reason}. Without it: --places loopback")
    return options


def _meet(place: Place, nodes: int, encodings: Sequence[str], rounds: int) -> list[Figures]:
    """All contestants, one after the other."""
    shared, experts = place.shared // 4, place.experts // 4
    starts: dict[tuple[str, str], Callable[[Stage], list[Actor]]] = {
        ("parameter server", "fp32"): lambda stage: parameter_server.start(stage, shared, experts),
        ("hivemind, shared part", "fp32"): lambda stage: hivemind_averager.start(stage, shared),
    }
    driven = set(starts)
    for each in encodings:
        starts["swarm", each] = lambda stage, each=each: sync_node.start(stage, place.model, each, rounds)  # type: ignore[misc]
    found = []
    for (contestant, encoding), start in starts.items():
        print(f"{place.name}, {nodes} nodes: {contestant}, {encoding}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="spes-sync-") as folder:
            setting = {"delay_ms": place.delay_ms, "rate_mbit": place.rate_mbit}
            with scene(Path(folder) / "scene", nodes, **setting) as stage:
                actors = start(stage)
                began, busy = time.monotonic(), stage.wire_seconds()
                drive = _drive if (contestant, encoding) in driven else _listen
                marks = drive(actors, nodes, rounds)
                busy = (stage.wire_seconds() - busy) / (time.monotonic() - began)
        found.append(_figures(place, nodes, contestant, encoding, marks, rounds, busy))
        print(f"    {found[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    return found


def _drive(actors: Sequence[Actor], nodes: int, rounds: int) -> list[list[Mark]]:
    """Tell all processes when to begin, again and again, then to end; the marks of each. Nodes come first."""
    marks: list[list[Mark]] = [[] for _ in actors]
    for number in range(1, rounds + 1):
        for actor in actors:
            actor.tell(str(number))
        for index, actor in enumerate(actors):
            marks[index].append(actor.mark("begin"))
            if index < nodes:
                marks[index].append(actor.mark("end"))
    for actor in actors:
        actor.tell("")
    for index, actor in enumerate(actors):
        marks[index].append(actor.mark("done"))
    return marks


def _listen(actors: Sequence[Actor], nodes: int, rounds: int) -> list[list[Mark]]:
    """The marks of nodes that synchronise by themselves. Who goes over to another leader's plan begins again, and the
    first time counts."""
    marks: list[list[Mark]] = []
    for actor in actors:
        heard: list[Mark] = []
        for number in range(1, rounds + 1):
            heard.append(actor.mark("begin"))
            while (mark := actor.mark("begin", "end")).kind == "begin":
                pass
            heard.append(mark)
            assert mark.number == number, "no round is left out"
        marks.append([*heard, actor.mark("done")])
    return marks


def _figures(
    place: Place,
    nodes: int,
    contestant: str,
    encoding: str,
    marks: Sequence[Sequence[Mark]],
    rounds: int,
    wire_busy: float,
) -> Figures:
    """From the marks of every process; on loopback those that come after the nodes' belong to the first node."""
    begun = {(index, m.number): m for index, each in enumerate(marks) for m in each if m.kind == "begin"}
    ended = {(index, m.number): m for index, each in enumerate(marks) for m in each if m.kind == "end"}
    done = [each[-1] for each in marks]
    measured = range(2, rounds + 1)
    sent, received = [0.0] * nodes, [0.0] * nodes
    for index, last in enumerate(done):
        if index >= nodes and place.rate_mbit:
            continue  # it shares its host's line with a node, which has counted it
        at = index if index < nodes else parameter_server.SERVER_HOST - 1
        first = begun[index, measured[0]]
        sent[at] += (last.sent - first.sent) / len(measured)
        received[at] += (last.received - first.received) / len(measured)
    return Figures(
        place=place.name,
        nodes=nodes,
        contestant=contestant,
        encoding=encoding,
        wall=tuple(
            max(ended[index, number].time for index in range(nodes))
            - min(begun[index, number].time for index in range(nodes))
            for number in measured
        ),
        sent=tuple(sent),
        received=tuple(received),
        peak=max(mark.peak for mark in done),
        cpu=sum(last.cpu - begun[index, measured[0]].cpu for index, last in enumerate(done)) / len(measured),
        wire_busy=wire_busy,
    )


def _server_of(figures: Figures, found: Sequence[Figures]) -> Figures:
    return next(
        each
        for each in found
        if each.contestant == "parameter server" and (each.place, each.nodes) == (figures.place, figures.nodes)
    )


def _checks(figures: Figures, found: Sequence[Figures]) -> list[tuple[str, bool]]:
    """The claims about the swarm."""
    if figures.contestant != "swarm":
        return []
    place = PLACES[figures.place]
    where = f"{figures.place}, {figures.nodes} nodes, {figures.encoding}:"
    checks = []
    if place.rate_mbit:
        most = WALL_AT_MOST.get(figures.encoding, 1.0)
        part = figures.seconds / _server_of(figures, found).seconds
        checks.append((f"{where} wall <= {most} of the parameter server's: {part:.2f}", part <= most))
        times = figures.seconds / _limit(figures)
        checks.append((f"{where} wall <= {LIMIT_AT_MOST} of the wire limit: {times:.2f}", times <= LIMIT_AT_MOST))
    for way, moved in (("up", figures.sent), ("down", figures.received)):
        expected = place.bytes_each_way(figures.nodes, figures.encoding)
        ratio = statistics.mean(moved) / expected
        claim = f"{where} bytes {way} within {BYTES_WITHIN:.0%} of {size(expected)} a node: {ratio:.3f}"
        checks.append((claim, abs(ratio - 1) <= BYTES_WITHIN))
        if figures.encoding == "int8":
            part = statistics.mean(moved) / place.bytes_each_way(figures.nodes, "fp32")
            claim = f"{where} bytes {way} <= {INT8_BYTES_AT_MOST} of fp32's: {part:.3f}"
            checks.append((claim, part <= INT8_BYTES_AT_MOST))
    most_memory = STATES_AT_MOST * (place.shared + place.experts) + SPARE_BYTES
    claim = f"{where} peak <= {STATES_AT_MOST} states + {size(SPARE_BYTES)} = {size(most_memory)}: {size(figures.peak)}"
    checks.append((claim, figures.peak <= most_memory))
    return checks


def _limit(figures: Figures) -> float:
    """Seconds that the lines alone need for the bytes that have to move; 0 on loopback."""
    place = PLACES[figures.place]
    if not place.rate_mbit:
        return 0.0
    return place.bytes_each_way(figures.nodes, figures.encoding) / (place.rate_mbit * 1e6 / 8)


def _table(found: Sequence[Figures]) -> list[str]:
    lines = [
        "| place | nodes | contestant | wall s | of server | of wire | up MB mean (most) | down MB mean (most) "
        "| peak MB | CPU s/GB |",
        "|---|---:|---|" + "---:|" * 7,
    ]
    for each in found:
        limit = _limit(each) if each.contestant == "swarm" else 0.0
        of_server = each.seconds / _server_of(each, found).seconds
        of_wire = f"{each.seconds / limit:.2f}" if limit else "-"
        up, down = (
            f"{statistics.mean(moved) / 1e6:.1f} ({max(moved) / 1e6:.1f})" if any(moved) else "-"
            for moved in (each.sent, each.received)
        )
        lines.append(
            f"| {each.place} | {each.nodes} | {each.contestant}, {each.encoding} | {each.seconds:.2f} | "
            f"{of_server:.2f} | {of_wire} | "
            f"{up} | {down} | {each.peak / 1e6:.0f} | {f'{each.cpu_per_gigabyte:.1f}' if any(each.sent) else '-'} |"
        )
    return lines


if __name__ == "__main__":
    main()
