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
MAX_NAME = 40
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
  spes-node join --peers /ip4/...         take part, with everything else from the run
  spes-node status --peers /ip4/...       look at the swarm
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
    new.add_argument("preset", metavar="PRESET", help="demo, tiny-test, ...; an unknown name lists them all")
    new.add_argument("-o", "--output", type=Path, default=Path("run.toml"), metavar="FILE", help="default: run.toml")

    start = commands.add_parser("bootstrap", help="start a run and be the place where others find it")
    start.add_argument("run_file", type=Path, metavar="RUN.toml")
    start.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="the run's text, for its check")
    _add_place(start, f"0.0.0.0:{DEFAULT_PORT}")

    join = commands.add_parser("join", help="take part in a run with this box")
    _add_peers(join)
    join.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="txt, jsonl or parquet files")
    join.add_argument("--experts", type=_positive, metavar="N", help="train at most N experts (default: all)")
    join.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (default: auto)")
    join.add_argument("--threads", type=_positive, default=0, metavar="N", help="CPU threads of the trainer")
    _add_place(join, "0.0.0.0:0")

    status = commands.add_parser("status", help="show the nodes, who trains which experts, round and loss")
    _add_peers(status)
    status.add_argument("--json", action="store_true", help="for programs")

    export = commands.add_parser("export", help="write this node's state as a Hugging Face checkpoint")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--home", type=Path, metavar="DIR", help="folder of the node or of the rendezvous")
    export.add_argument("--run", metavar="ID", help="beginning of the run's id, when the folder holds several")

    demo = commands.add_parser("demo", help="a real swarm of four nodes on this box, for a few minutes")
    demo.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help="train on these instead")
    demo.add_argument("-o", "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    demo.add_argument("--rounds", type=_positive, metavar="N", help="stop after N rounds")
    for command in (start, join, status):
        command.add_argument("-v", "--verbose", action="store_true", help="log what is tried and what fails, too")
    return parser


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        nargs="+",
        required=True,
        metavar="ADDR",
        help="addresses from the join line; one that answers is enough",
    )
    parser.add_argument("--run", metavar="ID", help="beginning of the run's id, when the swarm holds several")


def _add_place(parser: argparse.ArgumentParser, listen: str) -> None:
    parser.add_argument(
        "--name", type=_name, metavar="NAME", help="shown to others (default: one made from the identity)"
    )
    parser.add_argument("--listen", default=listen, metavar="HOST:PORT", help=f"default: {listen} (port 0: any)")
    parser.add_argument("--announce", nargs="+", default=[], metavar="ADDR", help="multiaddresses others should dial")
    parser.add_argument("--home", type=Path, metavar="DIR", help="identity, address book and state of this node")


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_NAME} printable characters")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
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
