"""Loses nodes of a running swarm in chosen moments, and measures what it costs the others."""

import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.watched_node import WAIT_SECONDS, Node, until
from model.errors import SpesError
from node.local_swarm import LocalSwarm
from swarm.identity import short

FULL_ROUNDS = 2
"""Undisturbed rounds between two faults, at least."""
BASELINE_ROUNDS = 3
"""The last undisturbed rounds; the length of a round is their median."""
TAIL_SECONDS = 0.005
"""How often the logs are looked at for the moment to strike."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a node is hit: at a line of its own log."""

    name: str
    line: str
    """What follows `round N: ` in it."""
    whoever: bool = False
    """Whether the first node that prints the line is hit: there is one such node in a round."""
    document: str = ""
    """What the node was about to send to all others, if it was."""


MOMENTS = (
    Moment("trains", "this node trains"),
    Moment("contributor, has just handed in", "this node hands in"),
    Moment("reducer, averages", "this node averages"),
    Moment("leader, before its plan", "{me} is the first to plan", whoever=True, document="plan"),
    Moment("leader, sends its plan", "this node plans", whoever=True, document="plan"),
    Moment("leader, sends its commit", "this node commits", whoever=True, document="commit"),
    Moment("source, has just announced", "this node announces"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One node lost in one moment. Costs are in rounds: multiples of `round_seconds`."""

    moment: str
    how: str
    round: int
    round_seconds: float
    """Median of the undisturbed rounds just before."""
    sent: bool | None
    """Whether the document got out all the same; None when there was none."""
    next_commit: float
    """How much later than usual the slowest survivor had the round's commit."""
    cost: float
    """By how much the slowest survivor was behind after that round or after the next one, whichever was worse."""
    same_bits: bool
    """Whether all nodes had the same bits in every round from then on; the victim, once it was back."""
    unowned: int
    """Rounds in a row in which an expert had no owner that contributed, at most."""
    back: int
    """Rounds from the victim's return to the first commit that counts it; 1 is the round in progress."""
    back_seconds: float
    load: float
    """Of the machine, when the node was hit: runnable processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Everybody killed at once, the rendezvous too, and started again."""

    round: int
    """Of the best head on any disk."""
    round_seconds: float
    seconds: float
    """From the first start to the next commit."""
    joined_seconds: float
    """From the moment when all had joined to that commit; negative when it was faster than the slowest node."""
    contributors: int
    """To that commit."""
    full_rounds: int
    """Until a commit counts all of them."""
    same_chain: bool
    """Whether that commit goes back to the head, without a gap."""


class Field:
    """The swarm whose nodes are hit, one after the other."""

    def __init__(self, swarm: LocalSwarm, run_file: Path, count: int) -> None:
        """Start it with so many nodes, and wait until all have joined."""
        self._swarm = swarm
        self._run_file = run_file
        self._count = count
        self._turn = itertools.cycle(range(count))
        self._undisturbed = 0
        """The last round that was not."""
        self.nodes: list[Node] = []
        self._start()

    def _start(self) -> None:
        self._swarm.start_rendezvous(self._run_file, "-v")
        self.nodes = [Node(self._swarm.start_node(f"node-{number}", "-v")) for number in range(self._count)]
        for node in self.nodes:
            self._await_join(node)

    @staticmethod
    def _await_join(node: Node) -> None:
        until(lambda: node.has_joined, f"{node.box.name} joins")
        node.watch()

    def hit(self, moment: Moment, how: str) -> Case:
        """Lose one node in a moment, see what the others do, and let it come back."""
        seconds = self._undisturbed_round()
        strike = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        load = os.getloadavg()[0]
        victim, number = self._strike(moment, strike)
        survivors = [node for node in self.nodes if node is not victim]
        until(lambda: all(node.round > number for node in survivors), f"two commits after {number - 1}")
        late = [max(n.adopted(k) - n.adopted(number - 1) for n in survivors) / seconds for k in (number, number + 1)]
        self._bring_back(victim, how)
        joined, since = max(node.round for node in survivors), time.time()
        witness = survivors[0]
        until(lambda: self._first_with(victim, witness, joined), f"{victim.box.name} contributes again")
        back = self._first_with(victim, witness, joined)
        until(lambda: all(node.round >= back for node in self.nodes), f"all have round {back}")
        self._undisturbed = back
        return Case(
            moment=moment.name,
            how=how,
            round=number,
            round_seconds=seconds,
            sent=self._was_sent(moment.document, victim, survivors, number),
            next_commit=late[0] - 1,
            cost=max(late[0] - 1, late[1] - 2),
            same_bits=self._has_same_bits(number, {victim.id: back}),
            unowned=self._unowned(witness, number, back),
            back=back - joined,
            back_seconds=witness.adopted(back) - since,
            load=load,
        )

    def fail_altogether(self) -> Outage:
        """Kill all at once, start all again."""
        seconds = self._undisturbed_round()
        self._strike(Moment("", "this node hands in"), None)
        assert self._swarm.rendezvous is not None
        for node in self.nodes:
            node.send(signal.SIGKILL)
        self._swarm.rendezvous.process.kill()
        for box in (*self._swarm.nodes, self._swarm.rendezvous):
            box.process.wait()
        head = max(self.nodes, key=lambda node: node.round)
        reached = head.round
        before = head.commit(reached)
        assert before is not None
        self._swarm.nodes.clear()
        since = time.time()
        self._start()
        joined = time.time()
        until(lambda: all(node.round > reached for node in self.nodes), "a commit after the outage")
        first = next((commit for node in self.nodes if (commit := node.commit(reached + 1)) is not None), None)
        came = min(node.adopted(reached + 1) for node in self.nodes)
        witness = self.nodes[0]
        until(lambda: self._full_after(witness, reached), "a round with all")
        return Outage(
            round=reached,
            round_seconds=seconds,
            seconds=came - since,
            joined_seconds=came - joined,
            contributors=len(first.document.shares) if first is not None else 0,
            full_rounds=self._full_after(witness, reached) - reached,
            same_chain=first is not None
            and first.document.parent == before.digest
            and self._has_same_bits(reached + 1, {}),
        )

    # waiting for the moment

    def _undisturbed_round(self) -> float:
        """Wait for undisturbed rounds; the median length of the last few, in seconds."""
        start = self._undisturbed
        until(
            lambda: all(self._full_lengths(node, start, FULL_ROUNDS) for node in self.nodes),
            f"{FULL_ROUNDS} undisturbed rounds after {start}",
        )
        return statistics.median(
            length for node in self.nodes for length in self._full_lengths(node, 0, FULL_ROUNDS)[-BASELINE_ROUNDS:]
        )

    def _full_lengths(self, node: Node, start: int, least: int) -> list[float]:
        """Lengths of the rounds after `start` in which all took part, as did they in the one before; none when they
        are fewer than `least`."""
        lines = node.history()
        lengths = [
            line["time"] - before["time"]
            for before, line in itertools.pairwise(lines)
            if before["nodes"] == line["nodes"] == self._count
            and line["round"] == before["round"] + 1
            and before["round"] >= start
        ]
        return lengths if len(lengths) >= least else []

    def _strike(self, moment: Moment, number: signal.Signals | None) -> tuple[Node, int]:
        """Wait for a line in a log and send its writer a signal; returns the node and the round."""
        candidates = self.nodes if moment.whoever else [self.nodes[next(self._turn)]]
        patterns = {
            node.id: re.compile(r"round (\d+): " + moment.line.format(me=re.escape(short(node.id))))
            for node in candidates
        }
        for node in self.nodes:
            for _ in node.lines():  # what is over
                continue
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for node in candidates:
                for line in node.lines():
                    if match := patterns[node.id].search(line):
                        if number is not None:
                            node.send(number)
                        return node, int(match[1])
            time.sleep(TAIL_SECONDS)
        raise SpesError(f"no node printed {moment.line!r} within {WAIT_SECONDS:.0f} s")

    def _bring_back(self, victim: Node, how: str) -> None:
        if how == "stopped":
            victim.send(signal.SIGCONT)
            return
        victim.box.process.wait()
        self._swarm.nodes.remove(victim.box)
        victim.box = self._swarm.start_node(victim.box.name, "-v")
        self._await_join(victim)

    # looking at what has happened

    @staticmethod
    def _first_with(node: Node, witness: Node, after: int) -> int:
        """The first round after `after` whose commit counts a node's contribution; 0 when there is none yet."""
        commits = (witness.commit(number) for number in range(after + 1, witness.round + 1))
        return next((c.document.round for c in commits if c is not None and node.id in c.document.shares), 0)

    def _full_after(self, witness: Node, after: int) -> int:
        """The first round after `after` that counts everybody; 0 when there is none yet."""
        lines = (line for line in witness.history() if line["round"] > after and line["nodes"] == self._count)
        return next((int(line["round"]) for line in lines), 0)

    @staticmethod
    def _was_sent(document: str, victim: Node, survivors: Sequence[Node], number: int) -> bool | None:
        """Whether the victim's document reached the others before it was lost."""
        if document == "commit":
            commit = survivors[0].commit(number)
            return commit is not None and commit.document.leader == victim.id
        if document == "plan":
            planned = f"round {number}: this node plans\n"
            return not any(planned in node.box.log.read_text() for node in survivors)
        return None

    def _has_same_bits(self, start: int, back: Mapping[str, int]) -> bool:
        """Whether all nodes tell the same of every round from `start` on, and have on their disks what they tell.

        Args:
            start: the first round that counts.
            back: for a node that was away, the first round that counts.
        """
        told = {
            (line["round"], line["commit"], line["digest"])
            for node in self.nodes
            for line in node.history()
            if line["round"] >= max(start, back.get(node.id, 0))
        }
        states = {number: digest for number, _, digest in told}
        disks = [node.bits() for node in self.nodes]
        return len(told) == len(states) and all(
            there == right == states.get(number, right) for number, there, right in disks
        )

    @staticmethod
    def _unowned(witness: Node, start: int, stop: int) -> int:
        """The longest row of rounds in which an expert had no owner that contributed."""
        commits = [c.document for number in range(start, stop + 1) if (c := witness.commit(number)) is not None]
        experts = {expert for commit in commits for expert in commit.experts_covered}
        longest = 0
        for expert in experts:
            owned = [any(expert in commit.owners.get(node, ()) for node in commit.shares) for commit in commits]
            rows = (len(list(row)) for has_owner, row in itertools.groupby(owned) if not has_owner)
            longest = max([longest, *rows])
        return longest
