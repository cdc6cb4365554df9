"""The trainer process: holds the model on its device, trains one task at a time, and writes what it trained to files.

It is started by the daemon with one end of a socket pair as its only argument, and ends when the other end closes.
It never imports hivemind.
"""

import hashlib
import math
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from model.device import choose_device
from model.engine import Engine
from model.errors import SpesError
from node.channel import BlockingChannel, ChannelClosed
from node.corpus import Corpus, check_fingerprint, load_corpus
from swarm.manifest import Manifest

PROGRESS_SECONDS = 0.5
"""The daemon hears of progress this often."""


def main() -> None:
    """Serve the daemon until it closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the daemon, which then closes the channel
    channel = BlockingChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        try:
            session = Session(channel, channel.receive())
        except SpesError as error:
            channel.send({"event": "refused", "error": str(error)})
            return
        session.serve()
    except ChannelClosed:
        return


class Session:
    """One trainer for one run."""

    def __init__(self, channel: BlockingChannel, opening: dict[str, Any]) -> None:
        self._channel = channel
        manifest = Manifest.model_validate(msgpack.unpackb(opening["manifest"], use_list=False))
        if opening["threads"]:
            torch.set_num_threads(opening["threads"])
        device, dtype, reason = choose_device(opening["device"])
        self._corpus = _open_corpus(manifest, [Path(path) for path in opening["data"]])
        self._rounds = manifest.round
        self._engine = Engine(manifest.model, manifest.loss, manifest.optimizer, device=device, dtype=dtype)
        channel.send(
            {
                "event": "ready",
                "device": str(device),
                "dtype": str(dtype).removeprefix("torch."),
                "reason": reason,
                "blocks": self._corpus.num_blocks,
            }
        )

    def serve(self) -> None:
        """Train what the daemon asks for. Raises ChannelClosed."""
        while True:
            message = self._channel.receive()
            if message["do"] == "train":
                try:
                    self._channel.send({"event": "trained", **self._train(message)})
                except OSError as error:  # the disk; the channel has an error of its own
                    where = f"{error.filename}: " if error.filename else ""
                    text = (
                        f"{where}{(error.strerror or str(error)).lower()}. Free space, or take another disk: --home DIR"
                    )
                    self._channel.send({"event": "refused", "error": text})

    def _train(self, task: dict[str, Any]) -> dict[str, Any]:
        """One task; see `swarm.trainer.Task` for its fields."""
        engine, corpus = self._engine, self._corpus
        engine.own(task["experts"])
        for name, path in task["load"].items():
            engine.load(name, np.memmap(path, dtype="<f4", mode="r"))
        nats, tokens = self._evaluate(*task["heldout"])

        batch = self._rounds.batch_blocks
        blocks = task["blocks"]
        first = (task["round"] - 1) * self._rounds.local_steps
        losses: list[float] = []
        failure = ""
        started = told = time.monotonic()
        for step in range(min(task["local_steps"], len(blocks) // batch)):
            if self._channel.pending() or time.monotonic() - started > task["seconds"]:
                break
            try:
                loss = engine.train_step(corpus.blocks(blocks[step * batch : (step + 1) * batch]), first + step)
            except FloatingPointError as error:
                failure = str(error)
                break
            losses.append(loss.cross_entropy)
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                self._channel.send({"event": "progress", "step": step + 1, "loss": loss.cross_entropy})
        seconds = time.monotonic() - started

        counts = bool(losses) and not failure
        return {
            "failure": failure,
            "steps": len(losses) if counts else 0,
            "tokens": len(losses) * batch * corpus.block_tokens if counts else 0,
            "used_blocks": len(losses) * batch if counts else 0,
            "loss": sum(losses) / len(losses) if counts else 0.0,
            "heldout_nats": nats,
            "heldout_tokens": tokens,
            "seconds": seconds,
            "shards": self._write(Path(task["folder"])) if counts else {},
        }

    def _evaluate(self, start: int, stop: int) -> tuple[float, int]:
        """Summed nats and number of predicted tokens over held-out blocks `start` to `stop`."""
        if start == stop:
            return 0.0, 0
        nats, tokens = self._engine.evaluate(self._corpus.heldout_blocks(self._rounds.heldout_blocks)[start:stop])
        return (nats, tokens) if math.isfinite(nats) else (0.0, 0)

    def _write(self, folder: Path) -> dict[str, str]:
        """Write the trained shards, each to a file named by its digest; returns the digest of each."""
        digests = {}
        for name in self._engine.trained_shards():
            data = self._engine.read(name).astype("<f4", copy=False).tobytes()
            digest = hashlib.sha256(data).hexdigest()
            path = folder / digest
            temporary = path.with_name(f".{digest}.part")
            temporary.write_bytes(data)
            temporary.rename(path)
            digests[name] = digest
        return digests


def _open_corpus(manifest: Manifest, files: list[Path]) -> Corpus:
    corpus = load_corpus(manifest.data, manifest.seed, files)
    check_fingerprint(corpus, manifest.data)
    return corpus


if __name__ == "__main__":
    main()
