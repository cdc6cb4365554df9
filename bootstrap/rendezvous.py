"""The rendezvous daemon: where newcomers find the run. It trains nothing, follows every round and serves the state."""

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from swarm.documents import Commit, Signed
from swarm.identity import Identity
from swarm.lifecycle import live
from swarm.manifest import Manifest
from swarm.network import Network
from swarm.participant import Participant
from swarm.records import NodeRecord, State, View
from swarm.release import VERSION
from swarm.store import ShardStore


async def serve(
    manifest: Signed[Manifest],
    *,
    identity: Identity,
    home: Path,
    store: ShardStore,
    listen: Sequence[str],
    announce: Sequence[str],
    name: str,
    on_addresses: Callable[[list[str]], None],
    on_state: Callable[[State, str], None],
    on_commit: Callable[[Signed[Commit], View, float], None],
    watch: Callable[[Participant], Coroutine[Any, Any, None]],
    say: Callable[[str], None],
) -> None:
    """Serve a run until SIGINT or SIGTERM.

    Args:
        manifest, store: from `bootstrap.genesis.prepare_run`.
        identity: the author's.
        home: folder of the daemon, for the address book.
        listen, announce: multiaddresses, see `swarm.network.Network.start`.
        name: shown to others.
        on_addresses: called once with the addresses that others can join.
        on_state, on_commit: see `swarm.participant.Participant`.
        watch: runs beside the daemon's part in the swarm.
        say: tells people what happens.

    Raises:
        UserError: the port is in use.
        SpesError: something the daemon needs has ended.
    """
    network = await Network.start(identity, listen=listen, announce=announce, book_path=home / "peers.json")
    try:
        addresses = await network.addresses()
        on_addresses(addresses)
        participant = Participant(
            manifest,
            identity=identity,
            network=network,
            store=store,
            record=NodeRecord(
                run=manifest.digest,
                version=VERSION,
                name=name,
                role="rendezvous",
                addresses=tuple(addresses[:4]),
            ),
            trainer=None,
            on_commit=on_commit,
            on_state=on_state,
        )
        await live(participant, [network.watch(), watch(participant)], say, stay=True)
    finally:
        await network.close()
