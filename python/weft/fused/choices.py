"""Choice of a plain call of a product: the fused kernel, or a product and then a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import ConfigurationError
from weft.fused import gains
from weft.fused.gemm import Tiling
from weft.fused.tables import COMPOSED, DEFAULT, UNFUSED, Shape, Table, table_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.communicator import Communicator
    from weft.fused.gemm import Operands

__all__ = ["Choice", "choose"]


class Choice(NamedTuple):
    """Way of a call.

    Attributes:
        fused: by the kernel; else by `weft.fused.composed`.
        tiling: of the kernel; `None`: the default one.
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
    """Choose for a call, equally on all ranks.

    In this order: `fused` if it is given; the kernel if options of it are, for float8, and for
    tensors of the CPU; the measurement of the class of shapes; `weft.fused.gains.RULES`. The first
    choice by measurement of a communicator is a collective call.

    Args:
        given: operands.
        group: of the ranks.
        fused: argument of the call.
        tiling: argument of the call.
        options: other arguments of the kernel alone, `None` if they are not given.

    Raises:
        ConfigurationError: if `fused` is False with options of the kernel.
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
    # The operators of torch are not a way of a plain call: the faster of the others is.
    times = {} if measured is None else table.times(operator, shape, x.dtype, ranks, x.device)
    if COMPOSED in times and DEFAULT in times:
        return Choice(times[DEFAULT] < times[COMPOSED])
    return Choice(gains.doubt(operator, shape, x.dtype, ranks, x.device, Table()) is None)


def _tiling_of(fields: Mapping[str, Any] | None) -> Tiling | None:
    """Tiling of its fields; `None` without fields, and for those of another version."""
    try:
        return None if fields is None else Tiling(**fields)
    except TypeError:
        return None
