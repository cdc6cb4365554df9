"""A box without a GPU that helps: it trains nothing, keeps the state of the run, passes results on, and outlives
others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.reporter import Reporter
from node.web.server import PagePlace
from swarm.discovery import find_manifest
from swarm.history import RoundLine
from swarm.identity import Identity
from swarm.lifecycle import live
from swarm.manifest import Manifest
from swarm.network import Network
from swarm.participant import Participant
from swarm.records import NodeRecord, State
from swarm.release import VERSION
from swarm.store import ShardStore, run_folder, write_durably


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSettings:
    """What differs between two seeds of the same run."""

    home: Path
    """Folder of this seed: identity, address book, shard stores."""
    peers: Sequence[str]
    listen: Sequence[str]
    announce: Sequence[str]
    run_id: str | None
    name: str
    page: PagePlace | None
    """Where its page is served; None for nowhere."""


async def serve(
    settings: SeedSettings,
    identity: Identity,
    *,
    on_joined: Callable[[Manifest, Path, list[str], str | None], None],
    on_state: Callable[[State, str], None],
    on_round: Callable[[RoundLine], None],
    say: Callable[[str], None],
) -> None:
    """Follow a run and serve its state until SIGINT or SIGTERM, also when the run is complete.

    Raises:
        UserError: wrong peers or disk; nothing was changed.
        SpesError: something the seed needs has ended.
    """
    say("looking for the swarm")
    network = await Network.start(
        identity,
        listen=settings.listen,
        announce=settings.announce,
        peers=settings.peers,
        book_path=settings.home / "peers.json",
    )
    try:
        manifest = await find_manifest(network, settings.run_id)
        run = manifest.document
        store = ShardStore.open(run_folder(settings.home, manifest), manifest.digest)
        write_durably(store.folder / "manifest", manifest.wire)
        reporter = Reporter(manifest, identity.node_id, store, settings.home, on_state=on_state, on_round=on_round)
        addresses = await network.addresses()
        record = NodeRecord(
            run=manifest.digest, version=VERSION, name=settings.name, role="seed", addresses=tuple(addresses[:4])
        )
        participant = Participant(
            manifest,
            identity=identity,
            network=network,
            store=store,
            record=record,
            trainer=None,
            on_commit=reporter.commit,
            on_state=reporter.state,
        )
        async with reporter.page(settings.page) as page:
            on_joined(run, settings.home, addresses, page)
            await live(participant, [network.watch(), reporter.watch(participant)], say, stay=True)
    finally:
        await network.close()
