"""The daemon's side of the trainer process: starts it, hands it tasks, and ends with it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from model.errors import SpesError, UserError
from node.channel import AsyncChannel, ChannelClosed
from swarm.documents import canonical
from swarm.lifeline import die_with_parent
from swarm.manifest import Manifest
from swarm.trainer import Task, Work

MAX_FAILURES = 3
"""Rounds in a row whose loss is not finite, after which the node stops instead of wasting power."""

TRAINER_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin while they wait for one another make everything slow on a box that does something else, too."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What this box gives to the run."""

    data: Sequence[Path] = ()
    device: str = "auto"
    threads: int = 0
    """CPU threads of the trainer; 0 leaves the choice to torch."""


class TrainerProcess:
    """A running trainer. Implements `swarm.trainer.Trainer`."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: AsyncChannel, on_progress: Callable[[int, float], None]
    ) -> None:
        self.device = ""
        self.dtype = ""
        self.reason = ""
        """Why this device and dtype were chosen."""
        self._process = process
        self._channel = channel
        self._on_progress = on_progress
        self._current: dict[str, str] = {}
        """Digest of the values that the trainer holds, by shard."""
        self._failures = 0

    @classmethod
    async def start(
        cls, manifest: Manifest, settings: TrainerSettings, on_progress: Callable[[int, float], None]
    ) -> Self:
        """Start the process and wait until its model and corpus are there.

        Raises:
            UserError: the data, the device or the memory does not fit the run.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "node.trainer_main",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                preexec_fn=die_with_parent,
                start_new_session=True,
                env={
                    **TRAINER_ENVIRONMENT,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path[1:] if sys.path[0] == "" else sys.path),
                },
            )
        trainer = cls(process, await AsyncChannel.over(ours), on_progress)
        trainer._channel.send(
            {
                "manifest": canonical(manifest),
                "data": [str(path) for path in settings.data],
                "device": settings.device,
                "threads": settings.threads,
            }
        )
        try:
            answer = await trainer._receive()
        except BaseException:
            await trainer.close()
            raise
        if answer["event"] == "refused":
            await trainer.close()
            raise UserError(answer["error"])
        trainer.device, trainer.dtype, trainer.reason = answer["device"], answer["dtype"], answer["reason"]
        return trainer

    async def train(self, task: Task) -> Work:
        """Train one task. Raises SpesError when the trainer has ended, or its loss is not finite again and again."""
        load = {
            name: str(path)
            for name, (digest, path) in task.shards.items()
            if self._current.get(name) != digest and not (name in task.carried and name in self._current)
        }
        self._channel.send(
            {
                "do": "train",
                "round": task.round,
                "experts": list(task.experts),
                "load": load,
                "blocks": list(task.blocks),
                "heldout": list(task.heldout),
                "local_steps": task.local_steps,
                "seconds": task.seconds,
                "folder": str(task.folder),
            }
        )
        while (answer := await self._receive())["event"] == "progress":
            self._on_progress(answer["step"], answer["loss"])
        if answer["event"] == "refused":
            raise UserError(answer["error"])
        self._current |= {name: task.shards[name][0] for name in load}
        if answer["failure"]:
            self._current.clear()  # whatever happened in there, the next round starts from the committed state
        self._current |= answer["shards"]
        self._count_failure(answer["failure"])
        return Work(
            tokens=answer["tokens"],
            steps=answer["steps"],
            used_blocks=answer["used_blocks"],
            loss=answer["loss"],
            heldout_nats=answer["heldout_nats"],
            heldout_tokens=answer["heldout_tokens"],
            seconds=answer["seconds"],
            shards=answer["shards"],
        )

    def _count_failure(self, failure: str) -> None:
        self._failures = self._failures + 1 if failure else 0
        if failure:
            log.warning("round not counted: %s", failure)
        if self._failures >= MAX_FAILURES:
            raise SpesError(f"{failure}, {MAX_FAILURES} rounds in a row. Lower optimizer.learning_rate in a new run")

    def stop(self) -> None:
        """End the current training after the step it is in."""
        self._channel.send({"do": "stop"})

    async def _receive(self) -> dict[str, Any]:
        try:
            return await self._channel.receive()
        except ChannelClosed:
            status = await self._process.wait()
            raise SpesError(_why(status)) from None

    async def watch(self) -> None:
        """Return never; raises SpesError when the trainer ends."""
        raise SpesError(_why(await self._process.wait()))

    async def close(self) -> None:
        """End the process; what it was training is given up."""
        self._channel.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def _why(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the trainer was killed, most likely for want of memory. Give it fewer experts: --experts N"
    return f"the trainer ended unexpectedly (status {status}); its last words are above"
