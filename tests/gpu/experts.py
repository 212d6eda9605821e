"""Experts whose outputs have equal bits on every device."""

import torch

from tests.gpu.case import Shape

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Scratch:
    """Preallocated memory for `run_experts`."""

    def __init__(self, shape: Shape, positions: int, device: torch.device | str) -> None:
        dtype: torch.dtype = getattr(torch, shape.wire)
        size = (positions, shape.hidden)
        self.codes = torch.empty(size, dtype=INTEGERS[dtype.itemsize], device=device)
        self.wide = torch.empty(size, dtype=torch.float32, device=device)
        combine: torch.dtype = getattr(torch, shape.combine_dtype)
        self.outputs = torch.empty(size, dtype=combine, device=device)


def run_experts(
    shape: Shape, tokens: torch.Tensor, factors: torch.Tensor, scratch: Scratch | None = None
) -> torch.Tensor:
    """`[positions, hidden]` in the combine dtype, a function of a token's last bits and factor.

    Tokens are arbitrary bits, so they are not read as numbers: NaN conversion differs by device.
    Only exact steps and single roundings are used.

    Args:
        shape: the group's.
        tokens: `[positions, bytes in a token]` uint8.
        factors: `[positions]` float32.
        scratch: preallocated memory, or `None` to allocate.
    """
    scratch = scratch or Scratch(shape, len(tokens), tokens.device)
    torch.bitwise_and(tokens.view(scratch.codes.dtype), 7, out=scratch.codes)
    scratch.wide.copy_(scratch.codes)
    scratch.wide.add_(1).mul_(factors[:, None])
    return scratch.outputs.copy_(scratch.wide)
