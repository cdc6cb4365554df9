"""The command line. Parsing and help import nothing heavy; each command loads what it needs when it runs.

Exit codes: 0 done or left cleanly, 1 failed, 2 wrong input (nothing was changed), 70 a bug.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from model.errors import SpesError

DEFAULT_PORT = 31337
PAGE_PORT = 8730
MAX_NAME = 40
MAX_QUANTITY = 1_000_000
EXIT_BUG = 70
DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENOENT,
}
"""What a wrong or full folder answers; everything else from the system is a bug until it is looked at."""

EXAMPLES = """examples:
  spes-node new demo -o run.toml          write a run file to edit
  spes-node bootstrap run.toml            start the run; prints the join line
  spes-node doctor --peers /ip4/...       see first whether this box can
  spes-node join --peers /ip4/...         take part, with everything else from the run
  spes-node status                        what the node on this box sees
  spes-node pause, resume, leave          what it should do
  spes-node status --peers /ip4/...       look at the swarm from elsewhere
  spes-node dashboard --peers /ip4/...    look at it in a browser
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    parser = argparse.ArgumentParser(
        prog="spes-node",
        description="Pretrain a mixture-of-experts language model together over the internet, one GPU box each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    new = commands.add_parser("new", help="write a commented run file from a preset")
    new.add_argument("preset", metavar="PRESET", help="demo, 50m, 160m, 1b, 2b, ...; an unknown name lists them all")
    new.add_argument("-o", "--output", type=Path, default=Path("run.toml"), metavar="FILE", help="default: run.toml")
    new.add_argument("--init", type=Path, metavar="DIR", help="for the model of this Hugging Face checkpoint")

    start = commands.add_parser("bootstrap", help="start a run and be the place where others find it")
    start.add_argument("run_file", type=Path, metavar="RUN.toml")
    start.add_argument(
        "--init",
        type=Path,
        metavar="DIR",
        help="begin with the weights of this Hugging Face checkpoint (olmoe, qwen3_moe or mixtral)",
    )
    start.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="the run's text, for its check")
    _add_tokenizer(start)
    _add_place(start, f"0.0.0.0:{DEFAULT_PORT}")

    join = commands.add_parser("join", help="take part in a run with this box")
    _add_peers(join)
    join.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="txt, jsonl or parquet files")
    join.add_argument("--experts", type=_positive, metavar="N", help="train at most N experts (default: what fits)")
    join.add_argument(
        "--vram", type=_quantity, metavar="GB", help="use at most so much memory of the device, in 1e9 bytes"
    )
    join.add_argument("--deterministic", action="store_true", help="only kernels that repeat every bit, if slower")
    join.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    join.add_argument("--threads", type=_positive, default=0, metavar="N", help="CPU threads of the trainer")
    _add_tokenizer(join)
    _add_place(join, "0.0.0.0:0")

    doctor = commands.add_parser("doctor", help="try all that joining needs, before anything large is fetched")
    _add_peers(doctor, required=False, otherwise="only this box is looked at")
    doctor.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="as for join")
    doctor.add_argument("--experts", type=_positive, metavar="N", help="as for join")
    doctor.add_argument("--device", default="auto", metavar="DEVICE", help="as for join")
    doctor.add_argument("--listen", default="0.0.0.0:0", metavar="HOST:PORT", help="as for join")
    doctor.add_argument("--announce", nargs="+", default=[], metavar="ADDR", help="as for join")
    doctor.add_argument("--json", action="store_true", help="for programs")
    _add_tokenizer(doctor)
    _add_home(doctor)

    seed = commands.add_parser("seed", help="keep and serve the state of a run, without a GPU and without training")
    _add_peers(seed)
    _add_place(seed, "0.0.0.0:0")

    plan = commands.add_parser("plan", help="what a box needs for a run: memory, choices with their costs, traffic")
    plan.add_argument("run", type=Path, metavar="RUN", help="a run file, or the name of a preset")
    plan.add_argument(
        "--vram", type=_quantity, metavar="GB", help="memory of the GPU, in 1e9 bytes (default: this box)"
    )
    plan.add_argument("--cpu", action="store_true", help="plan for a CPU; --vram is then main memory")
    plan.add_argument(
        "--experts",
        type=_positive,
        metavar="N",
        help="train N experts (default: a node's share, experts / start_nodes)",
    )
    plan.add_argument(
        "--nodes",
        type=_positive,
        metavar="N",
        help="nodes in a round, for the traffic (default: the run's start_nodes)",
    )
    plan.add_argument(
        "--bandwidth", type=_quantity, default=100.0, metavar="MBIT", help="of the line, Mbit/s (default: 100)"
    )

    simulate = commands.add_parser("simulate", help="try a run: all its nodes in this process, without a network")
    simulate.add_argument("run_file", type=Path, metavar="RUN.toml", help="as for bootstrap")
    simulate.add_argument("--nodes", type=_positive, metavar="N", help="how many (default: the run's start_nodes)")
    simulate.add_argument("--experts", type=_positive, metavar="N", help="that each trains (default: its share)")
    simulate.add_argument(
        "--rounds", type=_positive, metavar="N", help="stop after N rounds (default: the run's total)"
    )
    simulate.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="the run's text")
    simulate.add_argument("--threads", type=_positive, default=0, metavar="N", help="CPU threads")
    _add_tokenizer(simulate)
    simulate.add_argument("-o", "--output", type=Path, metavar="FILE", help="a line of JSON for each round")

    status = commands.add_parser("status", help="show the nodes, who trains which experts, round and loss")
    _add_peers(status, required=False)
    _add_home(status)
    status.add_argument("--json", action="store_true", help="for programs")

    ping = commands.add_parser("ping", help="how far a node is, and what it has")
    ping.add_argument("node", metavar="NODE", help="its name, or the end of its id")
    ping.add_argument("--count", type=_positive, default=4, metavar="N", help="default: 4")
    ping.add_argument("--json", action="store_true", help="for programs")
    _add_peers(ping)

    _add_to_a_node(commands)

    dashboard = commands.add_parser("dashboard", help="the page of a swarm, without taking part in it")
    _add_peers(dashboard)
    dashboard.add_argument(
        "--listen", metavar="HOST:PORT", help=f"default: 127.0.0.1:{PAGE_PORT}, or the next free port"
    )
    dashboard.add_argument("--home", type=Path, metavar="DIR", help="for the token that others than this machine need")

    export = commands.add_parser("export", help="write this node's state as a Hugging Face checkpoint")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")
    _add_tokenizer(export)
    export.add_argument("--home", type=Path, metavar="DIR", help="folder of the node or of the rendezvous")
    export.add_argument("--run", metavar="ID", help="beginning of the run's id, when the folder holds several")

    generate = commands.add_parser("generate", help="let the model, as it is now, go on with a text")
    generate.add_argument("prompt", metavar="TEXT")
    generate.add_argument("--tokens", type=_positive, default=100, metavar="N", help="so many more (default: 100)")
    generate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one gives another text (default: 0)"
    )
    generate.add_argument("--run", metavar="ID", help="beginning of the run's id, when the folder holds several")
    _add_tokenizer(generate)
    _add_home(generate)

    _add_upcycle(commands.add_parser("upcycle", help="turn a dense checkpoint into a mixture of experts to begin with"))

    demo = commands.add_parser("demo", help="a real swarm of four nodes on this box, for a few minutes")
    demo.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    demo.add_argument("-o", "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--rounds", type=_positive, metavar="N", help="stop after N rounds")
    for command in (start, join, doctor, seed, status, ping, dashboard):
        command.add_argument("-v", "--verbose", action="store_true", help="log what is tried and what fails, too")
    return parser


