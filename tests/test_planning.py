"""What people read about a plan: who chooses the experts and why, what a round moves, and where the memory goes."""

from dataclasses import replace

import pytest

from model.errors import UserError
from model.memory_plan import GB, Device, MemoryPlan
from model.settings import ComputeSettings
from model.shards import layout
from node.planning import (
    Traffic,
    choose_capacity,
    describe_memory,
    fair_share,
    memory_rows,
    plan_for,
    predict_traffic,
    report,
)
from node.units import duration, quantity, size
from swarm.codec import encoded_size
from swarm.manifest import EncodingSettings, Manifest
from swarm.shard_names import expert_of

CPU = Device(memory=10**15, gpu=False, compute=ComputeSettings(), adam_8bit=True)
GPU = Device(memory=10**15, gpu=True, compute=ComputeSettings(dtype="bf16"), adam_8bit=True)


def with_nodes(run: Manifest, start_nodes: int) -> Manifest:
    return run.model_copy(update={"round": run.round.model_copy(update={"start_nodes": start_nodes})})


def smallest_plan(run: Manifest, device: Device, experts: int = 1) -> MemoryPlan:
    """The plan that gives up the most."""
    made = plan_for(run, device, experts)
    while True:
        try:
            made = plan_for(run, replace(device, memory=made.needed - 1), experts)
        except UserError:
            return made


def sizes(run: Manifest) -> tuple[int, int]:
    """Bytes that travel of the shared shards, and of one expert in all layers."""
    shards, encoding = layout(run.model), run.encoding
    shared = sum(encoded_size(encoding.shared, shard.numel) for shard in shards if expert_of(shard.name) is None)
    return shared, sum(encoded_size(encoding.experts, shard.numel) for shard in shards if expert_of(shard.name) == 0)


RUNS = [
    pytest.param(encoding, copies, id=f"{encoding.shared}-{encoding.experts}-{copies}")
    for encoding, copies in [
        (EncodingSettings(shared="fp32", experts="fp32"), 1),
        (EncodingSettings(shared="bf16", experts="int4"), 1),
        (EncodingSettings(shared="int8", experts="int8"), 2),
    ]
]
"""How shards travel, and how many owners an expert has."""


def sending(run: Manifest, encoding: EncodingSettings, copies: int) -> Manifest:
    rounds = run.round.model_copy(update={"owners_per_expert": copies})
    return run.model_copy(update={"encoding": encoding, "round": rounds})


