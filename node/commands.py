"""What each command does: from parsed options to the daemon, the rendezvous or a report."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.errors import UserError
from node.console import Console
from node.log_files import LOG_FORMAT, kept_log
from node.names import spoken_name

if TYPE_CHECKING:
    from node.web.server import PagePlace
    from swarm.identity import Identity


def run_async(main: Coroutine[Any, Any, None], *, verbose: bool) -> None:
    """Run a coroutine on uvloop, with the log on standard error, and in a file where one was begun."""
    import uvloop

    if all(isinstance(handler, RotatingFileHandler) for handler in logging.getLogger().handlers):
        to_terminal = logging.StreamHandler()
        to_terminal.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger().addHandler(to_terminal)
    if verbose:
        for package in ("swarm", "bootstrap", "node"):
            logging.getLogger(package).setLevel(logging.DEBUG)
    uvloop.run(main)


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the process as Ctrl-C does, so that half of a folder is removed first."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    # One that is ignored (nohup) stays so.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


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


def page_place(text: str) -> "PagePlace | None":
    """Where a page is to be served, from what was said on the command line. Raises UserError."""
    from node.web.server import PagePlace

    return {"off": None, "on": PagePlace()}[text] if text in ("off", "on") else PagePlace.parse(text)


@contextmanager
def taking_part(options: argparse.Namespace, kind: str) -> Iterator[tuple["Identity", Path, str]]:
    """Inside, a daemon of this kind has its folder to itself, and keeps its log there: its identity, the folder, its
    name. Raises UserError for places that are none, before anything is made."""
    from swarm.identity import Identity
    from swarm.network import peer_of

    for address in options.peers:
        peer_of(address)
    multiaddress(options.listen)
    check_announced(options.announce)
    page_place(options.dashboard)
    home = options.home or default_home(kind)
    with closing(Identity.open(home / "identity.key")) as identity, kept_log(home):
        yield identity, home, options.name or spoken_name(identity.node_id)


def new(options: argparse.Namespace) -> None:
    """Write a run file."""
    from bootstrap.run_file import write_preset

    if options.init is None:
        write_preset(options.preset, options.output)
    else:
        from model.checkpoint import Checkpoint

        write_preset(options.preset, options.output, Checkpoint.open(options.init).settings)
    start = f" --init {options.init}" if options.init is not None else ""
    print(f"{options.output} is written. Edit it, then: spes-node bootstrap {options.output}{start}")


def bootstrap(options: argparse.Namespace) -> None:
    """Start a run, or go on with it, and serve it."""
    from bootstrap.genesis import prepare_run
    from bootstrap.rendezvous import serve
    from bootstrap.run_file import read_run_file
    from node.corpus import load_corpus
    from node.reporter import Reporter
    from node.tokens import open_encoder
    from swarm.identity import Identity
    from swarm.network import check_ports

    run_file = read_run_file(options.run_file)
    listen = multiaddress(options.listen)
    check_announced(options.announce)
    check_ports([listen])
    encoder = open_encoder(run_file.data.tokenizer, run_file.model.vocab_size, options.tokenizer)
    fingerprint, num_blocks = encoder.digest, 0
    if run_file.data.source != "own":
        corpus = load_corpus(run_file.data, run_file.run.seed, options.data, encoder)
        fingerprint, num_blocks = corpus.fingerprint, corpus.num_blocks
    start = None
    if options.init is not None:
        from bootstrap.warm_start import open_warm_start

        print(f"reading the checkpoint {options.init}", flush=True)
        start = open_warm_start(options.init, run_file.model)
    home = options.home or default_home("bootstrap")
    with closing(Identity.open(home / "identity.key")) as identity, kept_log(home):
        console = Console()
        place = page_place(options.dashboard)
        manifest, store = prepare_run(
            run_file,
            identity,
            home,
            fingerprint=fingerprint,
            num_blocks=num_blocks,
            start=start,
            say=console.say,
        )
        reporter = Reporter(manifest, identity.node_id, store, home, on_state=console.state, on_round=console.round)

        async def serve_with_page() -> None:
            async with reporter.page(place) as page:
                await serve(
                    manifest,
                    identity=identity,
                    home=home,
                    store=store,
                    listen=[listen],
                    announce=options.announce,
                    name=options.name or spoken_name(identity.node_id),
                    on_addresses=lambda addresses: console.serving(manifest.document, home, addresses, page),
                    on_state=reporter.state,
                    on_commit=reporter.commit,
                    watch=reporter.watch,
                    say=console.say,
                )

        run_async(serve_with_page(), verbose=options.verbose)


def join(options: argparse.Namespace) -> None:
    """Take part in a run."""
    from model.tokenizer import check_folder
    from node.daemon import Listeners, NodeSettings
    from node.daemon import join as join_run
    from node.trainer_process import TrainerSettings
    from swarm.release import VERSION

    if options.tokenizer is not None:
        check_folder(options.tokenizer)
    with taking_part(options, "node") as (identity, home, name):
        console = Console()
        console.say(f"spes-node {VERSION}: {name} ({identity.node_id})")
        settings = NodeSettings(
            home=home,
            peers=options.peers,
            listen=[multiaddress(options.listen)],
            announce=options.announce,
            run_id=options.run,
            name=name,
            page=page_place(options.dashboard),
            trainer=TrainerSettings(
                data=options.data,
                device=options.device,
                threads=options.threads,
                tokenizer=options.tokenizer,
                experts=options.experts,
                memory=int(options.vram * 1e9) if options.vram else None,
                deterministic=options.deterministic,
            ),
        )
        tell = Listeners(
            say=console.say,
            on_joined=console.joined,
            on_state=console.state,
            on_round=console.round,
            on_progress=lambda step, loss: None,
        )
        run_async(join_run(settings, identity, tell), verbose=options.verbose)


def doctor(options: argparse.Namespace) -> None:
    """Rehearse joining; exits with 1 when something would fail."""
    from node.doctor import Rehearsal, diagnose

    rehearsal = Rehearsal(
        peers=options.peers or [],
        run_id=options.run,
        home=options.home or default_home("node"),
        listen=[multiaddress(options.listen)],
        announce=options.announce,
        data=options.data,
        tokenizer=options.tokenizer,
        device=options.device,
        experts=options.experts,
    )
    check_announced(options.announce)
    passed = list[bool]()

    async def rehearse() -> None:
        passed.append(await diagnose(rehearsal, as_json=options.json))

    run_async(rehearse(), verbose=options.verbose)
    sys.exit(not passed[0])


def seed(options: argparse.Namespace) -> None:
    """Keep and serve the state of a run without training."""
    from node.seed import SeedSettings, serve
    from swarm.release import VERSION

    with taking_part(options, "seed") as (identity, home, name):
        console = Console()
        console.say(f"spes-node {VERSION}: seed {name} ({identity.node_id})")
        settings = SeedSettings(
            home=home,
            peers=options.peers,
            listen=[multiaddress(options.listen)],
            announce=options.announce,
            run_id=options.run,
            name=name,
            page=page_place(options.dashboard),
        )
        run_async(
            serve(
                settings,
                identity,
                on_joined=console.serving,
                on_state=console.state,
                on_round=console.round,
                say=console.say,
            ),
            verbose=options.verbose,
        )


def plan(options: argparse.Namespace) -> None:
    """Say what a box needs to take part in a run."""
    from bootstrap.run_file import read_preset, read_run_file
    from model.device import choose_device, device_memory
    from model.memory_plan import Device
    from model.optimizer import has_adam_8bit
    from model.settings import ComputeSettings
    from model.tokenizer import BYTES
    from node.planning import plan_for, report
    from node.tokens import open_encoder

    run_file = read_run_file(options.run) if options.run.exists() else read_preset(str(options.run))
    run = run_file.manifest(author="nobody yet", fingerprint="", num_blocks=0)
    if run.data.tokenizer == BYTES:
        open_encoder(BYTES, run.model.vocab_size)  # the vocabulary is checked; another tokenizer may not be here
    if options.vram:
        device = Device(
            memory=int(options.vram * 1e9),
            gpu=not options.cpu,
            compute=ComputeSettings(dtype="fp32" if options.cpu else "bf16"),
            adam_8bit=True,
        )
    else:
        here, dtype, reason = choose_device("cpu" if options.cpu else "auto")
        print(f"planning for this box: {reason}. For another one: --vram GB")
        device = Device(
            memory=device_memory(here),
            gpu=here.type == "cuda",
            compute=ComputeSettings(dtype=dtype),
            adam_8bit=has_adam_8bit(),  # as `join` on this box will find it
        )
    for line in report(
        run, plan_for(run, device, options.experts), options.nodes or run.round.start_nodes, options.bandwidth
    ):
        print(line)


def simulate(options: argparse.Namespace) -> None:
    """Train all nodes of a run in this process."""
    import torch

    from bootstrap.run_file import read_run_file
    from node.corpus import load_corpus
    from node.simulation import run_simulation
    from node.tokens import open_encoder

    run_file = read_run_file(options.run_file)
    if options.threads:
        torch.set_num_threads(options.threads)
    encoder = open_encoder(run_file.data.tokenizer, run_file.model.vocab_size, options.tokenizer)
    corpus = load_corpus(run_file.data, run_file.run.seed, options.data, encoder)
    with ending_cleanly():
        run_simulation(
            run_file,
            corpus,
            nodes=options.nodes or run_file.round.start_nodes,
            experts=options.experts,
            rounds=options.rounds or run_file.round.total,
            output=options.output,
            console=Console(),
        )


def status(options: argparse.Namespace) -> None:
    """Report on a swarm."""
    from node.status import report, show

    if options.peers:
        run_async(report(options.peers, options.run, as_json=options.json), verbose=options.verbose)
    else:
        show(options.home or default_home("node"), as_json=options.json)


def ping(options: argparse.Namespace) -> None:
    """Measure how far a node is."""
    from node.ping import ping as ping_node

    run_async(
        ping_node(options.peers, options.run, options.node, options.count, as_json=options.json),
        verbose=options.verbose,
    )


def tell(options: argparse.Namespace) -> None:
    """Tell the node on this box what to do."""
    from node.control import ask

    request = {"do": options.command} | ({"now": options.now} if options.command == "leave" else {})
    print(ask(options.home or default_home("node"), request)["said"])


def logs(options: argparse.Namespace) -> None:
    """Print what the node on this box has said."""
    from node.log_files import read_log

    for line in read_log(options.home or default_home("node"), options.lines, follow=options.follow):
        print(line, flush=options.follow)


def invite(options: argparse.Namespace) -> None:
    """Print the line with which others join the swarm through the node on this box."""
    from node.control import ask
    from node.invitation import invitation

    invitation(ask(options.home or default_home("node"), {"do": "state"}), as_json=options.json)


def identity(options: argparse.Namespace) -> None:
    """Show, copy or take over a key."""
    from node import identity_file

    path = (options.home or default_home("node")) / "identity.key"
    match options.action:
        case "show":
            identity_file.show(path, as_json=options.json)
        case "backup":
            identity_file.copy(path, options.file)
            print(f"{options.file} holds the key of this node. Whoever has it can take its place")
        case "import":
            identity_file.copy(options.file, path)
            identity_file.show(path, as_json=False)


def dashboard(options: argparse.Namespace) -> None:
    """Serve the page of a swarm without taking part."""
    from node.onlooker import look_on
    from node.web.server import PagePlace

    place = PagePlace.parse(options.listen) if options.listen else PagePlace()
    home = options.home or default_home("dashboard")
    run_async(look_on(options.peers, options.run, place, home, Console().say), verbose=options.verbose)


def export(options: argparse.Namespace) -> None:
    """Write a checkpoint from a node's shard store."""
    from node.run_export import export_run

    with ending_cleanly():
        run, commit = export_run(
            options.home or default_home("node"),
            options.output,
            run_id=options.run,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
        )
    print(f"round {commit.round} of {run.name} is in {options.output}")


