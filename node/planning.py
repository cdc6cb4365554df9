"""How a box takes part in a run: the plan for its device, and what people read about it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from model.memory_plan import Device, MemoryPlan, plan_training
from model.shards import layout
from node.units import duration, quantity, size
from swarm.codec import encoded_size
from swarm.manifest import Manifest

FP32_BYTES = 4


def plan_for(run: Manifest, device: Device, experts: int | None) -> MemoryPlan:
    """The plan that gives up least for `experts` experts; None is this box's share when all nodes are there that the
    run waits for. Raises UserError when that does not fit, with what would."""
    return plan_training(
        run.model,
        run.optimizer,
        device,
        batch=run.round.batch_blocks,
        length=run.data.block_tokens,
        num_wanted=fair_share(run) if experts is None else experts,
    )


def fair_share(run: Manifest, nodes: int | None = None) -> int:
    """Experts of a node when so many nodes share them out; None is those that a run waits for at its start."""
    nodes = nodes or run.round.start_nodes
    return math.ceil(run.model.num_experts * min(run.round.owners_per_expert, nodes) / nodes)


def choose_capacity(run: Manifest, plan: MemoryPlan, experts: int | None) -> tuple[int, str]:
    """How many experts a node offers to train, and why."""
    if experts is not None:
        return experts, f"--experts {experts}"
    if plan.capacity == run.model.num_experts:
        return plan.capacity, "all of them fit"
    return plan.capacity, f"as many as fit; {plan.num_owned} would be this node's share"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one node moves in a round."""

    sent: int
    received: int

    def seconds(self, megabits: float) -> float:
        """At a bandwidth in Mbit/s, the same in both directions, nothing else on the line."""
        return max(self.sent, self.received) * 8 / (megabits * 1e6)


def predict_traffic(run: Manifest, num_owned: int, nodes: int) -> Traffic:
    """The traffic of a node with `num_owned` experts among `nodes`, as the run encodes shards.

    The owners of a shard send their contributions to its reducer, and its result goes to everybody; they reduce equally
    many of their shards. All nodes own the shared shards, `round.owners_per_expert` of them each expert.
    """
    shared = expert = 0
    for shard in layout(run.model):
        if shard.expert is None:
            shared += encoded_size(run.encoding.shared, shard.numel)
        elif shard.expert == 0:
            expert += encoded_size(run.encoding.experts, shard.numel)
    if nodes == 1:
        return Traffic(0, 0)
    owners = min(run.round.owners_per_expert, nodes)
    reduced = num_owned / owners
    averaging = 2 * shared * (nodes - 1) / nodes
    return Traffic(
        sent=round(averaging + expert * (num_owned - reduced + reduced * (nodes - 1))),
        received=round(averaging + expert * (reduced * (owners - 1) + run.model.num_experts - reduced)),
    )


def describe_memory(plan: MemoryPlan) -> str:
    """The plan's memory in one line."""
    rows = ", ".join(f"{name} {size(count)}" for name, count, _ in memory_rows(plan))
    return f"{size(plan.needed, 2)} planned of {size(plan.device.memory)} that are free: {rows}"


def memory_rows(plan: MemoryPlan) -> Iterator[tuple[str, int, str]]:
    """Name, bytes and meaning of each part of the plan."""
    memory, compute, total = plan.memory, plan.compute, plan.model.num_experts
    moments = "8-bit moments" if compute.adam_8bit else "fp32 moments"
    state = f"{moments} of AdamW" if plan.optimizer.kind == "adamw" else "SGD without momentum keeps nothing"
    frozen = f"{total - plan.num_owned} of {total} experts in each layer, {compute.frozen}"
    if compute.offload:
        frozen += f"; three at a time, all of them ({size(memory.host)}) in host memory"
    kept = "everything the backward needs"
    if compute.checkpoint:
        kept = "the input of each layer"
    elif compute.recompute:
        kept = "all but the inner activations of the experts"
    sequences = "one sequence" if compute.micro_blocks == 1 else f"{compute.micro_blocks} sequences"
    yield "weights", memory.weights, "fp32: shared parameters, own experts"
    yield "gradients", memory.gradients, "fp32"
    yield "optimiser", memory.optimizer, state
    yield "frozen experts", memory.frozen, frozen
    yield "activations", memory.activations, f"{kept}, for {sequences}"
    yield "logits", memory.logits, "the output loss, in chunks, with the gradient of the output matrix"
    if memory.work:
        yield "backward", memory.work, "its work, where that is more than the output loss takes"
    yield "margin", plan.margin, "the runtime, and what allocators waste"


def report(run: Manifest, plan: MemoryPlan, nodes: int, megabits: float) -> Iterator[str]:
    """The lines of `spes-node plan`."""
    device, compute = plan.device, plan.compute
    total = sum(shard.numel for shard in layout(run.model))
    trained = plan.memory.gradients // FP32_BYTES
    yield f"{run.name}: {quantity(total, 4)} parameters, of which {quantity(trained, 4)} are trained here"
    where = f"a {'GPU' if device.gpu else 'CPU'} with {size(device.memory)} free"
    yield f"{plan.num_owned} of {run.model.num_experts} experts on {where}, products in {compute.dtype}"
    yield ""
    for name, count, meaning in (*memory_rows(plan), ("total", plan.needed, "")):
        yield f"  {name:<15} {size(count, 3):>10}  {meaning}".rstrip()
    yield ""
    more = f"up to {plan.capacity} experts would fit the same way"
    if plan.capacity == run.model.num_experts:
        more = "all experts would fit the same way"
    elif plan.capacity == plan.num_owned:
        more = "no further expert would fit the same way"
    yield f"It fits, with {size(device.memory - plan.needed)} to spare; {more}."
    if plan.savings:
        yield "What makes it fit, and what that costs:"
        yield from (f"  - {saving.what}: {saving.cost}" for saving in plan.savings)
    else:
        yield "Nothing had to be given up for it."
    yield ""
    if nodes == 1:
        yield "One node alone has nothing to exchange."
        return
    traffic = predict_traffic(run, plan.num_owned, nodes)
    encodings = dict.fromkeys([run.encoding.shared, run.encoding.experts])
    yield (
        f"A round with {nodes} nodes moves {size(traffic.sent, 2)} up and {size(traffic.received, 2)} down, "
        f"as {' and '.join(encodings)}: {duration(traffic.seconds(megabits))} at {megabits:g} Mbit/s."
    )
    step = run.round.batch_blocks * run.data.block_tokens
    steps = "one step" if run.round.local_steps == 1 else f"{run.round.local_steps} steps"
    yield f"Between two such exchanges: {steps} of {step:,} tokens on each node."
