"""The planner: what it says fits does, it gives up no more than it has to, and the promised boxes are enough."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from bootstrap.run_file import read_preset
from model.errors import UserError
from model.memory import measure
from model.memory_plan import (
    ADAM_8BIT,
    BF16_STORE,
    CHECKPOINT,
    GB,
    INT8_STORE,
    OFFLOAD,
    ONE_SEQUENCE,
    RECOMPUTE,
    Device,
    MemoryPlan,
    Saving,
    plan_training,
)
from model.settings import ComputeSettings, ModelSettings, OptimizerSettings

ORDER = [RECOMPUTE, CHECKPOINT, ONE_SEQUENCE, BF16_STORE, INT8_STORE, ADAM_8BIT, OFFLOAD]
"""In which savings are tried."""
ADAMW = OptimizerSettings(learning_rate=1e-3)
SGD = OptimizerSettings(kind="sgd", learning_rate=1e-3)
BATCH, LENGTH = 32, 64
WIDE = ModelSettings(
    vocab_size=500,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    expert_size=192,
    num_experts=4,
    experts_per_token=2,
    max_length=LENGTH,
)
"""Most of its memory is experts."""
SHALLOW = WIDE.model_copy(update={"num_layers": 1, "expert_size": 96})
"""Has one layer: to compute it again in the backward saves nothing."""
QWEN = WIDE.model_copy(
    update={"family": "qwen3_moe", "head_dim": 24, "norm_topk_prob": True, "vocab_size": 5000, "num_layers": 2}
)
"""Most of its memory is the vocabulary."""
MODELS = {"wide": WIDE, "shallow": SHALLOW, "qwen": QWEN}
GPU = Device(memory=10**15, gpu=True, compute=ComputeSettings(dtype="bf16"), adam_8bit=True)
OLD_GPU = Device(memory=10**15, gpu=True, compute=ComputeSettings(), adam_8bit=False)
CPU = Device(memory=10**15, gpu=False, compute=ComputeSettings(deterministic=True), adam_8bit=True)
DEVICES = {"gpu": GPU, "old gpu": OLD_GPU, "cpu": CPU}
CASES = [("wide", "gpu"), ("wide", "cpu"), ("shallow", "gpu"), ("shallow", "cpu"), ("qwen", "old gpu")]


def with_memory(device: Device, memory: int) -> Device:
    return Device(memory=memory, gpu=device.gpu, compute=device.compute, adam_8bit=device.adam_8bit)


def plan(
    model: ModelSettings, device: Device, memory: int, wanted: int = 2, optimizer: OptimizerSettings = ADAMW
) -> MemoryPlan:
    return plan_training(model, optimizer, with_memory(device, memory), batch=BATCH, length=LENGTH, num_wanted=wanted)


@cache
def all_plans(model: str, device: str) -> tuple[MemoryPlan, ...]:
    """Every plan that less and less memory leads to: each has one byte less than the plan before it needs."""

    def ever_less() -> Iterator[MemoryPlan]:
        memory = DEVICES[device].memory
        while True:
            try:
                yield (made := plan(MODELS[model], DEVICES[device], memory))
            except UserError:
                return
            memory = made.needed - 1

    return tuple(ever_less())


def needed(made: MemoryPlan, compute: ComputeSettings, num_owned: int) -> int:
    """What the same work takes with other settings, measured anew."""
    memory = measure(
        made.model, made.optimizer, compute, num_owned=num_owned, sequences=compute.micro_blocks, length=LENGTH
    )
    return memory.total + made.device.margin(memory.total)


def settings_with(made: MemoryPlan, savings: list[Saving]) -> ComputeSettings:
    """The compute settings of a plan of that device when it makes these savings."""
    dtype = made.device.compute.dtype
    update = {"frozen": dtype, "micro_blocks": BATCH} | {
        key: value for saving in ORDER if saving in savings for key, value in saving.settings
    }
    return made.device.compute.model_copy(update=update)


def given_up(made: MemoryPlan) -> tuple[int, list[bool]]:
    """How much a plan gives up: first how far down the list of savings it goes, then whether it makes each saving,
    beginning with the one that is taken back first."""
    by_rank = sorted(ORDER, key=lambda saving: saving.rank)
    furthest = max((ORDER.index(saving) for saving in made.savings), default=-1)
    return furthest, [saving in made.savings for saving in by_rank]


@pytest.mark.parametrize(("model", "device"), CASES)
def test_a_plan_fits_and_is_what_its_savings_say(model: str, device: str) -> None:
    for made in all_plans(model, device):
        assert made.fits and made.needed <= made.device.memory
        assert made.compute == settings_with(made, [*made.savings])
        assert made.needed == needed(made, made.compute, 2)
        assert made.memory.host == 0 or made.compute.offload
        assert list(made.savings) == [saving for saving in ORDER if saving in made.savings]
        exact = plan(MODELS[model], DEVICES[device], made.needed)
        assert (exact.savings, exact.needed) == (made.savings, made.needed), "not a byte more than it says"


@pytest.mark.parametrize(("model", "device"), CASES)
def test_no_saving_is_needless(model: str, device: str) -> None:
    for made in all_plans(model, device):
        for saving in made.savings:
            without = settings_with(made, [other for other in made.savings if other != saving])
            assert needed(made, without, 2) > made.device.memory, saving.what


@pytest.mark.parametrize(("model", "device"), CASES)
def test_more_memory_never_gives_up_more(model: str, device: str) -> None:
    plans = all_plans(model, device)
    assert not plans[0].savings
    for more, less in pairwise(plans):
        assert given_up(more) < given_up(less)
        assert more.needed > less.needed


@pytest.mark.parametrize(("model", "device"), CASES)
def test_the_capacity_is_the_most_that_fits(model: str, device: str) -> None:
    """It is told from the bytes of an expert and not measured anew. So the tables of the tokens may take a few kB more;
    and where the output loss is the peak, it hides the second gradients of a layer, and one more expert might fit."""
    for made in all_plans(model, device):
        for spare in (0, made.bytes_per_expert - 1, made.bytes_per_expert):
            memory = min(made.device.memory, made.needed + spare)
            roomy = MemoryPlan(
                model=made.model,
                optimizer=made.optimizer,
                device=with_memory(made.device, memory),
                compute=made.compute,
                num_owned=made.num_owned,
                memory=made.memory,
                savings=made.savings,
            )
            capacity = roomy.capacity
            assert made.num_owned <= capacity <= made.model.num_experts
            assert needed(made, made.compute, capacity) <= memory + 4096
            if capacity < made.model.num_experts:
                hidden = 1.05 * (capacity + 1 - made.num_owned) * 12 * made.model.hidden_size * made.model.expert_size
                assert needed(made, made.compute, capacity + 1) > memory - hidden


def test_what_a_device_lacks_is_not_offered() -> None:
    made = {case: {saving for made in all_plans(*case) for saving in made.savings} for case in CASES}
    assert made["wide", "gpu"] == {*ORDER} - {BF16_STORE}, "products in bf16 have a store in bf16 in any case"
    assert made["wide", "cpu"] == {*ORDER} - {OFFLOAD}, "on a CPU there is no other memory"
    assert made["qwen", "old gpu"] == {*ORDER} - {ADAM_8BIT, CHECKPOINT}
    assert CHECKPOINT not in made["shallow", "gpu"] | made["shallow", "cpu"], "in one layer there is nothing to save"
    smallest = all_plans("wide", "gpu")[-1].needed
    with pytest.raises(UserError):
        plan(WIDE, GPU, smallest, wanted=3)
    with_sgd = plan(WIDE, GPU, smallest, optimizer=SGD)
    assert with_sgd.memory.optimizer == 0 and ADAM_8BIT not in with_sgd.savings


def test_what_is_fixed_before_stays() -> None:
    assert all(made.compute.deterministic and made.compute.dtype == "fp32" for made in all_plans("wide", "cpu"))
    assert all(made.compute.dtype == "bf16" for made in all_plans("wide", "gpu"))


@pytest.mark.parametrize("wanted", [0, -1, 5])
def test_experts_that_the_model_has_not_are_refused(wanted: int) -> None:
    with pytest.raises(UserError, match=f"cannot train {wanted} experts: this model has 4 in each layer"):
        plan(WIDE, GPU, GPU.memory, wanted=wanted)


def refusal(model: ModelSettings, device: Device, memory: int, wanted: int) -> str:
    with pytest.raises(UserError) as refused:
        plan(model, device, memory, wanted=wanted)
    text = str(refused.value)
    assert "\n" not in text and f"{wanted} of {model.num_experts} experts need" in text
    return text


def test_a_refusal_says_how_many_experts_would_fit() -> None:
    wide = WIDE.model_copy(update={"hidden_size": 1024, "expert_size": 4096, "num_layers": 2})
    memory = int(2.4 * GB)
    text = refusal(wide, GPU, memory, wanted=4)
    fewer = int(text.rpartition("--experts ")[2])
    assert 0 < fewer < 4 and plan(wide, GPU, memory, wanted=fewer).fits
    assert "is not installed" not in text


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_a_refusal_says_what_device_would_do(wanted: int) -> None:
    text = refusal(WIDE, GPU, GB, wanted)
    assert "with everything given up that can be" in text and "smaller model" in text
    assert "--experts" not in text and "is not installed" not in text
    promised = float(text.split("A device with ")[1].split(" GB")[0])
    assert plan(WIDE, GPU, round(promised * GB), wanted=1).fits
    with pytest.raises(UserError):
        plan(WIDE, GPU, round((promised - 0.1) * GB), wanted=1)


def test_a_refusal_says_that_8bit_adamw_is_missing() -> None:
    assert "pip install 'spes-node[adam8bit]'" in refusal(WIDE, OLD_GPU, GB, 1)
    with pytest.raises(UserError) as refused:
        plan(WIDE, OLD_GPU, GB, optimizer=SGD)
    assert "adam8bit" not in str(refused.value)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("preset", "experts", "memory"), [("2b", 1, 16), ("7b", 8, 48), ("9b", 2, 48)])
def test_the_promised_boxes_are_enough(preset: str, experts: int, memory: int) -> None:
    made = preset_plan(preset, experts, memory)
    assert made.fits and made.capacity >= experts and OFFLOAD not in made.savings


def test_what_is_too_much_for_a_box_is_refused() -> None:
    with pytest.raises(UserError, match=r"2 of 8 experts need \d+\.\d GB and there are 24.0 GB"):
        preset_plan("9b", 2, 24)


def preset_plan(preset: str, experts: int, memory: int) -> MemoryPlan:
    run = read_preset(preset)
    device = with_memory(GPU, memory * GB)
    return plan_training(
        run.model,
        run.optimizer,
        device,
        batch=run.round.batch_blocks,
        length=run.data.block_tokens,
        num_wanted=experts,
    )
