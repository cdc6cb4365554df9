"""The command line as people meet it: help without weight, one clear line and exit code 2 for what they got wrong."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.cli import build_parser, main
from node.local_swarm import LocalSwarm

NOBODY = "QmbY75EDT8ifKJaeUGw67xKmc9VwnmyZHUb7Vvf2DGU83e"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    main(["new", "tiny-test", "-o", str(path)])
    return path


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must end with exit code 2; returns its one line on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert exit_.value.code == 2, error
    assert error.startswith("spes-node: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["join", "--help"], ["--version"]])
def test_help_is_quick_and_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = "{'torch', 'transformers', 'hivemind', 'datasets', 'uvloop', 'numpy', 'pydantic'}"
    program = f"""
import atexit, sys
from node.cli import main
atexit.register(lambda: print("loaded", sorted({heavy} & set(sys.modules))))
main({arguments!r})
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and run.stdout.endswith("loaded []\n"), run.stdout + run.stderr


def test_python_m_node_is_the_same_program() -> None:
    run = subprocess.run([sys.executable, "-m", "node", "--version"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and run.stdout.startswith("spes-node "), run.stderr


def test_the_options_that_people_have_learnt_stay() -> None:
    parser = build_parser()
    join = parser.parse_args("join --peers a b --data x y --experts 2 --name n --home h --listen 0.0.0.0:1".split())
    assert join.peers == ["a", "b"] and len(join.data) == 2 and join.experts == 2
    assert parser.parse_args(["status", "--peers", "a", "--json"]).json


def test_new_refuses_what_is_there_and_unknown_presets(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run_file.read_text()
    assert str(run_file) in refused(capsys, "new", "demo", "-o", run_file)
    assert run_file.read_text() == before
    assert "demo" in refused(capsys, "new", "nothing", "-o", run_file.with_name("other.toml"))


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        ("hello", "not a peer address"),
        ("/ip4/127.0.0.1/tcp/1", "not a peer address"),
        (f"/ip4/127.0.0.1/tcp/x/p2p/{NOBODY}", "not a peer address"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}", "connection refused"),
    ],
)
@pytest.mark.parametrize("command", ["join", "status"])
def test_wrong_and_dead_addresses(
    command: str, peers: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--home", tmp_path / "home"] if command == "join" else []
    error = refused(capsys, command, "--peers", peers, *options)
    assert words in error and peers in error


def test_a_port_that_is_no_peer(busy_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"/ip4/127.0.0.1/tcp/{busy_port}/p2p/{NOBODY}"
    assert address in refused(capsys, "status", "--peers", address)


def test_a_port_in_use(run_file: Path, busy_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    error = refused(capsys, "bootstrap", run_file, "--listen", f"127.0.0.1:{busy_port}", "--home", home)
    assert f"127.0.0.1:{busy_port}" in error and "--listen" in error
    assert not home.exists()


@pytest.mark.parametrize("place", ["nowhere", "localhost:80", "127.0.0.1:70000", "127.0.0.1"])
def test_a_place_that_is_none(place: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place in refused(capsys, "bootstrap", run_file, "--listen", place, "--home", tmp_path / "home")


def test_a_run_file_with_an_unknown_key(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(run_file.read_text().replace("learning_rate", "learning_rat"))
    error = refused(capsys, "bootstrap", run_file, "--home", tmp_path / "home", "--listen", "127.0.0.1:0")
    assert "optimizer.learning_rat: unknown key, did you mean optimizer.learning_rate?" in error
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("content", "words"), [(b"", "empty"), (b"caf\xe9 au lait", "UTF-8")])
def test_text_that_cannot_be_used(
    content: bytes, words: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(run_file.read_text().replace('source = "builtin"', 'source = "files"'))
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    error = refused(
        capsys, "bootstrap", run_file, "--data", text, "--home", tmp_path / "home", "--listen", "127.0.0.1:0"
    )
    assert words in error and "text.txt" in error
    assert not (tmp_path / "home").exists()


def test_export_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run" in refused(capsys, "export", "--home", tmp_path, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.swarm
@pytest.mark.timeout(180)
def test_one_identity_two_processes_other_text_and_a_wrong_id(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(run_file)
        home = tmp_path / "rendezvous"
        error = refused(capsys, "bootstrap", run_file, "--home", home, "--listen", "127.0.0.1:0")
        assert "another process uses this identity" in error and "--home" in error

        port = swarm.address.split("/p2p/")[0]
        error = refused(capsys, "join", "--peers", f"{port}/p2p/{NOBODY}", "--home", tmp_path / "lost")
        assert NOBODY in error

        text = tmp_path / "text.txt"
        text.write_text("another text " * 1000)
        error = refused(
            capsys, "join", "--peers", swarm.address, "--home", tmp_path / "other", "--data", text,
            "--listen", "127.0.0.1:0",
        )  # fmt: skip
        assert "--data" in error

        report = subprocess.run(
            [sys.executable, "-m", "node", "status", "--peers", swarm.address, "--json"],
            capture_output=True, text=True, timeout=60, env=os.environ,
        )  # fmt: skip
        assert [node["role"] for node in json.loads(report.stdout)["nodes"]] == ["rendezvous"]


@pytest.mark.swarm
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small disk: needs root on Linux")
def test_no_room_on_the_disk(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        started = time.monotonic()
        error = refused(capsys, "bootstrap", run_file, "--home", disk, "--listen", "127.0.0.1:0")
        assert "needed" in error and "free" in error and "--home" in error
        assert time.monotonic() - started < 60
        assert not list(disk.glob("runs/*/HEAD")) and not list(disk.glob("runs/*/objects/*/*"))
    finally:
        subprocess.run(["umount", disk], check=True)
