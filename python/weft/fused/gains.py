"""Rules for when a fused operator is expected to be faster than a GEMM and a collective.

Times decide for a shape class that `weft.fused.tuning` has measured; otherwise `RULES` do. For
example, `doubt` returns "no gain: 1 rank" in a group with one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weft.fused.tables import UNFUSED

if TYPE_CHECKING:
    from weft.fused.tables import Shape, Table

__all__ = ["BY_NAME", "MAX_GEMV_ROWS", "ON_REQUEST", "RULES", "Rule", "doubt", "kernel_of"]

#: Most rows of the kernel of `gemv_all_reduce`.
MAX_GEMV_ROWS: Final = 32


class Rule(NamedTuple):
    """Shapes for which a gain is expected.

    Attributes:
        min_rows: x's rows on each rank.
        min_bytes: tensor size that the collective moves.
        min_inner: inner size; a short GEMM ends before the collective has begun.
        few_rows: enough for a long GEMM; `None`: it needs min_rows, too.
        min_work: multiply-adds in a long GEMM, on each rank.
    """

    min_rows: int
    min_bytes: int
    min_inner: int
    few_rows: int | None = None
    min_work: float = 0.0


#: By operator. The row limits are between the shapes in docs/results/fused.md that lost on two H200
#: and the shapes that lost at most 4 %. `few_rows` is taken from shapes where some lost, and
#: `min_work` is between their work and the others'. Other limits are estimates. No embedding bags
#: lost.
RULES: Final = {
    "gemv_all_reduce": Rule(1, 1, 512),
    "matmul_all_reduce": Rule(2048, 1 << 20, 512, 1024, 60e9),
    "matmul_reduce_scatter": Rule(2048, 1 << 20, 512, 1024, 60e9),
    "matmul_all_to_all": Rule(2048, 1 << 20, 512, 1024, 15e9),
    "all_gather_matmul": Rule(1024, 1 << 20, 512, 512, 100e9),
    "all_to_all_matmul": Rule(2048, 1 << 20, 512, 1024, 100e9),
    "sequence_parallel": Rule(2048, 1 << 20, 512),
    "embedding_all_to_all": Rule(1, 1, 1),
    # For float8: same rules, with an inner size of as many bytes.
    "scaled_matmul_all_reduce": Rule(2048, 1 << 20, 1024),
    "scaled_matmul_reduce_scatter": Rule(2048, 1 << 20, 1024),
    "scaled_matmul_all_to_all": Rule(2048, 1 << 20, 1024),
    "all_gather_scaled_matmul": Rule(1024, 1 << 20, 1024),
    "all_to_all_scaled_matmul": Rule(2048, 1 << 20, 1024),
}
#: Only by name: graphs that were made sequence-parallel took 0.96 and 1.02 of the time without.
BY_NAME: Final = frozenset(("sequence_parallel",))
#: By name or `force`: few float8 shapes are measured.
ON_REQUEST: Final = frozenset(name for name in RULES if "scaled" in name)


def kernel_of(operator: str, shape: Shape, is_straight: bool) -> str:
    """The operator whose kernel runs a call: `matmul_all_reduce` has two, by row count.

    Args:
        operator: the call's operator.
        shape: GEMM shape on each rank.
        is_straight: the weight is contiguous, rather than the transpose.
    """
    is_short = shape.rows <= MAX_GEMV_ROWS and not (shape.columns % 8 or shape.inner % 8)
    if operator == "matmul_all_reduce" and is_short and is_straight:
        return "gemv_all_reduce"
    return operator


def doubt(
    operator: str,
    shape: Shape,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device,
    table: Table,
) -> str | None:
    """Reason to expect no gain from fusion; `None` if a gain is expected.

    Args:
        operator: kernel name, as `kernel_of` returns it.
        shape: GEMM shape on each rank.
        dtype: x's dtype.
        ranks: group size.
        device: x's device.
        table: measured choices, which go before the rules.
    """
    if ranks < 2:
        return "no gain: 1 rank"
    measured = table.choice(operator, shape, dtype, ranks, device)
    if measured is not None:
        return "no gain: measured" if measured[0] == UNFUSED else None
    rule = RULES[operator]
    is_scaled = "scaled" in operator
    rows = shape.rows * ranks if operator.startswith("all_gather") else shape.rows
    work = rows * shape.columns * shape.inner
    least = f"expected {rule.min_rows} or more"
    few = rule.min_rows if rule.few_rows is None else rule.few_rows
    if shape.rows < few:
        return f"no gain: {shape.rows} rows; {least}"
    if shape.rows < rule.min_rows and work < rule.min_work:
        return f"no gain: {shape.rows} rows of {work:.2g} multiply-adds; {least}, or more work"
    moved, size = shape.columns, dtype.itemsize
    if operator.endswith("_matmul"):
        # The collective is before the GEMM.
        moved, size = shape.inner, 1 if is_scaled else size
    count = shape.rows * moved * size
    if count < rule.min_bytes:
        return f"no gain: {count} bytes; expected {rule.min_bytes} or more"
    if shape.inner < rule.min_inner:
        return f"no gain: inner size {shape.inner}; expected {rule.min_inner} or more"
    if operator in ("gemv_all_reduce", "embedding_all_to_all"):
        return None
    if dtype == torch.float32:
        return "no gain: float32 was not measured"
    if shape.columns % 8 or shape.inner % 8:
        return "no gain: sizes of the weight are not multiples of 8"
    return None
