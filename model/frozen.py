"""The experts that a node only reads: kept in few bytes, on the device or in host memory, never with a gradient."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.settings import StoreKind

Matrices = tuple[Tensor, Tensor]
"""`gate_up` [2F, D] (gate rows first) and `down` [D, F] of one expert."""

_MATRICES = ("gate_up", "down")
_TINY = 1e-30
"""Scale of a row that is all zero."""


class FrozenStore(nn.Module):
    """Experts by id, as buffers. `put` and `get` are the only places that know how the values are kept.

    int8 rounds each row to 255 levels with an fp32 scale of its own, max|row| / 127.
    """

    def __init__(self, kind: StoreKind = "fp32", *, offload: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.offload = offload
        self.experts: set[int] = set()

    def put(self, expert: int, gate_up: Tensor, down: Tensor) -> None:
        """Keeps a copy of the values of one expert, which may be new here."""
        for matrix, values in zip(_MATRICES, (gate_up, down), strict=True):
            if expert in self.experts and self.kind != "int8":
                self.get_buffer(_name(matrix, expert, 0)).copy_(values.detach())  # which rounds as it copies
                continue
            for part, packed in enumerate(_pack(values.detach(), self.kind)):
                name = _name(matrix, expert, part)
                if expert in self.experts:
                    self.get_buffer(name).copy_(packed)
                else:
                    self.register_buffer(name, _to_host(packed) if self.offload else packed, persistent=False)
        self.experts.add(expert)

    def drop(self, expert: int) -> None:
        """Forgets one expert."""
        for matrix in _MATRICES:
            for part in range(_num_parts(self.kind)):
                delattr(self, _name(matrix, expert, part))
        self.experts.remove(expert)

    def get(self, expert: int, dtype: torch.dtype, device: torch.device | None = None) -> Matrices:
        """The values of one expert in `dtype` on `device` (None: where they are). They may share the store's memory."""
        gate_up, down = (_unpack([part.to(device) for part in parts], dtype) for parts in self._parts(expert))
        return gate_up, down

    def stream(self, experts: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Matrices]:
        """The values of `experts`, one after another. From host memory to a GPU, the next one is on its way while the
        caller computes with the present one: with the one before, which the caller may still hold, three are on the
        device at a time."""
        if not (self.offload and device.type == "cuda"):
            yield from (self.get(expert, dtype) for expert in experts)
            return
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream(device)
        coming = self._upload(experts[0], device, main, side) if experts else None
        try:
            for following in [*experts[1:], None][: len(experts)]:
                assert coming is not None
                main.wait_stream(side)
                here, coming = coming, None
                if following is not None:
                    coming = self._upload(following, device, main, side)
                gate_up, down = (_unpack(parts, dtype) for parts in here)
                del here
                yield gate_up, down
                del gate_up, down
        finally:
            main.wait_stream(side)  # who stops early frees memory that is still being written

    def _upload(
        self, expert: int, device: torch.device, main: torch.cuda.Stream, side: torch.cuda.Stream
    ) -> tuple[list[Tensor], ...]:
        # The memory is the main stream's: freed there, it can be used again at once, however far the device is behind.
        # Memory of the other stream could not, and all experts of a layer would be on the device.
        here = tuple([torch.empty_like(part, device=device) for part in parts] for parts in self._parts(expert))
        side.wait_stream(main)  # which may still compute with what was in that memory before
        with torch.cuda.stream(side):
            for parts, stored in zip(here, self._parts(expert), strict=True):
                for part, host in zip(parts, stored, strict=True):
                    part.copy_(host, non_blocking=True)
        return here

    def _parts(self, expert: int) -> Iterator[list[Tensor]]:
        for matrix in _MATRICES:
            yield [self._buffers[_name(matrix, expert, part)] for part in range(_num_parts(self.kind))]  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> "FrozenStore":
        def keep(tensor: Tensor) -> Tensor:
            # `.to(dtype)` on the model never rounds these values, and `.to(device)` leaves host memory where it is.
            moved: Tensor = fn(tensor)
            if self.offload:
                return tensor
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self


def packed_bytes(kind: StoreKind, hidden_size: int, expert_size: int) -> int:
    """Bytes that the store takes for one expert."""
    values, rows = 3 * hidden_size * expert_size, 2 * expert_size + hidden_size
    return {"fp32": 4 * values, "bf16": 2 * values, "int8": values + 4 * rows}[kind]


def _name(matrix: str, expert: int, part: int) -> str:
    return f"{matrix}_{expert}" if part == 0 else f"{matrix}_scale_{expert}"


def _num_parts(kind: StoreKind) -> int:
    return 2 if kind == "int8" else 1


def _pack(values: Tensor, kind: StoreKind) -> tuple[Tensor, ...]:
    if kind == "int8":
        scale = values.abs().amax(-1, keepdim=True).float().div_(127).clamp_(min=_TINY)
        return torch.div(values, scale).round_().to(torch.int8), scale
    return (values.to(torch.float32 if kind == "fp32" else torch.bfloat16, copy=True),)


def _unpack(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parts) == 1:
        return parts[0].to(dtype)
    values, scale = parts
    # The product is taken in fp32 and rounded once.
    return torch.mul(values, scale, out=torch.empty(values.shape, dtype=dtype, device=values.device))


def _to_host(tensor: Tensor) -> Tensor:
    host = tensor.to("cpu")
    return host.pin_memory() if torch.cuda.is_available() else host
