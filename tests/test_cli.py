"""The command line as people meet it: help without weight, one clear line and exit code 2 for what they got wrong."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap.run_file import change_settings, read_run_file
from model.checkpoint import Checkpoint
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
    export = parser.parse_args("export -o out --home h --run 12 --dtype bf16 --tokenizer t".split())
    assert (export.output, export.run, export.dtype, export.tokenizer) == (Path("out"), "12", "bf16", Path("t"))
    upcycle = parser.parse_args("upcycle dense -o out".split())
    assert (upcycle.experts, upcycle.top_k, upcycle.noise_std, upcycle.noise_fraction) == (8, 2, 0.02, 0.5)
    assert (upcycle.router, upcycle.seed) == ("normal", 0)


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


def test_a_tokenizer_that_is_none(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
    error = refused(capsys, "join", "--peers", nobody, "--tokenizer", tmp_path / "gone", "--home", home)
    assert "gone is no folder" in error
    options = ["--home", home, "--listen", "127.0.0.1:0"]
    assert "leave out --tokenizer" in refused(capsys, "bootstrap", run_file, "--tokenizer", tmp_path, *options)
    run_file.write_text(run_file.read_text().replace("[data]", '[data]\ntokenizer = "some/name"  # of nobody'))
    assert "has no tokenizer.json" in refused(capsys, "bootstrap", run_file, "--tokenizer", tmp_path, *options)
    assert not home.exists()


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `spes-node plan` prints."""
    main(["plan", *map(str, arguments)])
    output = capsys.readouterr()
    assert not output.err
    return output.out


def test_a_plan_for_a_preset_and_for_a_run_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    preset = planned(capsys, "tiny-test", "--vram", 8)
    assert "2 of 4 experts on a GPU with 8.0 GB free, products in bf16" in preset
    assert "all experts would fit the same way" in preset and "A round with 2 nodes moves" in preset
    assert planned(capsys, run_file, "--vram", 8) == preset
    other = planned(capsys, run_file, "--vram", 8, "--experts", 1, "--nodes", 5, "--bandwidth", 0.5)
    assert "1 of 4 experts" in other and "A round with 5 nodes" in other and "at 0.5 Mbit/s" in other


