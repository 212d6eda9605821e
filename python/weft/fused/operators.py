"""Fused operators as torch operators, `torch.ops.weft_fused`, which compilers trace through.

`gemv_all_reduce`, `matmul_all_reduce`, `matmul_reduce_scatter`, `matmul_all_to_all`,
`all_gather_matmul` and `all_to_all_matmul` take x [rows, inner], a weight [columns, inner] as in
`torch.nn.functional.linear`, and a process group name. Where a fused kernel does not apply, a GEMM
and the group's functional collective give the same result. Gradients are for the sum over all
ranks' losses, as in torch's functional collectives.

`site` names a compiled graph; at the first call, the ranks agree to run it fused. Operators are
registered with `torch.library` (see https://docs.pytorch.org/docs/stable/library.html), for example
`torch.ops.weft_fused.matmul_all_reduce(x, weight, group_name)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import distributed_c10d as c10d

from weft.base.errors import ConfigurationError, NoRouteError, ShapeError
from weft.fused import counts, gains
from weft.fused.gemm.gemm import Tiling
from weft.fused.gemm.gemv import GemvTiling, gemv_all_reduce
from weft.fused.gemm.receive import all_gather_gemm, all_to_all_gemm
from weft.fused.gemm.send import gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from weft.fused.groups import group_of
from weft.fused.tables import COMPOSED, UNFUSED, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weft.fused.groups import Group

__all__ = [
    "DTYPES",
    "KERNELS",
    "OPERATORS",
    "OWN_ROWS",
    "SITE_TIMEOUT",
    "interprets",
    "refusal",
    "run",
    "unfused",
]

#: Operators live as long as this library.
_LIBRARY: Final = torch.library.Library("weft_fused", "FRAGMENT")
_COLLECTIVES: Final = torch.ops._c10d_functional
#: Functions with the kernels, by operator.
KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "gemv_all_reduce": gemv_all_reduce,
    "matmul_all_reduce": gemm_all_reduce,
    "matmul_reduce_scatter": gemm_reduce_scatter,
    "matmul_all_to_all": gemm_all_to_all,
    "all_gather_matmul": all_gather_gemm,
    "all_to_all_matmul": all_to_all_gemm,
}
#: Operators whose rows are divided among ranks.
_DIVIDED: Final = frozenset(("matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul"))
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
#: Seconds to wait for the other ranks at a compiled graph's first call.
SITE_TIMEOUT: Final = [60.0]


def refusal(
    operator: str, rows: int, columns: int, inner: int, dtype: torch.dtype, ranks: int, device: str
) -> str | None:
    """Reason why an operator's kernel does not apply, from what is equal on all ranks."""
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if device == "cpu" and not interprets():
        return "CPU tensors without TRITON_INTERPRET=1"
    if device not in ("cpu", "cuda"):
        return f"device {device}"
    if not rows * columns * inner:
        return "no elements"
    if operator in _DIVIDED and rows % ranks:
        return f"{rows} rows are not divisible by {ranks} ranks"
    if operator == "gemv_all_reduce":
        if rows > gains.MAX_GEMV_ROWS:
            return f"{rows} rows; gemv_all_reduce has at most {gains.MAX_GEMV_ROWS}"
        if columns % 8 or inner % 8:
            return "sizes of the weight are not multiples of 8"
    return None


def interprets() -> bool:
    """True if kernels run under Triton's interpreter."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _fused(
    operator: str, x: torch.Tensor, weight: torch.Tensor, name: str, site: str, **options: object
) -> Any:
    """Fused or composed result; `None` if torch's operators must run."""
    group, result = group_of(name), None
    shape = Shape(x.shape[0], *weight.shape)
    reason = refusal(operator, *shape, x.dtype, group.ranks, x.device.type)
    if reason is None and x.dtype != weight.dtype:
        reason = "dtypes of x and of the weight differ"
    if reason is None and site:
        reason = group.runs(site, SITE_TIMEOUT[0])
    if reason is None:
        result, reason = _call(operator, group, x, weight, shape, options)
    if reason is None:
        counts.add("fused_calls", operator)
        return result
    counts.add("unfused_calls", operator, reason)
    return result


def _call(
    operator: str,
    group: Group,
    x: torch.Tensor,
    weight: torch.Tensor,
    shape: Shape,
    options: Mapping[str, object],
) -> tuple[Any, str | None]:
    if not group.is_on_one_host:
        return None, "ranks on several hosts"
    operator = gains.kernel_of(operator, shape, weight.is_contiguous())
    chosen = group.table.choice(operator, shape, x.dtype, group.ranks, x.device)
    if chosen is not None and chosen[0] == UNFUSED:
        return None, "unfused is faster by measurement"
    if chosen is not None and chosen[0] == COMPOSED:
        result, reason = run(operator, group, x, weight, None, fused=False, **options)
        return result, reason or "composed is faster by measurement"
    tiling = None if chosen is None else chosen[1]
    return run(operator, group, x, weight, tiling, **options)


