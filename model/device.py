"""The choice of the compute device and its dtype, with the reason."""

from pathlib import Path

import torch

from model.errors import UserError
from model.settings import Dtype


def choose_device(requested: str = "auto") -> tuple[torch.device, Dtype, str]:
    """Device and compute dtype for `requested` (`auto`, `cpu`, `cuda` or `cuda:N`), and a sentence that says why.

    Raises UserError when the device that was asked for is not there.
    """
    if requested == "cpu":
        return torch.device("cpu"), "fp32", "the CPU was asked for"
    if requested == "auto" and not torch.cuda.is_available():
        return torch.device("cpu"), "fp32", "no CUDA device is visible"
    name, _, index = ("cuda" if requested == "auto" else requested).partition(":")
    if name != "cuda" or (index and not index.isdecimal()):
        raise UserError(f"device {requested!r} is unknown: use auto, cpu, cuda or cuda:N")
    device = torch.device("cuda", int(index or 0))
    if device.index >= torch.cuda.device_count():
        raise UserError(
            f"device {requested!r} is not there ({torch.cuda.device_count()} CUDA devices): use auto or cpu"
        )
    major, minor = torch.cuda.get_device_capability(device)
    what = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if major >= 8:
        return device, "bf16", f"{what} computes bfloat16"
    return device, "fp32", f"{what} has no fast bfloat16 (needs 8.0)"


def device_memory(device: torch.device) -> int:
    """Bytes that can be had on `device` now: of a GPU what is free, of the CPU's memory what the system and the
    control group of this process leave."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(meminfo["MemAvailable"].split()[0])
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and (text := Path(limit).read_text().strip()) != "max":
            available = min(available, int(text) - int(Path(usage).read_text()))
    return available
