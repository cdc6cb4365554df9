"""Starts hivemind's libp2p daemon (`p2pd`) so that it never outlives this process."""

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Self

from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

from model.errors import SpesError
from swarm import call_guard
from swarm.lifeline import die_with_parent

START_SECONDS = 30.0
STOP_SECONDS = 5.0
GRACE_SECONDS = 1.0


class WrongPeer(SpesError):
    """Something else than the peers answers at every address. Caught by the network, which knows who gave them."""


class P2PDaemon:
    """One running `p2pd` and the connection to it."""

    def __init__(self, p2p: P2P, process: asyncio.subprocess.Process, socket: Path, output: asyncio.Task[None]) -> None:
        self.p2p = p2p
        self._process = process
        self._socket = socket
        self._output = output

    @classmethod
    async def start(
        cls,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        peers: Sequence[str] = (),
        identity_path: Path | None = None,
        client: bool = False,
    ) -> Self:
        """Start the daemon; call it from the main thread, whose end is the daemon's end too.

        Args:
            listen: multiaddresses to listen on.
            announce: multiaddresses to tell others instead of those seen locally.
            peers: multiaddresses of peers to connect to; each must end in `/p2p/ID`.
            identity_path: key file; without one the peer id is new.
            client: ask others, serve nothing.

        Raises:
            WrongPeer: no given address leads to the peer with the id in it.
            SpesError: the daemon did not start for another reason.
        """
        _remove_stale_sockets()
        socket = Path(tempfile.gettempdir()) / f"spes-p2pd-{os.getpid()}-{secrets.token_hex(8)}.sock"
        arguments = [
            str(files("hivemind.hivemind_cli") / "p2pd"),
            f"-listen=/unix{socket}",
            f"-{'dhtClient' if client else 'dhtServer'}=1",
            "-tls=1",
            "-connManager=1",
            "-idleTimeout=30s",
            f"-persistentConnMaxMsgSize={4 << 20}",
            f"-hostAddrs={','.join(listen)}",
            f"-b={int(bool(peers))}",
            "-natPortMap=0",
            "-autonat=0",
            "-relay=0",
        ]
        if peers:
            arguments.append(f"-bootstrapPeers={','.join(peers)}")
        if announce:
            arguments.append(f"-announceAddrs={','.join(announce)}")
        if identity_path is not None:
            arguments.append(f"-id={identity_path}")
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": "error"},
            preexec_fn=die_with_parent,
            start_new_session=True,  # a Ctrl-C in the terminal is for us alone; we stop it after saying goodbye
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await _wait_until_ready(process)
            p2p = await P2P.replicate(Multiaddr(f"/unix{socket}"))
            call_guard.install(p2p)
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            await process.wait()
            socket.unlink(missing_ok=True)
            if isinstance(error, TimeoutError):
                raise SpesError(
                    f"p2pd did not start within {START_SECONDS:.0f} s. Is the machine overloaded?"
                ) from None
            raise
        return cls(p2p, process, socket, asyncio.create_task(_drain(process)))

    async def wait(self) -> str:
        """Wait until the daemon ends or the connection to it breaks; returns which, for people."""
        ended = asyncio.create_task(self._process.wait())
        broken = asyncio.create_task(call_guard.broken(self.p2p))
        try:
            await asyncio.wait([ended, broken], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([ended], timeout=GRACE_SECONDS)  # its end breaks the connection, too
            if ended.done():
                return f"p2pd ended unexpectedly (status {ended.result()})"
            return f"the connection to p2pd broke ({broken.result()})"
        finally:
            ended.cancel()
            broken.cancel()

    async def stop(self) -> None:
        """Close the connection and end the daemon."""
        await self.p2p.shutdown()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._output
        self._socket.unlink(missing_ok=True)


async def _wait_until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    last = ""
    while line := await process.stdout.readline():
        last = line.decode(errors="replace").strip()
        if last.startswith("Peer ID:"):
            return
    if "failed to connect to bootstrap peers" in last:
        raise WrongPeer("no given address leads to the peer that it names")
    raise SpesError(f"p2pd ended at its start: {last or 'no output'}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read p2pd's output for ever: it stops when the pipe is full."""
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        while await process.stdout.read(1 << 16):
            pass


def _remove_stale_sockets() -> None:
    """Remove the sockets of daemons that were killed: they had no chance to do it themselves."""
    for path in Path(tempfile.gettempdir()).glob("spes-p2pd-*-*.sock"):
        if not Path(f"/proc/{path.name.split('-')[2]}").exists():
            with contextlib.suppress(OSError):  # somebody else's, or removed meanwhile
                path.unlink()
