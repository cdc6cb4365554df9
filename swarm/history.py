"""One line of JSON per adopted commit: what the round was, for people, plots and tests."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.documents import Commit, Signed
from swarm.identity import NodeId
from swarm.manifest import Manifest
from swarm.records import View

MOST_LINES = 5000
"""That are kept at hand; the file has them all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    """What is told about one round."""

    time: float
    """Unix seconds at which this node adopted the commit."""
    round: int
    rounds: int
    """Rounds of the whole run; 0 when it has no end."""
    commit: str
    digest: str
    """Of the model state."""
    loss: float
    heldout_loss: float | None
    """Of the state the round started from."""
    tokens: int
    tokens_per_second: float
    nodes: int
    """Whose contributions counted."""
    missing: int
    """Who was planned in and did not contribute."""
    covered: int
    """Experts with an owner."""
    experts: int
    alpha: float
    """Strength of the merge that the round began with; 0 without one."""
    carried: int
    """Shards that kept their version."""
    utilisation: float
    """Share of their time that the nodes spent in training steps."""
    bytes_moved: int
    """Shards and documents that nodes have sent so far, as they have told while this node was here."""
    seconds: float
    """Since the commit before, as this node saw it; for the first commit since its plan arrived."""


def round_line(commit: Signed[Commit], run: Manifest, *, now: float, seconds: float, bytes_moved: int) -> RoundLine:
    """What a commit says of its round.

    Args:
        commit: of the round.
        run: the run.
        now: Unix seconds at which it was adopted, 0 if that is not known.
        seconds: that the round took.
        bytes_moved: by all nodes since somebody looks, 0 if that is not known.
    """
    document = commit.document
    trained = sum(share.tokens for share in document.shares.values())
    return RoundLine(
        time=now,
        round=document.round,
        rounds=run.round.total,
        commit=commit.digest,
        digest=document.state,
        loss=document.loss,
        heldout_loss=document.heldout_loss,
        tokens=document.tokens,
        tokens_per_second=trained / seconds if seconds else 0.0,
        nodes=len(document.shares),
        missing=len(document.missing),
        covered=len(document.experts_covered),
        experts=run.model.num_experts,
        alpha=document.merge.alpha if document.merge is not None else 0.0,
        carried=len(document.carried),
        utilisation=document.busy,
        bytes_moved=bytes_moved,
        seconds=seconds,
    )


def read_lines(path: Path) -> Iterator[RoundLine]:
    """The lines of a file, from the first one. Those of another release, or cut off by a crash, are left out."""
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            yield RoundLine(**json.loads(text))
        except (ValueError, TypeError) as error:
            log.debug("%s: %s", path, error)


class History:
    """Turns commits into lines and appends them to a file."""

    def __init__(self, path: Path, run: Manifest, show: Callable[[RoundLine], None]) -> None:
        """Args:
        path: the file, which may be there already.
        run: the run.
        show: called with each new line.
        """
        self.lines = deque(read_lines(path), maxlen=MOST_LINES)
        """The last rounds, those of earlier starts included."""
        self._path = path
        self._run = run
        self._show = show
        self._moved = Moved()

    def add(self, commit: Signed[Commit], view: View, seconds: float) -> None:
        """Write one commit down and show it."""
        line = round_line(commit, self._run, now=time.time(), seconds=seconds, bytes_moved=self._moved.count(view))
        with open(self._path, "a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        self.lines.append(line)
        self._show(line)


class Moved:
    """Bytes that nodes have sent since somebody began to look."""

    def __init__(self) -> None:
        self._sent: dict[NodeId, int] = {}
        self._total = 0

    def count(self, view: View) -> int:
        """Add what every node has sent since it was last looked at; one that was started again counts from nothing."""
        for node, record in view.nodes.items():
            before = self._sent.get(node, 0)
            self._total += record.sent - before if record.sent >= before else record.sent
            self._sent[node] = record.sent
        return self._total
