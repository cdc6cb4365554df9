"""Keeps hivemind's connection to p2pd alive when an answer comes too late.

hivemind gives each answer to the call that waits for it. Where that call has been cancelled by its timeout in the same
turn of the event loop, this raises an error that ends the task which reads from p2pd, and the node is deaf from then
on: it still sends, and hears nothing any more. All it takes is a process that was stopped, or a machine that was busy,
for longer than a call may take.
"""

import asyncio
from typing import Any

from hivemind.p2p import P2P


class OpenCalls(dict[Any, asyncio.Future[Any]]):
    """Calls that wait for an answer, by id; one that is over is not among them any more."""

    def __contains__(self, call: object) -> bool:
        """Whether somebody still waits."""
        return super().__contains__(call) and not self[call].done()


def install(p2p: P2P) -> None:
    """Install the guard for one connection, before the first call."""
    control = p2p._client.control
    control._pending_calls = OpenCalls(control._pending_calls)


async def broken(p2p: P2P) -> str:
    """Wait until nothing is read from p2pd any more, which ends all hearing; returns why."""
    reading = p2p._client.control._read_task
    await asyncio.wait([reading])
    error = None if reading.cancelled() else reading.exception()
    return repr(error) if error is not None else "it is closed"
