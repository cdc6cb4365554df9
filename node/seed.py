"""A box without a GPU that helps: it trains nothing, keeps the state of the run, passes results on, and outlives
others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.discovery import find_manifest
from swarm.history import History, RoundLine
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


async def serve(
    settings: SeedSettings,
    identity: Identity,
    *,
    on_joined: Callable[[Manifest, Path, list[str]], None],
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
        addresses = await network.addresses()
        on_joined(run, settings.home, addresses)
        history = History(store.folder / "history.jsonl", run.round.total, run.model.num_experts, on_round)
        participant = Participant(
            manifest,
            identity=identity,
            network=network,
            store=store,
            record=NodeRecord(
                run=manifest.digest, version=VERSION, name=settings.name, role="seed", addresses=tuple(addresses[:4])
            ),
            trainer=None,
            on_commit=history.add,
            on_state=on_state,
        )
        await live(participant, [network.watch()], say, stay=True)
    finally:
        await network.close()
