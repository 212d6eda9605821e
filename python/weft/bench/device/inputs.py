"""Random tokens on the device and their routing; every rank can make the tokens of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.bench.device.cases import BLOCK
from weft.bench.moe_workload import Router

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.bench.device.cases import Case
    from weft.bench.device.machine import Device

__all__ = ["Inputs", "Source", "cast", "dequantise", "owners"]


class Inputs(NamedTuple):
    """Arguments for one rank's dispatch; tensors on the device."""

    tokens: Any  # [tokens, hidden] in the case's dtype
    ids: Any  # [tokens, top_k] int64
    weights: Any  # [tokens, top_k] float32
    scales: Any  # [tokens, scales] float32, or None


class Source:
    """Batches by rank and number: the same ones on every rank."""

    def __init__(self, case: Case, device: Device, ranks: int) -> None:
        self.case, self.device, self.ranks = case, device, ranks
        self.router = Router(case.routes(ranks))

    def routes(self, rank: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Expert ids and weights, both [tokens, top_k]."""
        _, ids, weights = self.router.batch(rank, number)
        return ids, weights

    def wire(self, rank: int, number: int) -> tuple[Any, Any]:
        """Tokens on the wire: [tokens, hidden] in the wire dtype, and scales or None."""
        tokens = self.tokens(rank, number)
        return cast(self.device.torch, tokens) if self.case.scales else (tokens, None)

    def tokens(self, rank: int, number: int) -> Any:
        """Random tokens in a wide type, before any cast."""
        torch = self.device.torch
        seed = (self.case.seed * 1_000_003 + number) * 1009 + rank
        generator = torch.Generator(device=self.device.name).manual_seed(seed)
        shape = (self.case.tokens, self.case.hidden)
        values = torch.randn(shape, generator=generator, device=self.device.name)
        return values.to(getattr(torch, self.case.wide))

    def inputs(self, rank: int, number: int) -> Inputs:
        """Arguments for a rank's dispatch."""
        torch = self.device.torch
        ids, weights = (torch.from_numpy(array) for array in self.routes(rank, number))
        given = (self.tokens(rank, number), None)
        if self.case.scales and not self.case.casts:
            given = self.wire(rank, number)
        where = self.device.name
        return Inputs(given[0], ids.to(where), weights.to(where), given[1])


def cast(torch: Any, tokens: Any) -> tuple[Any, Any]:
    """Codes in float8_e4m3fn and a float32 scale for each block, as the kernel makes them."""
    rows, hidden = tokens.shape
    blocks = -(-hidden // BLOCK)
    padded = torch.nn.functional.pad(tokens.float(), (0, blocks * BLOCK - hidden))
    values = padded.reshape(rows, blocks, BLOCK)
    largest = values.abs().amax(dim=2)
    # By a tensor: on a GPU, PyTorch multiplies by a number's reciprocal, which rounds another way.
    scales = torch.clamp(largest / torch.full_like(largest, 448), min=2.0**-126)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    codes = (values * (1 / scales)[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = codes.view(torch.uint8).reshape(rows, -1)[:, :hidden].contiguous()
    return codes.view(torch.float8_e4m3fn), scales


def dequantise(torch: Any, codes: Any, scales: Any) -> Any:
    """Float32 values for 8-bit codes; a wide type keeps its values."""
    values = codes.to(torch.float32)
    if scales is None:
        return values
    return values * scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]


def owners(case: Case, ranks: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Destinations, [tokens, ranks]: true for each rank that owns one of the token's experts."""
    first = np.array([rank * case.experts // ranks for rank in range(1, ranks)], dtype=np.int64)
    owner = np.searchsorted(first, ids, side="right")
    goes = np.zeros((len(ids), ranks), dtype=np.bool_)
    for slot in range(ids.shape[1]):
        named = ids[:, slot] >= 0
        goes[np.nonzero(named)[0], owner[named, slot]] = True
    return goes
