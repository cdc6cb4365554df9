"""Commits as the nodes of a swarm have them, for those who look on."""

import logging

from swarm.documents import Commit, Signed
from swarm.exchange import CallFailed, Exchange
from swarm.records import View
from swarm.replica import weight

log = logging.getLogger(__name__)


async def read_commit(exchange: Exchange, view: View, number: int | None = None) -> Signed[Commit] | None:
    """A commit of the chain that counts, from any node that has it; None when nobody answers.

    Args:
        exchange: asks.
        view: who is there.
        number: its round; None for the last one.
    """
    present = {
        node: record for node, record in view.present().items() if record.commit and record.round >= (number or 0)
    }
    best_first = sorted(
        present, key=lambda node: weight(present[node].tokens, present[node].round, present[node].commit), reverse=True
    )
    for node in best_first:
        try:
            signed = await exchange.read(node, "commit", present[node].round if number is None else number)
        except CallFailed as error:
            log.debug("%s", error)
            continue
        if signed is not None and isinstance(signed.document, Commit):
            return Signed(signed.document, signed.signer, signed.digest, signed.wire)
    return None
