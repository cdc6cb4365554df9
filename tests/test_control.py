"""What commands on a box say to the daemon there, and what they print."""

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from model.errors import UserError
from node.control import MOST_BYTES, SOCKET, ask, listening
from node.identity_file import copy
from node.invitation import invitation, reach
from swarm.identity import Identity

STATE: dict[str, Any] = {
    "run": {"id": "ab" * 32},
    "me": "QmA",
    "nodes": [{"id": "QmB", "addresses": ["/ip4/9.9.9.9/tcp/1"]}],
}


@contextmanager
def daemon(home: Path) -> Iterator[None]:
    """Something that answers in this folder, in a thread of its own."""
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), Event()

    async def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "refuse":
            raise UserError("not now")
        return {"said": request["do"] * 100_000}

    async def serve() -> None:
        async with listening(home, answer):
            started.set()
            await stop.wait()

    thread = Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def test_a_daemon_answers_refuses_and_is_gone(tmp_path: Path) -> None:
    home = tmp_path / ("deep" * 20) / ("folder" * 20)
    home.mkdir(parents=True)
    (home / SOCKET).touch()  # one that was killed has left it
    with daemon(home):
        assert (home / SOCKET).stat().st_mode & 0o777 == 0o600
        assert ask(home, {"do": "x"}) == {"said": "x" * 100_000}
        with pytest.raises(UserError, match="^not now$"):
            ask(home, {"do": "refuse"})
        with pytest.raises(UserError, match="not a request"):
            ask(home, {})
    for gone in (home, tmp_path / "none"):
        with pytest.raises(UserError, match="no node runs in .*--home DIR"):
            ask(gone, {"do": "x"})


@pytest.mark.parametrize("sent", [b"", b"\n", b"[1]\n", b"{" * 100 + b"\n", b"x" * (2 * MOST_BYTES)])
def test_what_is_no_request_harms_nobody(tmp_path: Path, sent: bytes) -> None:
    with daemon(tmp_path):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / SOCKET))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile().readline()
            assert not answer or "error" in json.loads(answer)
        assert ask(tmp_path, {"do": "x"})


def test_how_far_an_address_reaches() -> None:
    far = ["/ip4/93.184.216.34/tcp/1/p2p/Qm", "/dns4/box.example/tcp/1", "/ip6/2606:2800::1/tcp/1"]
    near = ["/ip4/192.168.1.5/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip4/172.17.0.1/tcp/1", "/ip6/fe80::1/tcp/1"]
    here = ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"]
    found = [{*map(reach, addresses)} for addresses in (far, near, here)]
    assert found == [{"internet"}, {"local network"}, {"this machine"}]


def test_an_invitation_names_the_farthest_reach_first(capsys: pytest.CaptureFixture[str]) -> None:
    me = {"id": "QmA", "addresses": ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1", "/ip4/93.184.216.34/tcp/1"]}
    state = STATE | {"nodes": [*STATE["nodes"], me]}
    invitation(state, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "from the internet:" and said[1].strip() == "spes-node join --peers /ip4/93.184.216.34/tcp/1"
    assert said[2] == "from the local network:" and said[4] == "from this machine:" and len(said) == 6
    invitation(state, as_json=True)
    assert [*json.loads(capsys.readouterr().out)["join"]] == ["internet", "local network", "this machine"]
    invitation(STATE | {"nodes": [me | {"addresses": me["addresses"][:2]}]}, as_json=False)
    assert "Nobody can join over the internet" in capsys.readouterr().out
    with pytest.raises(UserError, match="no address yet"):
        invitation(STATE, as_json=False)


def test_a_key_moves_to_another_box_and_replaces_none(tmp_path: Path) -> None:
    Identity.open(tmp_path / "here" / "identity.key").close()
    kept, there = tmp_path / "kept", tmp_path / "there" / "identity.key"
    copy(tmp_path / "here" / "identity.key", kept)
    copy(kept, there)
    assert kept.stat().st_mode & 0o777 == there.stat().st_mode & 0o777 == 0o600
    assert Identity.read(there).node_id == Identity.read(tmp_path / "here" / "identity.key").node_id
    before = there.read_bytes()
    with pytest.raises(UserError, match="is there already"):
        copy(kept, there)
    (tmp_path / "no key").write_bytes(b"something else")
    with pytest.raises(UserError, match="not an identity key"):
        copy(tmp_path / "no key", tmp_path / "new")
    assert there.read_bytes() == before and not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="there is no identity yet"):
        Identity.read(tmp_path / "none")