@pytest.mark.parametrize(("start_nodes", "share"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_nodes_share_the_experts_out(small_manifest: Manifest, start_nodes: int, share: int) -> None:
    run = with_nodes(small_manifest, start_nodes)
    assert fair_share(run) == share
    made = plan_for(run, CPU, None)
    assert made.num_owned == share and (made.model, made.optimizer) == (run.model, run.optimizer)
    assert made.compute.micro_blocks == run.round.batch_blocks
    assert plan_for(run, CPU, 3).num_owned == 3


def test_every_capacity_has_its_reason(small_manifest: Manifest) -> None:
    run = with_nodes(small_manifest, 4)
    made = plan_for(run, CPU, None)
    assert choose_capacity(run, made, None) == (4, "all of them fit")
    tight = replace(made, device=replace(CPU, memory=made.needed + made.bytes_per_expert))
    assert choose_capacity(run, tight, None) == (2, "as many as fit; 1 would be this node's share")
    assert choose_capacity(run, plan_for(run, CPU, 3), 3) == (3, "--experts 3")


def test_one_node_alone_moves_nothing(small_manifest: Manifest) -> None:
    assert predict_traffic(small_manifest, 4, 1) == Traffic(sent=0, received=0)
    assert predict_traffic(small_manifest, 1, 1) == Traffic(sent=0, received=0)


def test_two_nodes_swap_their_experts_and_halves_of_the_rest(small_manifest: Manifest) -> None:
    """Each reduces one half: it sends the other one away and gets its mean, and the same the other way round."""
    shared, expert = sizes(small_manifest)
    assert predict_traffic(small_manifest, 3, 2) == Traffic(sent=shared + 3 * expert, received=shared + expert)


@pytest.mark.parametrize(("encoding", "copies"), RUNS)
@pytest.mark.parametrize("owners", [(4,), (2, 2), (3, 1), (1, 1, 2), (1, 1, 1, 1), (0, 4, 0, 0, 0)])
def test_what_all_nodes_send_is_what_all_receive(
    small_manifest: Manifest, owners: tuple[int, ...], encoding: EncodingSettings, copies: int
) -> None:
    run, nodes = sending(small_manifest, encoding, copies), len(owners)
    copies = min(copies, nodes)
    traffic = [predict_traffic(run, owned * copies, nodes) for owned in owners]
    sent, received = sum(node.sent for node in traffic), sum(node.received for node in traffic)
    assert sent == pytest.approx(received, abs=nodes), "rounded to bytes on each node"
    shared, expert = sizes(run)
    averaged = (copies - 1) * 4 * expert
    assert sent == pytest.approx((nodes - 1) * (2 * shared + 4 * expert) + averaged, abs=nodes)


def test_int8_moves_about_a_quarter(small_manifest: Manifest) -> None:
    exact, coarse = (
        predict_traffic(sending(small_manifest, EncodingSettings(shared=kind, experts=kind), 1), 2, 2)
        for kind in ("fp32", "int8")
    )
    assert 0.25 < coarse.sent / exact.sent < 0.27 and 0.25 < coarse.received / exact.received < 0.27


def test_more_owners_mean_a_larger_share(small_manifest: Manifest) -> None:
    run = with_nodes(sending(small_manifest, EncodingSettings(), 2), 4)
    assert fair_share(run) == 2
    assert fair_share(with_nodes(run, 1)) == 4, "one node alone is the only owner"


def test_the_busier_direction_takes_the_time() -> None:
    assert Traffic(sent=10**9, received=0).seconds(80) == Traffic(sent=1, received=10**9).seconds(80) == 100


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0.2 s"), (119, "119 s"), (150, "2 min"), (7000, "117 min"), (9000, "2.5 h")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_rows_add_up_to_what_is_needed(small_manifest: Manifest, device: Device) -> None:
    for made in (plan_for(small_manifest, device, 1), smallest_plan(small_manifest, device)):
        rows = [*memory_rows(made)]
        assert sum(size for _, size, _ in rows) == made.needed
        assert len({name for name, _, _ in rows}) == len(rows) and all(meaning for _, _, meaning in rows)
        line = describe_memory(made)
        assert "\n" not in line and all(name in line for name, _, _ in rows)
        assert f"{size(made.needed, 2)} planned of {size(made.device.memory)} that are free" in line


def test_rows_say_what_was_given_up(small_manifest: Manifest) -> None:
    def meanings(made: MemoryPlan) -> str:
        return "; ".join(meaning for _, _, meaning in memory_rows(made))

    ample = meanings(plan_for(small_manifest, CPU, 1))
    assert "fp32 moments of AdamW" in ample and "3 of 4 experts in each layer, fp32" in ample
    assert "everything the backward needs, for 2 sequences" in ample
    tight = smallest_plan(small_manifest, GPU)
    assert tight.compute.adam_8bit and tight.compute.recompute
    assert "8-bit moments" in meanings(tight) and "all but the inner activations" in meanings(tight)
    away = replace(tight, compute=tight.compute.model_copy(update={"offload": True, "checkpoint": True}))
    assert "in host memory" in meanings(away) and "the input of each layer, for one sequence" in meanings(away)
    sgd = small_manifest.optimizer.model_copy(update={"kind": "sgd"})
    assert "SGD without momentum keeps nothing" in meanings(
        plan_for(small_manifest.model_copy(update={"optimizer": sgd}), CPU, 1)
    )


def lines_of(run: Manifest, made: MemoryPlan, nodes: int) -> list[str]:
    lines = [*report(run, made, nodes, 100.0)]
    assert all("\n" not in line and line == line.rstrip() for line in lines)
    return lines


def test_the_report_of_an_ample_box(small_manifest: Manifest) -> None:
    device = replace(GPU, memory=24 * GB)
    made = plan_for(small_manifest, device, 1)
    lines = lines_of(small_manifest, made, 4)
    text = "\n".join(lines)
    assert lines[1] == "1 of 4 experts on a GPU with 24.0 GB free, products in bf16"
    assert f"{quantity(sum(shard.numel for shard in layout(small_manifest.model)), 4)} parameters" in lines[0]
    assert "It fits, with 22.5 GB to spare; all experts would fit the same way." in lines
    assert "Nothing had to be given up for it." in lines
    assert "A round with 4 nodes moves " in text and "as int8: " in text and "at 100 Mbit/s" in text
    mixed = sending(small_manifest, EncodingSettings(shared="fp32", experts="int4"), 1)
    assert any("as fp32 and int4: " in line for line in lines_of(mixed, made, 4))
    assert lines[-1] == "Between two such exchanges: 4 steps of 64 tokens on each node."


def test_the_report_of_a_tight_box(small_manifest: Manifest) -> None:
    made = smallest_plan(small_manifest, CPU)
    lines = lines_of(small_manifest, made, 1)
    assert any(line.startswith("It fits, with ") and "GB" not in line.split(" to spare")[0] for line in lines)
    costs = lines[lines.index("What makes it fit, and what that costs:") + 1 :]
    assert costs[: len(made.savings)] == [f"  - {saving.what}: {saving.cost}" for saving in made.savings]
    assert "One node alone has nothing to exchange." in lines
    assert not any("round with" in line for line in lines)
