"""Runs a participant until it is done, it is told to stop, or something under it breaks."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.participant import HANDOVER_SECONDS, Participant

GOODBYE_SECONDS = 5.0 + HANDOVER_SECONDS
"""Time for saying goodbye after the first signal; a second signal ends the process at once."""


async def live(
    participant: Participant,
    watchers: list[Coroutine[Any, Any, None]],
    say: Callable[[str], None],
    *,
    stay: bool = False,
) -> None:
    """Run until the run is complete or SIGINT or SIGTERM arrives; then leave the swarm.

    Args:
        participant: the node's life in the run.
        watchers: coroutines that raise when something the node needs has ended.
        say: tells people what happens.
        stay: when the run is complete, go on serving its state until a signal arrives.

    SIGUSR1 prints where every task stands, for reports of a daemon that hangs.

    Raises:
        SpesError: from a watcher or from the participant.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def on_signal(number: int) -> None:
        if told.is_set():
            sys.stdout.flush()
            os._exit(128 + number)  # the kernel ends p2pd and the trainer with this process
        say(f"{signal.Signals(number).name}: leaving the swarm (once more ends it at once)")
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)

    loop.add_signal_handler(signal.SIGUSR1, _show_tasks)

    async def whole_life() -> None:
        await participant.run()
        if stay:
            say("the run is complete; serving its state until stopped")
            await participant.membership.beat()

    life = asyncio.create_task(whole_life())
    guards = [asyncio.create_task(watcher) for watcher in watchers]
    stop = asyncio.create_task(told.wait())
    tasks: list[asyncio.Task[Any]] = [life, stop, *guards]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (life, *guards):
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    try:
        async with asyncio.timeout(GOODBYE_SECONDS):
            await participant.leave()
    except TimeoutError:
        say(f"not everybody could be told within {GOODBYE_SECONDS:.0f} s; the others will notice")


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack()
