"""Messages between the daemon and its trainer process: length-prefixed msgpack over a socket pair."""

import asyncio
import select
import socket
import struct
from typing import Any

import msgpack

_HEADER = struct.Struct(">I")
MAX_MESSAGE_BYTES = 64 << 20
"""A task of a large model names some thousand files; weights travel as files, never here."""


class ChannelClosed(Exception):
    """The other side is gone. Caught where each side decides what that means."""


def encode(message: dict[str, Any]) -> bytes:
    """One message with its length in front."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return _HEADER.pack(len(body)) + body


class BlockingChannel:
    """The trainer's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises ChannelClosed."""
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise ChannelClosed from error

    def pending(self) -> bool:
        """Whether a message, or the end of the channel, is waiting."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def receive(self) -> dict[str, Any]:
        """Wait for a message. Raises ChannelClosed."""
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size))
        message: dict[str, Any] = msgpack.unpackb(self._exactly(size))
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self._connection.recv(size - len(data))
            except OSError as error:
                raise ChannelClosed from error
            if not chunk:
                raise ChannelClosed
            data += chunk
        return bytes(data)


class AsyncChannel:
    """The daemon's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._size: int | None = None
        """Of the message whose length has been read."""

    @classmethod
    async def over(cls, connection: socket.socket) -> "AsyncChannel":
        """Use a connected socket."""
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; the trainer reads it when it is between two steps."""
        self._writer.write(encode(message))

    async def receive(self) -> dict[str, Any]:
        """Wait for a message; one that was on its way when this is cancelled comes next time. Raises ChannelClosed."""
        try:
            if self._size is None:
                (self._size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            message: dict[str, Any] = msgpack.unpackb(await self._reader.readexactly(self._size))
            self._size = None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed from error
        return message

    def close(self) -> None:
        """Close the socket; the trainer ends when it sees that."""
        self._writer.close()