def generate(options: argparse.Namespace) -> None:
    """Let the model of a node's last commit go on with a text."""
    from tempfile import TemporaryDirectory

    from model.export import generate as go_on
    from node.run_export import export_run

    with ending_cleanly(), TemporaryDirectory(prefix="spes-generate-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        _, commit = export_run(
            options.home or default_home("node"), checkpoint, run_id=options.run, tokenizer=options.tokenizer
        )
        print(f"round {commit.round} goes on:", file=sys.stderr)
        print(options.prompt + go_on(checkpoint, options.prompt, options.tokens, seed=options.seed))


def upcycle(options: argparse.Namespace) -> None:
    """Turn a dense checkpoint into a mixture of experts."""
    from model.upcycle import UpcycleSettings
    from model.upcycle import upcycle as write_mixture

    how = {key: getattr(options, key) for key in UpcycleSettings.model_fields}
    with ending_cleanly():
        model = write_mixture(options.dense, options.output, how)
    print(
        f"{options.output} is a {model.family} of {model.num_layers} layers with {model.num_experts} experts. Next: "
        f"spes-node new PRESET --init {options.output} -o run.toml"
    )


def demo(options: argparse.Namespace) -> None:
    """Run the demonstration."""
    from node.demo import run_demo

    run_demo(options.output, options.data, options.rounds)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "new": new,
    "bootstrap": bootstrap,
    "join": join,
    "doctor": doctor,
    "seed": seed,
    "plan": plan,
    "simulate": simulate,
    "status": status,
    "ping": ping,
    "pause": tell,
    "finish": tell,
    "resume": tell,
    "leave": tell,
    "logs": logs,
    "invite": invite,
    "identity": identity,
    "dashboard": dashboard,
    "export": export,
    "generate": generate,
    "upcycle": upcycle,
    "demo": demo,
}