def run(
    operator: str,
    group: Group,
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Mapping[str, Any] | None,
    **options: object,
) -> tuple[Any, str | None]:
    """Fused kernel result, or the refusal reason, which is the same on all ranks."""
    kernel = KERNELS[operator]
    is_straight = weight.is_contiguous()
    if not (is_straight or (weight.t().is_contiguous() and operator != "gemv_all_reduce")):
        return None, "strides of the weight"
    try:
        if tiling is not None:
            options["tiling"] = _tiling_of(operator, tiling)
        # Torch operators have another way to run without the kernel.
        options.setdefault("fused", True)
        # Addresses differ between ranks, and a refusal may not.
        given = _aligned(x.contiguous()), _aligned(weight)
        result = kernel(*given, communicator=group.communicator, **options)
    except (ConfigurationError, ShapeError, NoRouteError) as error:
        return None, str(error)
    return result, None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its address is not a multiple of 16 bytes; strides are kept."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _tiling_of(operator: str, fields: Mapping[str, Any]) -> Any:
    """Tiling for an operator's kernel, from fields."""
    made = GemvTiling if operator == "gemv_all_reduce" else Tiling
    try:
        return made(**fields)
    except TypeError as error:
        raise ConfigurationError(f"tiling {dict(fields)}: {error}") from error


def _size(name: str) -> int:
    return int(c10d._resolve_process_group(name).size())


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _reduced(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return _wait(_COLLECTIVES.all_reduce(tensor.contiguous(), "sum", name))


def _scattered(tensor: torch.Tensor, name: str) -> torch.Tensor:
    ranks = _size(name)
    return _wait(_COLLECTIVES.reduce_scatter_tensor(tensor.contiguous(), "sum", ranks, name))


def _gathered(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return _wait(_COLLECTIVES.all_gather_into_tensor(tensor.contiguous(), _size(name), name))


def _exchanged(tensor: torch.Tensor, name: str) -> torch.Tensor:
    ranks = _size(name)
    sizes = [_divide(tensor.shape[0], ranks)] * ranks
    return _wait(_COLLECTIVES.all_to_all_single(tensor.contiguous(), sizes, sizes, name))


def _divide(rows: int, ranks: int) -> int:
    if rows % ranks:
        raise ShapeError(f"{rows} rows: expected a multiple of the number of ranks, {ranks}")
    return rows // ranks


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected [rows, inner] and "
            "[columns, inner]"
        )


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


def unfused(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    name: str,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _matmul,
) -> torch.Tensor:
    """An operator's result by a GEMM and a collective in the named group."""
    if operator in ("gemv_all_reduce", "matmul_all_reduce"):
        return _reduced(matmul(x, weight), name)
    if operator == "matmul_reduce_scatter":
        return _scattered(matmul(x, weight), name)
    if operator == "matmul_all_to_all":
        return _exchanged(matmul(x, weight), name)
    received = _gathered(x, name) if operator == "all_gather_matmul" else _exchanged(x, name)
    return matmul(received, weight)


def _implementation(operator: str) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor, weight: torch.Tensor, group_name: str, site: str = ""
    ) -> torch.Tensor:
        _check(x, weight)
        if operator in _DIVIDED:
            _divide(x.shape[0], _size(group_name))
        result: torch.Tensor | None = _fused(operator, x, weight, group_name, site)
        return unfused(operator, x, weight, group_name) if result is None else result

    return call


def _all_gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    return_gathered: bool = False,
    site: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight)
    result = _fused(
        "all_gather_matmul", x, weight, group_name, site, return_gathered=return_gathered
    )
    no_rows = x.new_empty((0, x.shape[1]))
    if result is not None:
        return result if return_gathered else (result, no_rows)
    gathered = _gathered(x, group_name)
    return gathered @ weight.t(), gathered if return_gathered else no_rows


def _fake_same(
    x: torch.Tensor, weight: torch.Tensor, group_name: str, site: str = ""
) -> torch.Tensor:
    _check(x, weight)
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_scattered(
    x: torch.Tensor, weight: torch.Tensor, group_name: str, site: str = ""
) -> torch.Tensor:
    _check(x, weight)
    return x.new_empty((_divide(x.shape[0], _size(group_name)), weight.shape[0]))