def test_a_plan_for_a_cpu_and_for_this_box(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert "on a CPU with 8.0 GB free, products in fp32" in planned(capsys, "tiny-test", "--cpu", "--vram", 8)
    here = planned(capsys, "tiny-test", "--cpu")
    assert here.startswith("planning for this box: the CPU was asked for. For another one: --vram GB\n")
    assert "on a CPU with" in here and "It fits" in here


def test_a_plan_for_this_box_has_only_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("model.optimizer.find_spec", lambda name: None)
    monkeypatch.setattr("model.device.device_memory", lambda device: 400_000_000)
    assert "8-bit AdamW, which saves most, is not installed" in refused(capsys, "plan", "tiny-test", "--cpu")
    assert "is not installed" not in refused(capsys, "plan", "tiny-test", "--cpu", "--vram", 0.4)


def test_plans_that_cannot_be(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is no file and no preset; the presets are " in refused(capsys, "plan", "nothing")
    assert "this model has 4 in each layer" in refused(capsys, "plan", run_file, "--vram", 8, "--experts", 5)
    assert "experts need" in refused(capsys, "plan", run_file, "--vram", 1)
    run_file.write_text(run_file.read_text().replace("num_layers = 2", "num_layers = 0"))
    assert "model.num_layers" in refused(capsys, "plan", run_file, "--vram", 8)


def test_export_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run" in refused(capsys, "export", "--home", tmp_path, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A checkpoint that the command upcycle has made of a dense one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    main(["upcycle", str(tmp_path / "dense"), "-o", str(tmp_path / "mixture"), "--experts", "3"])
    assert "mixtral of 1 layers with 3 experts" in capsys.readouterr().out
    return tmp_path / "mixture"


def test_a_dense_model_becomes_a_run_file(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    main(["new", "tiny-test", "--init", str(mixture), "-o", str(path)])
    assert f"spes-node bootstrap {path} --init {mixture}" in capsys.readouterr().out
    run_file = read_run_file(path)
    assert (run_file.model.family, run_file.model.num_experts, run_file.data.block_tokens) == ("mixtral", 3, 16)


def test_checkpoints_that_cannot_be_begun_with(
    mixture: Path, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", tmp_path / "home", "--listen", "127.0.0.1:0"]
    error = refused(capsys, "bootstrap", run_file, "--init", mixture, *home)
    assert "model.family: the run file has 'olmoe' and the checkpoint" in error and "'mixtral'" in error
    assert "config.json is missing" in refused(capsys, "bootstrap", run_file, "--init", tmp_path / "gone", *home)
    assert not (tmp_path / "home").exists()
    new = tmp_path / "new.toml"
    assert "not supported" in refused(capsys, "new", "demo", "-o", new, "--init", tmp_path / "dense")
    assert not new.exists()


def test_upcycling_what_cannot_be(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, out = tmp_path / "dense", tmp_path / "out"
    assert "not supported" in refused(capsys, "upcycle", mixture, "-o", out)
    assert "--noise-fraction" in refused(capsys, "upcycle", dense, "-o", out, "--noise-fraction", 2)
    assert "--top-k" in refused(capsys, "upcycle", dense, "-o", out, "--experts", 2, "--top-k", 3)
    assert "not empty" in refused(capsys, "upcycle", dense, "-o", mixture)
    assert not out.exists()


def test_a_command_that_is_ended_leaves_no_half_of_a_folder(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())

    def end(*arguments: object, **options: object) -> None:
        assert callable(signal.getsignal(signal.SIGTERM)), "the process would be gone at once"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("model.checkpoint_writer.CheckpointWriter.add", end)
    monkeypatch.setattr("node.run_export.export_run", end)
    for command in (["upcycle", str(tmp_path / "dense")], ["export"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "-o", str(tmp_path / "out")])
        assert ended.value.code == 143 and sorted(tmp_path.iterdir()) == before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.swarm
@pytest.mark.timeout(180)
def test_a_swarm_begins_with_a_checkpoint_and_is_exported_while_it_runs(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    main(["new", "tiny-test", "--init", str(mixture), "-o", str(path)])
    path.write_text(path.read_text().replace("start_nodes = 2", "start_nodes = 1").replace("total = 3", "total = 0"))
    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(path, "--init", str(mixture))
        node = swarm.start_node("node")
        deadline = time.monotonic() + 90
        while not list(node.home.glob("runs/*/history.jsonl")):
            assert time.monotonic() < deadline, node.log.read_text()
            time.sleep(0.1)
        main(["export", "--home", str(node.home), "-o", str(tmp_path / "out"), "--dtype", "bf16"])
        capsys.readouterr()
        main(["generate", "The ", "--home", str(node.home), "--tokens", "8"])
        assert capsys.readouterr().out.startswith("The ")
        assert node.process.poll() is None
    assert "begun with checkpoint" in node.log.read_text()
    assert "a checkpoint, as state" in (tmp_path / "out" / "README.md").read_text()
    before, after = (Checkpoint.open(tmp_path / name).read("head") for name in ("mixture", "out"))
    assert 0 < np.abs(before - after).max() < 0.1, "a few steps from where it began"


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


def test_a_run_is_simulated_round_by_round(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = tmp_path / "rounds.jsonl"
    main(["simulate", str(run_file), "--rounds", "2", "--nodes", "4", "--threads", "1", "-o", str(rounds)])
    shown = capsys.readouterr().out
    assert "4 in this process, each trains 1 of 4 experts" in shown and "held-out loss of the last state" in shown
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert [(line["round"], line["nodes"], line["covered"]) for line in lines] == [(1, 4, 4), (2, 4, 4)]
    change_settings(run_file, {"round.total": 0})
    assert "--rounds N" in refused(capsys, "simulate", run_file)


@pytest.mark.swarm
@pytest.mark.timeout(240)
def test_a_node_pauses_resumes_and_leaves_as_it_is_told(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_settings(run_file, {"round.total": 0, "round.start_nodes": 1})
    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(run_file)
        node = swarm.start_node("ann")
        home = ["--home", str(node.home)]

        def me() -> dict[str, Any]:
            capsys.readouterr()
            try:
                main(["status", "--json", *home])
            except SystemExit:
                return {"state": "not there", "round": -1}
            state = json.loads(capsys.readouterr().out)
            found: dict[str, Any] = next((each for each in state["nodes"] if each["id"] == state["me"]), {})
            return found

        def until(condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
            deadline = time.monotonic() + 90
            while not condition(seen := me()):
                assert time.monotonic() < deadline, f"{what}: {seen}\n{node.log.read_text()}"
                time.sleep(0.2)
            return seen

        until(lambda seen: seen.get("round", 0) > 0, "it trains")
        main(["pause", *home])
        paused = until(lambda seen: seen["state"] == "paused", "it pauses")
        assert paused["experts"] == []
        node.process.kill()
        node.process.wait()
        node = swarm.start_node("ann")
        again = until(lambda seen: seen.get("state") == "paused", "it stays paused when it is started again")
        assert again["round"] == paused["round"]
        main(["ping", "ann", "--peers", swarm.address, "--count", "2", "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert (answer["id"], answer["round"], len(answer["milliseconds"])) == (again["id"], again["round"], 2)
        assert swarm.rendezvous is not None
        assert "trains nothing anyway" in refused(capsys, "pause", "--home", swarm.rendezvous.home)
        main(["resume", *home])
        until(lambda seen: seen["round"] > again["round"], "it trains again")
        main(["leave", *home])
        assert node.process.wait(timeout=60) == 0
    assert "no node runs in" in refused(capsys, "status", *home)


@pytest.mark.swarm
@pytest.mark.timeout(240)
def test_a_box_is_examined_before_it_joins(
    run_file: Path, busy_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(*options: object) -> tuple[int, dict[str, dict[str, str]]]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(["doctor", "--json", "--home", str(tmp_path / "home"), *map(str, options)])
        findings = json.loads(capsys.readouterr().out)
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, {finding["code"]: finding for finding in findings}

    def verdicts(findings: dict[str, dict[str, str]]) -> dict[str, str]:
        return {code: finding["verdict"] for code, finding in findings.items()}

    with LocalSwarm(tmp_path) as swarm:
        swarm.start_rendezvous(run_file)
        place = ["--listen", "127.0.0.1:0", "--device", "cpu"]
        code, found = examine("--peers", swarm.address, *place)
        assert (code, {*verdicts(found).values()}) == (0, {"ok"}), found
        checks = "packages device home identity port peer clock dialled run memory disk text line"
        assert [*found] == checks.split()
        assert "blocks of 32 tokens" in found["text"]["text"] and "/s from one node" in found["line"]["text"]

        wrong_key = swarm.address.rpartition("/")[0] + "/" + NOBODY
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
        code, found = examine("--peers", wrong_key, dead, *place)
        assert code == 1 and found["swarm"]["verdict"] == "failed" and found["peer"]["verdict"] == "warning"
        assert "connection refused" in found["peer"]["text"]

        code, found = examine("--peers", swarm.address, "--listen", f"127.0.0.1:{busy_port}")
        assert (code, verdicts(found)["port"], verdicts(found)["swarm"]) == (1, "failed", "skipped")

        (tmp_path / "text.txt").write_text("other text")
        code, found = examine("--peers", swarm.address, "--data", tmp_path / "text.txt", "--experts", 9, *place)
        assert (code, verdicts(found)["text"], verdicts(found)["memory"]) == (1, "failed", "failed")
    assert not (tmp_path / "home").exists(), "nothing was left behind"


def test_every_check_is_explained() -> None:
    root = Path(__file__).parent.parent
    codes = set(re.findall(r'Finding\(\s*"(\w+)"', (root / "node" / "doctor.py").read_text()))
    assert len(codes) > 10
    assert codes <= set(re.findall(r"^\| `(\w+)` \|", (root / "docs" / "doctor.md").read_text(), re.MULTILINE))
