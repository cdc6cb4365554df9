"""What each command does: from parsed options to the daemon, the rendezvous or a report."""

import argparse
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from model.errors import UserError
from node.console import Console
from node.names import spoken_name


def run_async(main: Coroutine[Any, Any, None], *, verbose: bool) -> None:
    """Run a coroutine on uvloop, with the log on standard error."""
    import uvloop

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname).4s %(name)s: %(message)s")
    if verbose:
        for package in ("swarm", "bootstrap", "node"):
            logging.getLogger(package).setLevel(logging.DEBUG)
    uvloop.run(main)


def default_home(kind: str) -> Path:
    """Where a daemon keeps its things: `$SPES_HOME`, else the user's data folder (XDG)."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(os.environ.get("SPES_HOME") or Path(data) / "spes") / kind


def multiaddress(place: str) -> str:
    """`HOST:PORT` as a multiaddress; HOST is an IPv4 address, or an IPv6 address in brackets. Raises UserError."""
    import ipaddress

    host, _, port = place.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if not 0 <= int(port) < 65536:
            raise ValueError(port)
    except ValueError:
        raise UserError(
            f"--listen {place}: not HOST:PORT with an IP address of this machine, such as 0.0.0.0:31337"
        ) from None
    return f"/ip{address.version}/{address}/tcp/{int(port)}"


def check_announced(addresses: Sequence[str]) -> None:
    """Raise UserError when an address to announce is no multiaddress."""
    for address in addresses:
        parts = address.split("/")
        if len(parts) != 5 or parts[0] or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[3] != "tcp":
            raise UserError(
                f"--announce {address}: an address that others can dial looks like /ip4/203.0.113.5/tcp/31337"
            )


def new(options: argparse.Namespace) -> None:
    """Write a run file."""
    from bootstrap.run_file import write_preset

    write_preset(options.preset, options.output)
    print(f"{options.output} is written. Edit it, then: spes-node bootstrap {options.output}")


def bootstrap(options: argparse.Namespace) -> None:
    """Start a run, or go on with it, and serve it."""
    from bootstrap.genesis import prepare_run
    from bootstrap.rendezvous import serve
    from bootstrap.run_file import read_run_file
    from node.corpus import load_corpus
    from swarm.identity import Identity
    from swarm.network import check_ports

    run_file = read_run_file(options.run_file)
    listen = multiaddress(options.listen)
    check_announced(options.announce)
    check_ports([listen])
    fingerprint, num_blocks = "", 0
    if run_file.data.source != "own":
        corpus = load_corpus(run_file.data, run_file.run.seed, options.data)
        fingerprint, num_blocks = corpus.fingerprint, corpus.num_blocks
    home = options.home or default_home("bootstrap")
    with closing(Identity.open(home / "identity.key")) as identity:
        console = Console()
        manifest, store = prepare_run(
            run_file, identity, home, fingerprint=fingerprint, num_blocks=num_blocks, say=console.say
        )
        run_async(
            serve(
                manifest,
                identity=identity,
                home=home,
                store=store,
                listen=[listen],
                announce=options.announce,
                name=options.name or spoken_name(identity.node_id),
                on_addresses=lambda addresses: console.serving(manifest.document, home, addresses),
                on_state=console.state,
                on_round=console.round,
                say=console.say,
            ),
            verbose=options.verbose,
        )


def join(options: argparse.Namespace) -> None:
    """Take part in a run."""
    from node.daemon import Listeners, NodeSettings
    from node.daemon import join as join_run
    from node.trainer_process import TrainerSettings
    from swarm.identity import Identity
    from swarm.network import peer_of
    from swarm.release import VERSION

    for address in options.peers:
        peer_of(address)
    home = options.home or default_home("node")
    listen = multiaddress(options.listen)
    check_announced(options.announce)
    with closing(Identity.open(home / "identity.key")) as identity:
        name = options.name or spoken_name(identity.node_id)
        console = Console()
        console.say(f"spes-node {VERSION}: {name} ({identity.node_id})")
        settings = NodeSettings(
            home=home,
            peers=options.peers,
            listen=[listen],
            announce=options.announce,
            run_id=options.run,
            name=name,
            experts=options.experts,
            trainer=TrainerSettings(data=options.data, device=options.device, threads=options.threads),
        )
        tell = Listeners(
            say=console.say,
            on_joined=console.joined,
            on_state=console.state,
            on_round=console.round,
            on_progress=lambda step, loss: None,
        )
        run_async(join_run(settings, identity, tell), verbose=options.verbose)


def status(options: argparse.Namespace) -> None:
    """Report on a swarm."""
    from node.status import report

    run_async(report(options.peers, options.run, as_json=options.json), verbose=options.verbose)


def export(options: argparse.Namespace) -> None:
    """Write a checkpoint from a node's shard store."""
    from model.export import export_checkpoint
    from node.stores import open_store

    manifest, store = open_store(options.home or default_home("node"), options.run)
    assert store.head is not None
    export_checkpoint(manifest.model, store.values, options.output)
    print(f"round {store.head.document.round} of {manifest.name} is in {options.output}")


def demo(options: argparse.Namespace) -> None:
    """Run the demonstration."""
    from node.demo import run_demo

    run_demo(options.output, options.data, options.rounds)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "new": new,
    "bootstrap": bootstrap,
    "join": join,
    "status": status,
    "export": export,
    "demo": demo,
}
