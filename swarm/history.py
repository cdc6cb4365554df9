"""One line of JSON per adopted commit: what the round was, for people, plots and tests."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.documents import Commit, Signed
from swarm.identity import NodeId
from swarm.records import View


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


class History:
    """Turns commits into lines and appends them to a file."""

    def __init__(self, path: Path, rounds: int, experts: int, show: Callable[[RoundLine], None]) -> None:
        self._path = path
        self._rounds = rounds
        self._experts = experts
        self._show = show
        self._sent: dict[NodeId, int] = {}
        self._moved = 0

    def add(self, commit: Signed[Commit], view: View, seconds: float) -> None:
        """Write one commit down and show it."""
        document = commit.document
        trained = sum(share.tokens for share in document.shares.values())
        line = RoundLine(
            time=time.time(),
            round=document.round,
            rounds=self._rounds,
            commit=commit.digest,
            digest=document.state,
            loss=document.loss,
            heldout_loss=document.heldout_loss,
            tokens=document.tokens,
            tokens_per_second=trained / seconds if seconds else 0.0,
            nodes=len(document.shares),
            missing=len(document.missing),
            covered=len(document.experts_covered),
            experts=self._experts,
            alpha=document.merge.alpha if document.merge is not None else 0.0,
            carried=len(document.carried),
            utilisation=document.busy,
            bytes_moved=self._count(view),
            seconds=seconds,
        )
        with open(self._path, "a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        self._show(line)

    def _count(self, view: View) -> int:
        """Add what every node has sent since it was last looked at; one that was started again counts from nothing."""
        for node, record in view.nodes.items():
            before = self._sent.get(node, 0)
            self._moved += record.sent - before if record.sent >= before else record.sent
            self._sent[node] = record.sent
        return self._moved