def _fake_exchanged(
    x: torch.Tensor, weight: torch.Tensor, group_name: str, site: str = ""
) -> torch.Tensor:
    _divide(x.shape[0], _size(group_name))
    return _fake_same(x, weight, group_name, site)


def _fake_gathered(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_name: str,
    return_gathered: bool = False,
    site: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight)
    rows = x.shape[0] * _size(group_name)
    kept = rows if return_gathered else 0
    return x.new_empty((rows, weight.shape[0])), x.new_empty((kept, x.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.group_name = inputs[2]
    # Rows that were not returned have no gradient to scatter.
    ctx.has_gathered = len(inputs) > 3 and inputs[3] is True


def _reduced_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    whole = _reduced(grad, ctx.group_name)
    return *_matmul_gradients(ctx, whole, x, weight), None, None


def _matmul_gradients(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Gradients for x and the weight, from the result's gradient."""
    of_x = grad @ weight if ctx.needs_input_grad[0] else None
    return of_x, grad.t() @ x if ctx.needs_input_grad[1] else None


def _scattered_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x, whole = torch.ops.weft_fused.all_gather_matmul(
        grad.contiguous(), weight.t(), ctx.group_name, True
    )
    return of_x, whole.t() @ x, None, None


def _sent_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        grad = grad.contiguous()
        of_x = torch.ops.weft_fused.all_to_all_matmul(grad, weight.t(), ctx.group_name)
        return of_x, None, None, None
    whole = _exchanged(grad, ctx.group_name)
    return *_matmul_gradients(ctx, whole, x, weight), None, None


def _gathered_backward(
    ctx: Any, grad: torch.Tensor, grad_gathered: torch.Tensor
) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    name = ctx.group_name
    of_x = torch.ops.weft_fused.matmul_reduce_scatter(grad.contiguous(), weight.t(), name)
    if ctx.has_gathered:
        of_x = of_x + _scattered(grad_gathered, name)
    of_weight = grad.t() @ _gathered(x, name) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None, None


def _received_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    name = ctx.group_name
    of_x = torch.ops.weft_fused.matmul_all_to_all(grad.contiguous(), weight.t(), name)
    of_weight = grad.t() @ _exchanged(x, name) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None


def _define(
    name: str,
    call: Callable[..., object],
    fake: Callable[..., object],
    backward: Callable[..., object],
) -> Any:
    option, result = "", "Tensor"
    if name == "all_gather_matmul":
        option, result = ", bool return_gathered=False", "(Tensor, Tensor)"
    _LIBRARY.define(
        f'{name}(Tensor x, Tensor weight, str group_name{option}, str site="") -> {result}',
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, call, device)
    whole = f"weft_fused::{name}"
    torch.library.register_fake(whole, fake, lib=_LIBRARY)
    torch.library.register_autograd(whole, backward, setup_context=_keep, lib=_LIBRARY)
    return getattr(torch.ops.weft_fused, name).default


def _own_rows(x: torch.Tensor, group_name: str) -> torch.Tensor:
    group: Any = c10d._resolve_process_group(group_name)
    rows = _divide(x.shape[0], group.size())
    return x[group.rank() * rows : (group.rank() + 1) * rows].clone(
        memory_format=torch.contiguous_format
    )


def _define_own_rows() -> Any:
    _LIBRARY.define(
        "own_rows(Tensor x, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl("own_rows", _own_rows, device)
    torch.library.register_fake(
        "weft_fused::own_rows",
        lambda x, group_name: x.new_empty((_divide(x.shape[0], _size(group_name)), *x.shape[1:])),
        lib=_LIBRARY,
    )
    return torch.ops.weft_fused.own_rows.default


#: Copies this rank's rows from x [rows, ...]. A graph with it is equal on all ranks.
OWN_ROWS: Final = _define_own_rows()
_SIMPLE: Final = {
    "gemv_all_reduce": (_fake_same, _reduced_backward),
    "matmul_all_reduce": (_fake_same, _reduced_backward),
    "matmul_reduce_scatter": (_fake_scattered, _scattered_backward),
    "matmul_all_to_all": (_fake_exchanged, _sent_backward),
    "all_to_all_matmul": (_fake_exchanged, _received_backward),
}
#: By name, without `weft_fused::`.
OPERATORS: Final[dict[str, Any]] = {
    **{name: _define(name, _implementation(name), *others) for name, others in _SIMPLE.items()},
    "all_gather_matmul": _define(
        "all_gather_matmul", _all_gather_matmul, _fake_gathered, _gathered_backward
    ),
}
