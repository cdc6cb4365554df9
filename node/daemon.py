"""The daemon of a volunteer's box: joins the swarm, keeps a trainer busy, and leaves without a trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.reporter import Reporter
from node.trainer_process import TrainerProcess, TrainerSettings
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
class NodeSettings:
    """What differs between two boxes of the same run."""

    home: Path
    """Folder of this node: identity, address book, shard stores."""
    peers: Sequence[str]
    listen: Sequence[str]
    announce: Sequence[str]
    run_id: str | None
    name: str
    page: PagePlace | None
    """Where its page is served; None for nowhere."""
    trainer: TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a node knows when it is about to take part, for the first screen."""

    manifest: Manifest
    home: Path
    addresses: list[str]
    page: str | None
    """Address of this node's page."""
    trainer: TrainerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told what happens."""

    say: Callable[[str], None]
    on_joined: Callable[[Joined], None]
    on_state: Callable[[State, str], None]
    on_round: Callable[[RoundLine], None]
    on_progress: Callable[[int, float], None]


async def join(settings: NodeSettings, identity: Identity, tell: Listeners) -> None:
    """Join a run and take part until it is complete, or SIGINT or SIGTERM arrives.

    Raises:
        UserError: wrong peers, data, device or disk; nothing was changed.
        SpesError: something the node needs has ended.
    """
    tell.say("looking for the swarm")
    network = await Network.start(
        identity,
        listen=settings.listen,
        announce=settings.announce,
        peers=settings.peers,
        book_path=settings.home / "peers.json",
    )
    trainer = None
    try:
        manifest = await find_manifest(network, settings.run_id)
        run = manifest.document
        store = ShardStore.open(run_folder(settings.home, manifest), manifest.digest)
        write_durably(store.folder / "manifest", manifest.wire)
        tell.say(f"run {run.name} {manifest.digest[:12]}: loading the model and the text")
        trainer = await TrainerProcess.start(run, settings.trainer, tell.on_progress)
        addresses = await network.addresses()
        reporter = Reporter(
            manifest, identity.node_id, store, settings.home, on_state=tell.on_state, on_round=tell.on_round
        )
        participant = Participant(
            manifest,
            identity=identity,
            network=network,
            store=store,
            record=NodeRecord(
                run=manifest.digest,
                version=VERSION,
                name=settings.name,
                role="trainer",
                addresses=tuple(addresses[:4]),
                capacity=trainer.capacity,
                device=f"{trainer.device} {trainer.dtype}",
            ),
            trainer=trainer,
            on_commit=reporter.commit,
            on_state=reporter.state,
        )
        async with reporter.page(settings.page) as page:
            tell.on_joined(Joined(manifest=run, home=settings.home, addresses=addresses, page=page, trainer=trainer))
            await live(participant, [network.watch(), trainer.watch(), reporter.watch(participant)], tell.say)
    finally:
        if trainer is not None:
            await trainer.close()
        await network.close()
