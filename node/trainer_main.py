"""The trainer process: holds the model on its device, trains one task at a time and ahead of the next one, and writes
what it trained to files.

It is started by the daemon with one end of a socket pair as its only argument, and ends when the other end closes.
It never imports hivemind.
"""

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgpack
import torch

from model.device import choose_device, device_memory
from model.engine import Engine
from model.errors import SpesError
from model.memory_plan import Device, MemoryPlan
from model.optimizer import has_adam_8bit
from model.settings import ComputeSettings, Dtype
from node.channel import BlockingChannel, ChannelClosed
from node.corpus import Corpus, check_fingerprint, load_corpus
from node.local_training import LocalTraining
from node.planning import choose_capacity, describe_memory, plan_for
from node.tokens import check_tokenizer, open_encoder
from node.trainer_messages import decode_task, encode_work
from swarm.manifest import Manifest


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
        plan = self._plan(manifest, device, dtype, opening)
        capacity, capacity_reason = choose_capacity(manifest, plan, opening["experts"])
        tokenizer = Path(opening["tokenizer"]) if opening["tokenizer"] else None
        corpus = _open_corpus(manifest, [Path(path) for path in opening["data"]], tokenizer)
        engine = Engine(manifest.model, manifest.loss, manifest.optimizer, compute=plan.compute, device=device)
        self._training = LocalTraining(engine, corpus, manifest.round, channel)
        channel.send(
            {
                "event": "ready",
                "device": str(device),
                "dtype": dtype,
                "reason": f"{reason}; deterministic kernels" if plan.compute.deterministic else reason,
                "capacity": capacity,
                "capacity_reason": capacity_reason,
                "memory": describe_memory(plan),
                "savings": [f"{saving.what}: {saving.cost}" for saving in plan.savings],
                "blocks": corpus.num_blocks,
            }
        )

    def _plan(self, manifest: Manifest, device: torch.device, dtype: Dtype, opening: dict[str, Any]) -> MemoryPlan:
        """What fits into the memory that is free now, or that this box gives. Nothing is allocated before."""
        free = device_memory(device)
        return plan_for(
            manifest,
            Device(
                memory=min(free, opening["memory"] or free),
                gpu=device.type == "cuda",
                compute=ComputeSettings(dtype=dtype, deterministic=opening["deterministic"]),
                adam_8bit=has_adam_8bit(),
            ),
            opening["experts"],
        )

    def serve(self) -> None:
        """Do what the daemon asks for, and train ahead while it asks nothing. Raises ChannelClosed."""
        while True:
            try:
                if self._training.has_ahead and not self._channel.pending():
                    self._training.step_ahead()
                else:
                    self._answer(self._channel.receive())
            except OSError as error:  # the disk; the channel has an error of its own
                where = f"{error.filename}: " if error.filename else ""
                text = f"{where}{(error.strerror or str(error)).lower()}. Free space, or take another disk: --home DIR"
                self._channel.send({"event": "refused", "error": text})
            except torch.OutOfMemoryError:
                text = "the device has less memory than was free at the start"
                remedy = "End what else uses it, or plan with less: --vram GB"
                self._channel.send({"event": "refused", "error": f"{text}. {remedy}"})

    def _answer(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "train":
                work, failure = self._training.train(decode_task(message["task"]))
                answer = {"event": "trained", "work": encode_work(work), "failure": failure}
            case "moments":
                digests = self._training.write_moments(message["experts"], Path(message["folder"]))
                answer = {"event": "moments", "digests": digests}
            case _:
                self._training.stop_ahead()
                return
        self._channel.send({**answer, "id": message["id"]})


def _open_corpus(manifest: Manifest, files: list[Path], tokenizer: Path | None) -> Corpus:
    encoder = open_encoder(manifest.data.tokenizer, manifest.model.vocab_size, tokenizer)
    if manifest.data.source == "own":
        check_tokenizer(encoder, manifest.data.fingerprint)
    corpus = load_corpus(manifest.data, manifest.seed, files, encoder)
    check_fingerprint(corpus, manifest.data)
    return corpus


if __name__ == "__main__":
    main()
