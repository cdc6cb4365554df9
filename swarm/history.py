"""One line of JSON per adopted commit: what the round was, for people, plots and tests."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.documents import Commit, Signed
from swarm.membership import View


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
    carried: int
    """Shards that kept their version."""
    bytes_moved: int
    """Shards and documents sent by all nodes since they started, as far as they have told."""
    seconds: float
    """Since the commit before, as this node saw it; for the first commit since its plan arrived."""


class History:
    """Turns commits into lines and appends them to a file."""

    def __init__(self, path: Path, rounds: int, experts: int, show: Callable[[RoundLine], None]) -> None:
        self._path = path
        self._rounds = rounds
        self._experts = experts
        self._show = show

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
            carried=sum(shard.version < document.round for shard in document.shards.values()),
            bytes_moved=sum(record.sent for record in view.nodes.values()),
            seconds=seconds,
        )
        with open(self._path, "a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        self._show(line)
