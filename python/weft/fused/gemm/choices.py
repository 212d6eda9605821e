"""Choice for a plain GEMM call: the fused kernel, or a GEMM and then a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.errors import ConfigurationError
from weft.fused import gains
from weft.fused.gemm.gemm import Tiling
from weft.fused.tables import COMPOSED, DEFAULT, UNFUSED, Shape, Table, table_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.fused.gemm.gemm import Operands
    from weft.group.communicator import Communicator

__all__ = ["Choice", "choose"]


class Choice(NamedTuple):
    """Call choice: fused or composed, and the tiling.

    Attributes:
        fused: by the kernel; else by `weft.fused.gemm.composed`.
        tiling: kernel tiling; `None`: the default one.
    """

    fused: bool
    tiling: Tiling | None = None


def choose(
    given: Operands,
    group: Communicator,
    fused: bool | None,
    tiling: Tiling | None,
    **options: object,
) -> Choice:
    """Choose how a call runs, equally on all ranks.

    In this order: `fused` if it is given; the kernel if kernel options are given, for float8, and
    for CPU tensors; the measurement for the shape class; `weft.fused.gains.RULES`. A communicator's
    first choice by measurement is a collective call.

    Args:
        given: operands.
        group: this call's communicator.
        fused: the call's argument.
        tiling: the call's argument.
        options: other kernel-only arguments, `None` if they are not given.

    Raises:
        ConfigurationError: if `fused` is False with kernel options.
    """
    named = {"tiling": tiling, **options}
    kernel = [name for name, value in named.items() if value is not None]
    if fused is False and kernel:
        raise ConfigurationError(
            f"weft.fused.{given.operator}: fused=False with {', '.join(kernel)}: these are options "
            "of the kernel; pass only one"
        )
    if fused is not None or kernel or given.interpreted or given.scales is not None:
        return Choice(fused is not False, tiling)
    shape = Shape(given.rows, given.columns, given.inner)
    x, ranks, table = given.x, group.world_size, table_of(group)
    operator = given.operator.replace("gemm", "matmul")
    measured = table.choice(operator, shape, x.dtype, ranks, x.device)
    if measured is not None and measured[0] != UNFUSED:
        name, fields = measured
        return Choice(name != COMPOSED, _tiling_of(fields))
    # torch's operators are no option for a plain call, so the faster of the others is chosen.
    times = {} if measured is None else table.times(operator, shape, x.dtype, ranks, x.device)
    if COMPOSED in times and DEFAULT in times:
        return Choice(times[DEFAULT] < times[COMPOSED])
    return Choice(gains.doubt(operator, shape, x.dtype, ranks, x.device, Table()) is None)


def _tiling_of(fields: Mapping[str, Any] | None) -> Tiling | None:
    """Tiling from fields; `None` without fields, and for another version's fields."""
    try:
        return None if fields is None else Tiling(**fields)
    except TypeError:
        return None