def _add_upcycle(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn a dense Qwen3 checkpoint into qwen3_moe, or a Llama-style one into mixtral: every expert is a copy of "
        "the dense FFN with noise. Begin a run with it: spes-node bootstrap RUN.toml --init DIR"
    )
    parser.add_argument(
        "dense", type=Path, metavar="DENSE_DIR", help="a Hugging Face checkpoint: qwen3, llama, mistral"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--experts", type=int, default=8, metavar="N", help="experts in each layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, metavar="N", help="experts for each token (default: 2)")
    parser.add_argument(
        "--noise-std", type=float, default=0.02, metavar="X", help="standard deviation of the noise (default: 0.02)"
    )
    parser.add_argument(
        "--noise-fraction", type=float, default=0.5, metavar="X", help="part of the weights with noise (default: 0.5)"
    )
    parser.add_argument(
        "--router",
        choices=("normal", "zeros"),
        default="normal",
        help="first router weights. normal (default): random, so tokens reach all experts from the first step. zeros, "
        "as in the script released with the paper: all logits are equal, ties go to the lowest expert ids, and only "
        "the first top-k experts get any token until noise breaks the tie",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of noise and routers (default: 0)")


def _add_to_a_node(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands for the node that runs on this box."""
    for name, does in (
        ("pause", "stop training and keep serving; what was reached in this round is handed in"),
        ("finish", "train this round to its end, then pause"),
        ("resume", "train again after a pause"),
    ):
        _add_home(commands.add_parser(name, help=does))
    leave = commands.add_parser("leave", help="end the node when its round has ended")
    leave.add_argument("--now", action="store_true", help="do not wait for the end of the round")
    _add_home(leave)
    logs = commands.add_parser("logs", help="what the node has said")
    logs.add_argument("-n", "--lines", type=_positive, default=50, metavar="N", help="the last N lines (default: 50)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    _add_home(logs)
    invite = commands.add_parser("invite", help="print the line with which others join")
    invite.add_argument("--json", action="store_true", help="for programs")
    _add_home(invite)
    identity = commands.add_parser("identity", help="the key that makes this node the one it is")
    actions = identity.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="its name, its id, and where the key is")
    show.add_argument("--json", action="store_true", help="for programs")
    _add_home(show)
    for name, does in (
        ("backup", "copy the key to a file, which only you can read"),
        ("import", "take the key from a file, where there is none yet"),
    ):
        action = actions.add_parser(name, help=does)
        action.add_argument("file", type=Path, metavar="FILE")
        _add_home(action)


def _add_home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", type=Path, metavar="DIR", help="folder of the node (default: as for join)")


def _add_peers(
    parser: argparse.ArgumentParser, *, required: bool = True, otherwise: str = "ask the node on this box"
) -> None:
    parser.add_argument(
        "--peers",
        nargs="+",
        required=required,
        metavar="ADDR",
        help="addresses from the join line; one that answers is enough"
        + ("" if required else f" (default: {otherwise})"),
    )
    parser.add_argument("--run", metavar="ID", help="beginning of the run's id, when the swarm holds several")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the run's tokenizer (default: by its name, from the Hub)",
    )


def _add_place(parser: argparse.ArgumentParser, listen: str) -> None:
    parser.add_argument(
        "--name", type=_name, metavar="NAME", help="shown to others (default: one made from the identity)"
    )
    parser.add_argument("--listen", default=listen, metavar="HOST:PORT", help=f"default: {listen} (port 0: any)")
    parser.add_argument("--announce", nargs="+", default=[], metavar="ADDR", help="multiaddresses others should dial")
    parser.add_argument("--home", type=Path, metavar="DIR", help="identity, address book and state of this node")
    parser.add_argument(
        "--dashboard",
        default="on",
        metavar="PLACE",
        help=f"where this node's page is: on (127.0.0.1:{PAGE_PORT} or the next free port), off, PORT or HOST:PORT",
    )


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_NAME} printable characters")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number, at least 1")
    return int(text)


def _quantity(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MAX_QUANTITY:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and {MAX_QUANTITY:,} (without a unit)")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"spes-node {version('spes-node')}")
        return
    if options.command is None:
        parser.print_help()
        return
    try:
        from node import commands

        commands.COMMANDS[options.command](options)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `spes-node status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except BaseExceptionGroup as group:
        _exit_for(_first(group))
    except (SpesError, OSError) as error:
        _exit_for(error)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _exit_for(error: BaseException) -> None:
    sys.stdout.flush()
    if isinstance(error, SpesError):
        print(f"spes-node: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        reason = (error.strerror or "not usable").lower()
        remedy = "Free some space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
        print(f"spes-node: {where}{reason}. {remedy} another folder: --home DIR", file=sys.stderr)
        sys.exit(2)
    traceback.print_exception(error)
    sys.exit(EXIT_BUG)
