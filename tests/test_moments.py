"""The file in which AdamW's moments go to the next owner: what was written comes back, anything else is refused."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from model.moments import MAX_STEP, Moments

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMEL = 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # a file is written anew
@given(
    exp_avg=arrays("<f4", NUMEL, elements=FINITE),
    exp_avg_sq=arrays("<f4", NUMEL, elements=FINITE.map(abs)),
    step=st.integers(1, MAX_STEP),
)
def test_what_is_written_is_read(exp_avg: np.ndarray, exp_avg_sq: np.ndarray, step: int, tmp_path: Path) -> None:
    digest = Moments(exp_avg, exp_avg_sq, step).write(tmp_path)
    data = (tmp_path / digest).read_bytes()
    assert data == exp_avg.tobytes() + exp_avg_sq.tobytes() + struct.pack("<Q", step)
    assert digest == hashlib.sha256(data).hexdigest()
    again = Moments.read(tmp_path / digest, NUMEL)
    assert (again.exp_avg.tobytes(), again.exp_avg_sq.tobytes(), again.step) == (
        exp_avg.tobytes(),
        exp_avg_sq.tobytes(),
        step,
    )


@pytest.mark.parametrize(
    ("values", "step", "numel", "reason"),
    [
        ([1, 2, 3, 4, 5, 6], 1, 2, "32 bytes where 24 are expected"),
        ([1, 2, 3, 4, 5, 6], 1, 4, "32 bytes where 40 are expected"),
        ([], 1, 3, "8 bytes where 32 are expected"),
        ([1, np.nan, 3, 4, 5, 6], 1, 3, "not finite"),
        ([1, -np.inf, 3, 4, 5, 6], 1, 3, "not finite"),
        ([1, 2, 3, 4, np.inf, 6], 1, 3, "not finite"),
        ([1, 2, 3, 4, np.nan, 6], 1, 3, "not finite"),
        ([1, 2, 3, 4, -1e-30, 6], 1, 3, "negative"),
        ([1, 2, 3, 4, 5, 6], 0, 3, "step 0 is out of range"),
        ([1, 2, 3, 4, 5, 6], MAX_STEP + 1, 3, "is out of range"),
    ],
)
def test_what_no_adamw_has_written_is_refused(
    values: list[float], step: int, numel: int, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "moments"
    path.write_bytes(np.array(values, "<f4").tobytes() + struct.pack("<Q", step))
    with pytest.raises(ValueError, match=reason):
        Moments.read(path, numel)
