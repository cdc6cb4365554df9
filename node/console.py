"""What a person sees in the terminal: the first screen, states with reasons, one line per round."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from node.log_files import CONSOLE
from node.units import size
from swarm.manifest import Manifest

if TYPE_CHECKING:
    from node.daemon import Joined
    from swarm.history import RoundLine

HEADER = (
    f"{'round':>9}  {'loss':>7}  {'held-out':>8}  {'tokens/s':>9}  {'busy':>4}  {'nodes':>5}"
    f"  {'experts':>7}  {'moved':>9}  next"
)
LASTING_SECONDS = 2.0
"""A wait shorter than this is not worth a line."""
REASON_SECONDS = 5.0
"""A reason that keeps changing, such as a countdown, is printed this often."""


def round_row(line: "RoundLine") -> str:
    """One aligned line about a round.

    The held-out loss is that of the state the round started from; `next` is how long the next round takes if it takes
    as long as this one; `busy` is the share of their time that the nodes spent in training steps.
    """
    last = line.rounds and line.round >= line.rounds
    return "  ".join(
        [
            f"{f'{line.round}/{line.rounds}' if line.rounds else line.round:>9}",
            f"{line.loss:7.3f}",
            f"{line.heldout_loss:8.3f}" if line.heldout_loss is not None else f"{'-':>8}",
            f"{line.tokens_per_second:9,.0f}" if line.seconds else f"{'-':>9}",
            f"{line.utilisation:4.0%}" if line.utilisation else f"{'-':>4}",
            f"{f'{line.nodes}/{line.nodes + line.missing}':>5}",
            f"{f'{line.covered}/{line.experts}':>7}",
            f"{size(line.bytes_moved) if line.bytes_moved else '-':>9}",
            "done" if last else f"in {line.seconds:.0f} s" if line.seconds else "-",
        ]
    )


def describe_run(manifest: Manifest) -> str:
    """A run in one line."""
    model, rounds = manifest.model, manifest.round
    total = f"{rounds.total} rounds" if rounds.total else "rounds without end"
    start = f"; begun with checkpoint {manifest.initial_state[:12]}" if manifest.initial_state else ""
    merging = f"; experts are merged in the first {manifest.merge.first_steps}" if manifest.merge.alpha else ""
    return (
        f"{manifest.name}: {model.num_layers} layers, width {model.hidden_size}, {model.num_experts} experts, "
        f"top-{model.experts_per_token}; {total} of {rounds.local_steps} steps{merging}{start}"
    )


def join_line(addresses: list[str]) -> str:
    """The command with which another box joins: over the network if this one is reachable there, else on this box."""
    outside = [address for address in addresses if not address.startswith(("/ip4/127.", "/ip6/::1/"))]
    return "spes-node join --peers " + " ".join(outside or addresses)


class Console:
    """Prints to standard output, one line at a time."""

    def __init__(self) -> None:
        self._header_shown = False
        self._state = ""
        self._reason = ""
        self._since = self._shown = float("-inf")

    def say(self, text: str) -> None:
        """One line, which the daemon's log has, too."""
        print(text, flush=True)
        CONSOLE.info("%s", text)

    def fact(self, word: str, text: str) -> None:
        """One line of the first screen."""
        self.say(f"{word:<9} {text}")

    def serving(self, manifest: Manifest, home: Path, addresses: list[str], page: str | None) -> None:
        """The first screen of a rendezvous, with the line that others paste."""
        self.fact("run", describe_run(manifest))
        self.fact("home", str(home))
        self.fact("page", page or "none")
        self.say(f"\nJoin with another box, or in another terminal:\n  {join_line(addresses)}\n")

    def joined(self, joined: "Joined") -> None:
        """The first screen of a node: every choice with its reason."""
        trainer = joined.trainer
        self.fact("run", describe_run(joined.manifest))
        self.fact("device", f"{trainer.device}, {trainer.dtype} ({trainer.reason})")
        total = joined.manifest.model.num_experts
        self.fact("experts", f"up to {trainer.capacity} of {total} ({trainer.capacity_reason})")
        self.fact("memory", trainer.memory)
        for saving in trainer.savings:
            self.fact("saving", saving)
        self.fact("home", str(joined.home))
        self.fact("page", joined.page or "none")
        self.fact("invite", join_line(joined.addresses))

    def state(self, state: str, reason: str) -> None:
        """Why the node is held up, when that lasts; a reason that keeps changing is shown every few seconds."""
        now = time.monotonic()
        if state != self._state:
            self._state, self._since = state, now
        held_up = state in ("syncing", "waiting", "merging", "paused") and now - self._since > LASTING_SECONDS
        if reason != self._reason and held_up and now - self._shown > REASON_SECONDS:
            self._reason, self._shown = reason, now
            self.say(reason)

    def round(self, line: "RoundLine") -> None:
        """The row of a round, with the header above the first one."""
        if not self._header_shown:
            self._header_shown = True
            self.say(HEADER)
        self.say(round_row(line))

    def error(self, text: str) -> None:
        """One line on standard error."""
        sys.stdout.flush()
        print(f"spes-node: {text}", file=sys.stderr, flush=True)
