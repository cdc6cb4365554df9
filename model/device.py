"""The choice of the compute device and its dtype, with the reason."""

import torch

from model.errors import UserError


def choose_device(requested: str = "auto") -> tuple[torch.device, torch.dtype, str]:
    """Device and compute dtype for `requested` (`auto`, `cpu`, `cuda` or `cuda:N`), and a sentence that says why.

    Raises UserError when the device that was asked for is not there.
    """
    if requested == "cpu":
        return torch.device("cpu"), torch.float32, "the CPU was asked for"
    if requested == "auto" and not torch.cuda.is_available():
        return torch.device("cpu"), torch.float32, "no CUDA device is visible"
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
        return device, torch.bfloat16, f"{what} computes bfloat16"
    return device, torch.float32, f"{what} has no fast bfloat16 (needs 8.0)"
