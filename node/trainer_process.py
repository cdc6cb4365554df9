"""The daemon's side of the trainer process: starts it, hands it tasks, and ends with it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from model.errors import SpesError, UserError
from node.channel import AsyncChannel, ChannelClosed
from node.trainer_messages import decode_work, encode_task
from swarm.documents import canonical
from swarm.lifeline import die_with_parent
from swarm.manifest import Manifest
from swarm.trainer import Task, Work

MAX_FAILURES = 3
"""Rounds in a row whose loss is not finite, after which the node stops instead of wasting power."""

TRAINER_ENVIRONMENT = {
    # Threads that spin while they wait for one another make everything slow on a box that does something else, too.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc would keep freed blocks of up to 32 MB, in the end half as much again as what the memory plan says.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
}
"""What a trainer gets unless the user's environment says otherwise."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What this box gives to the run."""

    data: Sequence[Path] = ()
    device: str = "auto"
    threads: int = 0
    """CPU threads of the trainer; 0 leaves the choice to torch."""
    tokenizer: Path | None = None
    """Folder of the run's tokenizer, if it is not to be looked for under its name."""
    experts: int | None = None
    """Most experts to train; None leaves the choice to the planner."""
    memory: int | None = None
    """Most bytes of the device's memory to use; None is what is free."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time."""


class TrainerProcess:
    """A running trainer. Implements `swarm.trainer.Trainer`."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: AsyncChannel, on_progress: Callable[[int, float], None]
    ) -> None:
        self.device = ""
        self.dtype = ""
        self.reason = ""
        """Why this device and dtype were chosen."""
        self.capacity = 0
        """Experts that it can train."""
        self.capacity_reason = ""
        self.memory = ""
        """The memory it has planned, in one line."""
        self.savings: list[str] = []
        """What it gave up for memory, each with its cost."""
        self._process = process
        self._channel = channel
        self._on_progress = on_progress
        self._turn = asyncio.Lock()
        """The trainer is asked one thing at a time."""
        self._asked = 0
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
                "tokenizer": str(settings.tokenizer) if settings.tokenizer else None,
                "experts": settings.experts,
                "memory": settings.memory,
                "deterministic": settings.deterministic,
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
        trainer.capacity, trainer.capacity_reason = answer["capacity"], answer["capacity_reason"]
        trainer.memory, trainer.savings = answer["memory"], answer["savings"]
        return trainer

    async def train(self, task: Task) -> Work:
        """Train one task. Raises SpesError when the trainer has ended, or its loss is not finite again and again."""
        try:
            answer = await self._ask({"do": "train", "task": encode_task(task)})
        except asyncio.CancelledError:
            self.stop()
            raise
        self._count_failure(answer["failure"])
        return decode_work(answer["work"])

    async def moments(self, experts: Collection[int], folder: Path) -> dict[str, str]:
        """Digests of the files with the moments of these experts; see `swarm.trainer.Trainer`."""
        answer = await self._ask({"do": "moments", "experts": list(experts), "folder": str(folder)})
        digests: dict[str, str] = answer["digests"]
        return digests

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer. Raises SpesError."""
        async with self._turn:
            self._asked += 1
            self._channel.send({**message, "id": self._asked})
            while True:
                answer = await self._receive()
                match answer["event"]:
                    case "progress":
                        self._on_progress(answer["step"], answer["loss"])
                    case "warning":
                        log.warning(answer["text"])
                    case "refused":
                        raise UserError(answer["error"])
                    case _ if answer["id"] == self._asked:  # another one belongs to a question that was given up
                        return answer

    def _count_failure(self, failure: str) -> None:
        self._failures = self._failures + 1 if failure else 0
        if failure:
            log.warning("round not counted: %s", failure)
        if self._failures >= MAX_FAILURES:
            raise SpesError(f"{failure}, {MAX_FAILURES} rounds in a row. Lower optimizer.learning_rate in a new run")

    def stop(self) -> None:
        """End the current training, also what is trained ahead, after the step it is in."""
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
        return "the trainer was killed, most likely for want of memory. Plan with less: --vram GB, or --experts N"
    return f"the trainer ended unexpectedly (status {status}); its last words are above"
