"""Does training take the memory that the plan says? One step of a preset as a SPES node, in a process like a trainer's.

The step has two micro-batches of one short sequence each, with random tokens: the second finds the gradients of the
first there, as the plan has it. Beside the peak of the process stands what full AdamW training of the model would take.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from bench.results_file import write_results
from bootstrap.run_file import read_preset
from model.device import device_memory
from model.engine import Engine
from model.initial import initial_values
from model.memory import measure
from model.memory_plan import GB, Device
from model.settings import ComputeSettings
from model.shards import layout
from node.trainer_process import TRAINER_ENVIRONMENT

FULL_BYTES = 16
"""Of one trained value: itself, its gradient and two moments in fp32."""
WAYS: Mapping[str, dict[str, Any]] = {
    "bf16, recompute": {"frozen": "bf16", "recompute": True},
    "int8, checkpoint": {"frozen": "int8", "checkpoint": True},
}
"""How the frozen experts are kept, and what is computed again."""
WITHIN = 0.10


def main() -> None:
    """Measure each way, report, and exit with 1 if a plan was off by more than 10 %."""
    options = _options()
    if options.way:
        print(json.dumps(_train(options.preset, WAYS[options.way], options.experts, options.length)))
        return
    model = read_preset(options.preset).model
    full = FULL_BYTES * sum(shard.numel for shard in layout(model))
    available = device_memory(torch.device("cpu"))
    print(f"{options.preset}: {options.experts} of {model.num_experts} experts, sequences of {options.length} tokens")
    print(
        f"full AdamW training: {full / GB:.1f} GB without any activation; this machine has {available / GB:.1f} GB free"
    )
    rows = {}
    for way in WAYS:
        rows[way] = row = _in_a_process(options, way)
        print(
            f"{way:<17} peak {row['peak'] / GB:6.2f} GB, planned {row['planned'] / GB:6.2f} GB "
            f"({row['peak'] / row['planned'] - 1:+.1%}), {row['peak'] / full:.2f} of full; "
            f"step {row['step_seconds']:.0f} s, loss {row['loss']:.3f}"
        )
    holds = all(abs(row["peak"] / row["planned"] - 1) <= WITHIN for row in rows.values())
    print(f"\n{'ok' if holds else 'FAILED':<6}  peaks within {WITHIN:.0%} of the plan\n")
    figures = {
        "preset": options.preset,
        "experts": options.experts,
        "length": options.length,
        "full": full,
        "ways": rows,
    }
    print("figures", write_results("memory", {**figures, "available": available, "holds": holds}))
    sys.exit(not holds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--preset", default="2b", help="default: 2b")
    parser.add_argument("--experts", type=int, default=1, metavar="N", help="trained in each layer (default: 1)")
    parser.add_argument("--length", type=int, default=128, metavar="TOKENS", help="of a sequence (default: 128)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(options: argparse.Namespace, way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.memory", "--preset", options.preset, "--way", way]
    command += ["--experts", str(options.experts), "--length", str(options.length)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**TRAINER_ENVIRONMENT, **os.environ})
    if run.returncode:
        sys.exit(f"bench: {way} ended with status {run.returncode}; its last words are above")
    row: dict[str, Any] = json.loads(run.stdout)
    return row


def _train(preset: str, way: Mapping[str, Any], experts: int, length: int) -> dict[str, Any]:
    """One step in this process: its peak resident memory and the plan's, in bytes."""
    run = read_preset(preset)
    compute = ComputeSettings.model_validate({**way, "micro_blocks": 1})
    memory = measure(run.model, run.optimizer, compute, num_owned=experts, sequences=1, length=length)
    device = Device(memory=0, gpu=False, compute=compute, adam_8bit=False)
    before = _peak()
    engine = Engine(run.model, run.loss, run.optimizer, experts=range(experts), compute=compute)
    for shard, values in initial_values(run.model, seed=0):
        engine.load(shard.name, values)
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, (2, length + 1))
    start = time.monotonic()
    step = engine.train_step(tokens, 0)
    return {
        "peak": _peak(),
        "planned": memory.total + device.margin(memory.total),
        "before": before,
        "memory": asdict(memory),
        "step_seconds": time.monotonic() - start,
        "loss": step.cross_entropy,
    }


def _peak() -> int:
    """The most resident memory that this process has had so far, bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
