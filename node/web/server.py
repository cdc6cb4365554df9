"""Serves the page from the daemon's own event loop, until the daemon ends."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from model.errors import UserError
from node.cli import PAGE_PORT
from node.live import Live
from node.web.api import build
from node.web.guard import Guard, read_token
from swarm.documents import Commit

PORTS = 20
"""Where several nodes share a box, each takes the next port that is free."""
OPEN_STREAMS_SECONDS = 2.0
"""Requests that are being answered when the daemon ends have so long."""


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where the page is to be served."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None for the first free one from PAGE_PORT on."""

    @classmethod
    def parse(cls, text: str) -> "PagePlace":
        """From `HOST:PORT` or `PORT`. Raises UserError."""
        host, _, port = text.rpartition(":")
        try:
            address = ipaddress.ip_address(host.strip("[]") or "127.0.0.1")
            if not 0 <= int(port) < 65536:
                raise ValueError(port)
        except ValueError:
            raise UserError(
                f"--dashboard {text}: not PORT or HOST:PORT with an IP address of this machine, such as 127.0.0.1:8730"
            ) from None
        return cls(str(address), int(port))

    @property
    def is_private(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    def bind(self) -> socket.socket:
        """A listening socket. Raises UserError when the port cannot be had."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        ports = [self.port] if self.port is not None else [*range(PAGE_PORT, PAGE_PORT + PORTS), 0]
        for port in ports:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.host, port))
                listener.listen(128)
            except OSError as error:
                listener.close()
                reason = (error.strerror or "cannot be used").lower()
                trouble = f"--dashboard {self.host}:{port}: {reason}. Choose another port, or --dashboard off"
                continue
            return listener
        raise UserError(trouble)


class _Server(uvicorn.Server):
    """Leaves the signals to the daemon."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    place: PagePlace, home: Path, live: Live, find_commit: Callable[[int], Commit | None]
) -> AsyncIterator[str]:
    """Serve the page inside; yields the address to open.

    Args:
        place: where.
        home: folder of the node, for the token that others than this machine need.
        live: what there is to tell; it has a first snapshot.
        find_commit: the commit of a past round, if it is at hand.

    Raises UserError when the port cannot be had.
    """
    listener = place.bind()
    token = None if place.is_private else read_token(home)
    config = uvicorn.Config(
        Guard(build(live, find_commit), token),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(OPEN_STREAMS_SECONDS),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    host = f"[{place.host}]" if ":" in place.host else place.host
    try:
        yield f"http://{host}:{port}/" + (f"?token={token}" if token is not None else "")
    finally:
        await live.close()  # ends the streams, for which the server would wait
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
