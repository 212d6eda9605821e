"""Float8 GEMMs beside collectives as torch operators, in the style of `torch._scaled_mm`.

The operators `scaled_matmul_all_reduce`, `scaled_matmul_reduce_scatter`,
`scaled_matmul_all_to_all`, `all_gather_scaled_matmul` and `all_to_all_scaled_matmul` in
`torch.ops.weft_fused` take a float8 x [rows, inner] and weight [columns, inner], scales as in
`weft.fused.gemm`, and a process group name. Where a fused kernel does not apply, `torch._scaled_mm`
and the group's functional collective give the same result. There are no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from weft.base.errors import ShapeError
from weft.fused import counts, operators
from weft.fused.gemm.scales import scaled_matmul
from weft.fused.groups import group_of
from weft.fused.tables import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PLAIN", "SCALED_OPERATORS"]

_LIBRARY: Final = torch.library.Library("weft_fused", "FRAGMENT")
#: Operator for the same collective without scales, by name.
PLAIN: Final = {
    "scaled_matmul_all_reduce": "matmul_all_reduce",
    "scaled_matmul_reduce_scatter": "matmul_reduce_scatter",
    "scaled_matmul_all_to_all": "matmul_all_to_all",
    "all_gather_scaled_matmul": "all_gather_matmul",
    "all_to_all_scaled_matmul": "all_to_all_matmul",
}
#: Operators whose rows are divided among ranks.
_DIVIDED: Final = frozenset(PLAIN) - {"scaled_matmul_all_reduce", "all_gather_scaled_matmul"}


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, ranks: int) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [rows, inner] and "
            "[columns, inner]"
        )
    if name in _DIVIDED and x.shape[0] % ranks:
        raise ShapeError(f"{x.shape[0]} rows: expected a multiple of the number of ranks, {ranks}")


def _run(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    group_name: str,
    dtype: torch.dtype,
    fast: bool,
    site: str,
    **options: bool,
) -> tuple[Any, torch.Tensor | None]:
    """The fused kernel's result, or torch's result and the rows that it has received."""
    group = group_of(group_name)
    _check(name, x, weight, group.ranks)
    sizes = Shape(x.shape[0], *weight.shape)
    reason = operators.refusal(PLAIN[name], *sizes, dtype, group.ranks, x.device.type)
    if reason is None and site:
        reason = group.runs(site, operators.SITE_TIMEOUT[0])
    if reason is None and not group.is_on_one_host:
        reason = "ranks on several hosts"
    if reason is None:
        result, reason = operators.run(
            PLAIN[name],
            group,
            x,
            weight,
            None,
            scale_x=scale_x.contiguous(),
            scale_weight=scale_weight.contiguous(),
            out_dtype=dtype,
            use_fast_accum=fast,
            **options,
        )
    if reason is None:
        counts.add("fused_calls", name)
        return result, None
    counts.add("unfused_calls", name, reason)
    received: list[torch.Tensor] = []

    def matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        received.append(rows.view(x.dtype))
        return scaled_matmul(received[0], weight.contiguous(), scale_x, scale_weight, dtype, fast)

    # As bytes, since not all backends have float8 collectives.
    rows = x.contiguous().view(torch.uint8)
    return operators.unfused(PLAIN[name], rows, weight, group_name, matmul), received[0]


def _implementation(name: str) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale_x: torch.Tensor,
        scale_weight: torch.Tensor,
        group_name: str,
        out_dtype: torch.dtype = torch.bfloat16,
        use_fast_accum: bool = False,
        site: str = "",
    ) -> torch.Tensor:
        given = (x, weight, scale_x, scale_weight, group_name, out_dtype, use_fast_accum, site)
        result: torch.Tensor = _run(name, *given)[0]
        return result

    return call


def _all_gather(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    group_name: str,
    return_gathered: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    site: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (x, weight, scale_x, scale_weight, group_name, out_dtype, use_fast_accum, site)
    result, received = _run("all_gather_scaled_matmul", *given, return_gathered=return_gathered)
    if received is None and return_gathered:
        return result[0], result[1]
    if received is None or not return_gathered:
        received = x.new_empty((0, x.shape[1]))
    return result, received


def _fake(name: str) -> Callable[..., torch.Tensor]:
    def fake(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale_x: torch.Tensor,
        scale_weight: torch.Tensor,
        group_name: str,
        out_dtype: torch.dtype = torch.bfloat16,
        use_fast_accum: bool = False,
        site: str = "",
    ) -> torch.Tensor:
        ranks = group_of(group_name).ranks
        _check(name, x, weight, ranks)
        rows = x.shape[0] // ranks if name == "scaled_matmul_reduce_scatter" else x.shape[0]
        return x.new_empty((rows, weight.shape[0]), dtype=out_dtype)

    return fake


def _fake_gathered(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    group_name: str,
    return_gathered: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    site: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = group_of(group_name).ranks
    _check("all_gather_scaled_matmul", x, weight, ranks)
    rows = x.shape[0] * ranks
    kept = rows if return_gathered else 0
    result = x.new_empty((rows, weight.shape[0]), dtype=out_dtype)
    return result, x.new_empty((kept, x.shape[1]))


def _define(name: str) -> Any:
    option, result = "", "Tensor"
    call: Callable[..., Any] = _implementation(name)
    fake: Callable[..., Any] = _fake(name)
    if name == "all_gather_scaled_matmul":
        option, result = ", bool return_gathered=False", "(Tensor, Tensor)"
        call, fake = _all_gather, _fake_gathered
    _LIBRARY.define(
        f"{name}(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, str group_name"
        f"{option}, ScalarType out_dtype=bfloat16, bool use_fast_accum=False, "
        f'str site="") -> {result}',
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, call, device)
    torch.library.register_fake(f"weft_fused::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.weft_fused, name).default


#: By name, without `weft_fused::`.
SCALED_OPERATORS: Final[dict[str, Any]] = {name: _define(name) for name in PLAIN}
