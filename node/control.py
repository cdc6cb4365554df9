"""How the commands on a box speak to the daemon that runs there: a socket in its folder, a line of JSON each way."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from model.errors import UserError

SOCKET = "control.sock"
MOST_BYTES = 1 << 16
"""Of a request; an answer may be as long as it likes."""
ANSWER_SECONDS = 30.0

Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Does what a request says, and returns what to answer. Raises UserError."""


@contextmanager
def _named(home: Path) -> Iterator[str]:
    """A name of the socket that is short, however long that of its folder: the kernel takes 107 bytes."""
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


@asynccontextmanager
async def listening(home: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer requests inside. The identity's lock says that no other daemon uses this folder."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError):
            writer.write(json.dumps(await _reply(await reader.readline(), answer)).encode() + b"\n")
            await writer.drain()
        writer.close()

    (home / SOCKET).unlink(missing_ok=True)  # of one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _named(home) as name:
        listener.bind(name)
    os.chmod(home / SOCKET, 0o600)
    server = await asyncio.start_unix_server(serve, sock=listener, limit=MOST_BYTES)
    try:
        yield
    finally:
        server.close()
        (home / SOCKET).unlink(missing_ok=True)


async def _reply(line: bytes, answer: Answer) -> dict[str, Any]:
    try:
        request = json.loads(line)
        return await answer(request)
    except UserError as error:
        return {"error": str(error)}
    except (ValueError, TypeError, KeyError) as error:
        return {"error": f"not a request: {error}"}


def ask(home: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the daemon in a folder. Raises UserError when none runs there, or it does not do what is asked."""
    try:
        with _named(home) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(name)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline())
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        raise UserError(f"no node runs in {home}. Name the folder of the one that is meant: --home DIR") from None
    except TimeoutError:
        raise UserError(f"the node in {home} does not answer. See what it does: its terminal, or --dashboard") from None
    except (ValueError, OSError) as error:
        raise UserError(f"the node in {home} cannot be asked: {error}") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer
