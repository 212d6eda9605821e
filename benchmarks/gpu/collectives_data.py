"""Inputs and references for the device collectives benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collectives_sides import lengths

if TYPE_CHECKING:
    from collectives_cases import Case
    from harness.context import Context

__all__ = ["Data", "Reference", "Verdict", "source"]


@dataclass(frozen=True)
class Verdict:
    """Comparison between a result and the reference."""

    #: Largest error over the bound; infinity for NaN.
    share: float
    #: True if all bits equal the sum in rank order, rounded once, or the moved input.
    exact: bool


def source(context: Context, case: Case, rank: int, slot: int) -> Any:
    """A rank's input: bfloat16 values in [-1, 1), hashed from rank, slot and position.

    Integer arithmetic, so that every rank makes the same values on any device.
    """
    torch = context.device.torch
    taken, _ = lengths(case, context.ranks)
    values = torch.arange(taken, dtype=torch.int64, device=context.device.name)
    values += (rank * 1009 + slot + 1) * 40_503_001
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13)):
        values *= factor
        values &= 0xFFFFFFFF
        values ^= values >> shift
    return (values & 0xFFFF).to(torch.float32).div_(32768).sub_(1).bfloat16()


class Reference:
    """Results that a case's slot must have on this rank."""

    def __init__(self, context: Context, case: Case, slot: int) -> None:
        self.torch, self.case = context.device.torch, case
        rank, ranks = context.rank, context.ranks
        _, made = lengths(case, ranks)
        self.absolute: Any = None
        self.ranks = ranks
        if case.operation in ("all_gather", "all_to_all"):
            part = made // ranks
            begin = rank * part if case.operation == "all_to_all" else 0
            parts = [
                source(context, case, peer, slot)[begin : begin + part] for peer in range(ranks)
            ]
            self.exact = self.torch.cat(parts)
            return
        begin = rank * made if case.operation == "reduce_scatter" else 0
        total = self.torch.zeros(made, dtype=self.torch.float32, device=context.device.name)
        self.absolute = self.torch.zeros_like(total)
        for peer in range(ranks):
            addend = source(context, case, peer, slot)[begin : begin + made].float()
            total += addend
            self.absolute += addend.abs_()
        self.total, self.exact = total, total.bfloat16()

    def judge(self, result: Any) -> Verdict:
        """Compare a result."""
        torch = self.torch
        exact = bool(torch.equal(result.view(torch.int16), self.exact.view(torch.int16)))
        if self.absolute is None:
            return Verdict(0.0 if exact else float("inf"), exact)
        # Each addition may round to bfloat16, whose unit roundoff is 2^-8.
        bound = self.absolute * (self.ranks * 2.0**-8) + 2.0**-24
        share = float(((result.float() - self.total).abs_() / bound).max())
        return Verdict(share if share == share else float("inf"), exact)


class Data:
    """A case's inputs and the results that they must have; empty for a barrier."""

    def __init__(self, context: Context, case: Case) -> None:
        self.sources: list[Any] = []
        #: By buffer: the first and the last one.
        self.references: dict[int, Reference] = {}
        if case.operation != "barrier":
            slots = range(case.buffers)
            self.sources = [source(context, case, context.rank, slot) for slot in slots]
            ends = (slots[0], slots[-1])
            self.references = {slot: Reference(context, case, slot) for slot in ends}
