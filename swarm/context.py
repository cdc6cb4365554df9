"""What every duty of a node in a run works with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.board import Board
from swarm.documents import Document, Signed, seal
from swarm.exchange import Exchange
from swarm.identity import Identity, NodeId
from swarm.manifest import Manifest
from swarm.membership import Membership, State
from swarm.patience import Patience
from swarm.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One node in one run: its documents, its peers, its copy of the state."""

    manifest: Manifest
    run_id: str
    identity: Identity
    board: Board
    exchange: Exchange
    membership: Membership
    replica: Replica
    tell: Callable[[State, str], None]
    """Shows people the node's state and the reason."""

    @property
    def me(self) -> NodeId:
        """This node's id."""
        return self.identity.node_id

    @property
    def margin(self) -> float:
        """Seconds that a dead or slow peer may cost."""
        return self.manifest.round.margin_seconds

    def patience(self, tell: Callable[[str], None]) -> Patience:
        """A way to wait for peers; `tell` shows people what is waited for."""
        return Patience(self.board, self.exchange, tell)

    def publish(self, document: Document) -> None:
        """Sign a document, put it on the own board and give it to everybody who is there."""
        signed: Signed[Any] = seal(self.identity, document)
        self.board.post(signed)
        self.exchange.post(self.membership.view.present(), signed)
