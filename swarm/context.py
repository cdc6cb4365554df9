"""What every duty of a node in a run works with."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm.board import Board
from swarm.documents import Document, Signed, seal
from swarm.exchange import Exchange
from swarm.identity import Identity, NodeId, short
from swarm.inheritance import Inheritance
from swarm.manifest import Manifest
from swarm.membership import Membership
from swarm.patience import Patience
from swarm.progress import Utilisation
from swarm.records import State
from swarm.replica import Replica
from swarm.residuals import Residuals

log = logging.getLogger(__name__)


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
    residuals: Residuals
    utilisation: Utilisation
    inheritance: Inheritance
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

    def complain(self, node: NodeId, what: str) -> None:
        """Name a peer that did something wrong, in the log and in this node's record. May be called from a thread."""
        log.warning("%s: %s; it is left out", short(node), what)
        self.membership.note(complaint=f"{short(node)}: {what}"[:120])

    def patience(self, tell: Callable[[str], None]) -> Patience:
        """A way to wait for peers; `tell` shows people what is waited for."""
        return Patience(self.board, self.exchange, self.margin, lambda: self.membership.view, tell)

    def publish(self, document: Document) -> None:
        """Sign a document, put it on the own board and give it to everybody who is there."""
        signed: Signed[Any] = seal(self.identity, document)
        self.board.post(signed)
        self.exchange.post(self.membership.view.present(), signed)
