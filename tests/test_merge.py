"""Merging experts: the released function's results, and what follows from the formula."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.merge import merge_experts, select_donors

RELEASED = Path(__file__).parent / "data" / "released_spes.npz"
"""Inputs and outputs of the functions of SPES as released (github.com/zjr2000/SPES, commit 2cbcd96), called with the
matrices of an expert in order."""
CASES = {0: (0.1, 4), 1: (0.05, 4), 2: (0.0123, 4), 3: (0.1, 2), 4: (1.0, 4)}
"""Alpha and K of each."""


def experts(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, numel), dtype=np.float32))


layers = st.builds(experts, st.integers(2, 9), st.integers(1, 40), st.integers(0, 99))


@pytest.fixture(scope="module")
def released() -> Mapping[str, np.ndarray]:
    with np.load(RELEASED) as file:
        return dict(file)


@pytest.mark.parametrize(("case", "alpha", "top_k"), [(case, *setting) for case, setting in CASES.items()])
def test_the_released_function_gives_the_same(
    released: Mapping[str, np.ndarray], case: int, alpha: float, top_k: int
) -> None:
    for layer, gate in enumerate(torch.from_numpy(released[f"case{case}.before.gate"])):
        donors = select_donors(gate, top_k)
        for matrix in ("gate", "up", "down"):
            before = torch.from_numpy(released[f"case{case}.before.{matrix}"][layer])
            after = torch.from_numpy(released[f"case{case}.after.{matrix}"][layer])
            assert not torch.equal(before, after)
            torch.testing.assert_close(merge_experts(before, donors, alpha), after, rtol=0, atol=1e-6)


@given(layers, st.data())
def test_donors_are_the_most_similar_others(weights: torch.Tensor, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(weights) - 1))
    unit = weights.double() / weights.double().norm(dim=1, keepdim=True)
    similarity = unit @ unit.T
    for expert, row in enumerate(select_donors(weights[:, None, :], top_k).tolist()):
        assert len({*row} - {expert}) == top_k
        others = [other for other in range(len(weights)) if other != expert and other not in row]
        assert all(similarity[expert, d] > similarity[expert, o] - 1e-5 for d in row for o in others)


def test_of_equal_experts_the_lower_one_is_the_donor() -> None:
    gate = torch.tensor([1.0, 2.0, 2.0, 4.0, -1.0]).view(5, 1, 1).expand(5, 2, 2)
    assert select_donors(gate, 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


@given(layers, st.data())
def test_alpha_0_changes_nothing(weights: torch.Tensor, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(weights) - 1))
    assert torch.equal(merge_experts(weights, select_donors(weights[:, None], top_k), 0.0), weights)


@given(st.integers(2, 9), st.floats(0, 1), st.data())
def test_equal_experts_stay_what_they_are(count: int, alpha: float, data: st.DataObject) -> None:
    weights = experts(1, 12).expand(count, 12)
    top_k = data.draw(st.integers(1, count - 1))
    assert torch.equal(merge_experts(weights, select_donors(weights[:, None], top_k), alpha), weights)


@given(layers)
def test_all_others_with_alpha_1_give_their_mean(weights: torch.Tensor) -> None:
    count = len(weights)
    merged = merge_experts(weights, select_donors(weights[:, None], count - 1), 1.0)
    others = (weights.double().sum(0) - weights.double()) / (count - 1)
    torch.testing.assert_close(merged.double(), others, rtol=0, atol=1e-5)


@given(layers, st.floats(0, 1), st.data())
def test_the_order_of_the_experts_does_not_matter(weights: torch.Tensor, alpha: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(weights))))
    top_k = data.draw(st.integers(1, len(weights) - 1))
    donors = select_donors(weights[:, None], top_k)
    place = {expert: position for position, expert in enumerate(order)}
    moved = [[place[donor] for donor in donors[expert].tolist()] for expert in order]
    assert torch.equal(merge_experts(weights[order], moved, alpha), merge_experts(weights, donors, alpha)[order])


@given(layers, st.floats(0, 1), st.data())
def test_a_part_of_the_weights_merges_by_itself_to_the_same_bits(
    weights: torch.Tensor, alpha: float, data: st.DataObject
) -> None:
    donors = select_donors(weights[:, None], 1)
    cut = data.draw(st.integers(0, weights.shape[1]))
    parts = [merge_experts(part, donors, alpha) for part in (weights[:, :cut], weights[:, cut:])]
    assert torch.cat(parts, dim=1).numpy().tobytes() == merge_experts(weights, donors, alpha).numpy().tobytes()


MEASURED = """
import re, torch
from pathlib import Path
from model.merge import merge_experts, select_donors

def resident(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
select_donors(torch.randn(4, 1024, 1024), 2)  # the buffers of a matrix product, which the library keeps
weights = torch.randn(32, 2048, 1024)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
donors = select_donors(weights, 4)
selected = resident("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
merged = merge_experts(weights, donors, 0.1)
print(selected / weights.nbytes, (resident("VmHWM") - before) / weights.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_it_takes_the_memory_of_one_copy() -> None:
    run = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    for copies in map(float, run.stdout.split()):
        assert 0.9 < copies < 1 + 4 / 32, "of the experts of a layer; a few single ones on top"


def test_more_donors_than_there_are_is_all_of_them_with_a_warning() -> None:
    weights = experts(4, 6)
    with pytest.warns(UserWarning, match="top_k 9 is cut: there are 3 other experts"):
        donors = select_donors(weights[:, None], 9)
    assert sorted(donors[0].tolist()) == [1, 2, 3]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_another_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        merge_experts(experts(2, 2), [[1], [0]], alpha)


def test_no_donors_and_donors_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k 0"):
        select_donors(experts(2, 2)[:, None], 0)
    for donors in ([[1]], [[1], [2]], [[1], [-1]]):
        with pytest.raises(ValueError, match="donors"):
            merge_experts(experts(2, 2), donors, 0.1)
