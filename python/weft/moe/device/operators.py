"""All-to-all calls as torch operators, which compilers trace through.

`weft::moe_dispatch_send`, `weft::moe_dispatch_recv`, `weft::moe_combine_send`,
`weft::moe_combine_recv`, both halves at once as `weft::moe_dispatch` and `weft::moe_combine`,
`weft::moe_landed` and `weft::moe_release`. `weft.cuda.AllToAll` calls them in code that is being
compiled, and the underlying launches otherwise.

`Launcher.handle` names an all-to-all. Each operator is declared to change the workspace, which
keeps operators in order and keeps those without outputs; the workspace is never read. Dispatch
returns one buffer, and compiled code makes the views that it needs. Outputs are fresh, so in the
indexed layout `weft::moe_landed` copies received tokens from the heap: a compiler may write to
memory that it considers private, and heap rows belong to peers again once combine was sent. See
[custom operators](https://docs.pytorch.org/tutorials/advanced/custom_ops_landing_page.html).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from weft.moe.device.launcher import NOTHING, Added, Batch, of_handle

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPERATORS"]

#: Operators live as long as it.
_LIBRARY: Final = torch.library.Library("weft", "FRAGMENT")
_CHANNEL = "SymInt handle, SymInt channel, SymInt? num_sms, Tensor(a!) workspace"
_BATCH = "Tensor tokens, Tensor? scales, Tensor ids, Tensor? weights, Tensor? count, SymInt layer=0"
_LOAD = "Tensor(b!)? load"
_SUMS = "SymInt given, Tensor? count, Tensor? bias_0, Tensor? bias_1, Tensor? base"


def _dispatch_send(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    count: torch.Tensor | None,
    layer: int = 0,
) -> None:
    launcher = of_handle(handle)
    quick, stream = launcher.quick, launcher.stream()
    batch = tokens, scales, ids, weights, count, layer
    if quick is None or quick.dispatch_send(stream, channel, *batch, num_sms) is None:
        launcher.dispatch_send(channel, Batch(*batch), num_sms)


def _dispatch_recv(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    load: torch.Tensor | None,
) -> torch.Tensor:
    launcher = of_handle(handle)
    buffer, quick = launcher.buffer(), launcher.quick if load is None else None
    if quick is None or not quick.dispatch_recv(launcher.stream(), channel, buffer, num_sms):
        launcher.dispatch_recv(channel, buffer, num_sms, load)
    return buffer


def _dispatch(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    load: torch.Tensor | None,
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    count: torch.Tensor | None,
    layer: int = 0,
) -> torch.Tensor:
    launcher = of_handle(handle)
    buffer, stream = launcher.buffer(), launcher.stream()
    quick = launcher.quick if load is None else None
    batch = tokens, scales, ids, weights, count, layer
    if quick is None or quick.dispatch(stream, channel, *batch, buffer, num_sms) is None:
        launcher.dispatch(channel, Batch(*batch), buffer, num_sms, load)
    return buffer


def _landed(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heap_rows = of_handle(handle).heap_rows(channel)
    assert heap_rows is not None, "only in the indexed layout"
    contiguous = torch.contiguous_format
    tokens = heap_rows.tokens.clone(memory_format=contiguous)
    return tokens, heap_rows.scales.clone(memory_format=contiguous)


def _combine_send(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor, outputs: torch.Tensor
) -> None:
    launcher = of_handle(handle)
    quick, stream = launcher.quick, launcher.stream()
    if quick is None or not quick.combine_send(stream, channel, outputs, num_sms):
        launcher.combine_send(channel, outputs, num_sms)


def _combine_recv(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
    *added: torch.Tensor | None,
) -> torch.Tensor:
    launcher, more = of_handle(handle), _added(*added)
    combined, stream = launcher.combined(given), launcher.stream()
    quick = launcher.quick if more is NOTHING else None
    if quick is None or not quick.combine_recv(stream, channel, combined, count, given, num_sms):
        launcher.combine_recv(channel, given, count, combined, num_sms, more)
    return combined


def _combine(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    outputs: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
    *added: torch.Tensor | None,
) -> torch.Tensor:
    launcher, more = of_handle(handle), _added(*added)
    combined, stream = launcher.combined(given), launcher.stream()
    quick, rest = launcher.quick if more is NOTHING else None, (count, given, num_sms)
    if quick is None or not quick.combine(stream, channel, outputs, combined, *rest):
        launcher.combine(channel, outputs, given, count, combined, num_sms, more)
    return combined


def _added(
    bias_0: torch.Tensor | None, bias_1: torch.Tensor | None, base: torch.Tensor | None
) -> Added:
    if bias_0 is None and bias_1 is None and base is None:
        return NOTHING
    return bias_0, bias_1, base


def _release(handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor) -> None:
    of_handle(handle).release(channel)


def _nothing(*_: object) -> None:
    """Fake implementation for an operator without outputs."""


def _fake_buffer(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor, *_: object
) -> torch.Tensor:
    layout = of_handle(handle).layout
    return workspace.new_empty(layout.elements, dtype=layout.dtype)


def _fake_landed(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    launcher = of_handle(handle)
    config, rows = launcher.config, launcher.landing_rows
    tokens = workspace.new_empty((rows, config.hidden), dtype=getattr(torch, config.wire_dtype))
    if config.scales is None:
        return tokens, workspace.new_empty((0, 0), dtype=torch.float32)
    scale = getattr(torch, config.scales[0])
    return tokens, workspace.new_empty((rows, config.scale_columns), dtype=scale)


def _fake_combined(handle: int, workspace: torch.Tensor, given: int) -> torch.Tensor:
    config = of_handle(handle).config
    return workspace.new_empty((given, config.hidden), dtype=getattr(torch, config.output_dtype))


def _fake_combine_recv(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    given: int,
    *_: torch.Tensor | None,
) -> torch.Tensor:
    return _fake_combined(handle, workspace, given)


def _fake_combine(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    outputs: torch.Tensor,
    given: int,
    *_: torch.Tensor | None,
) -> torch.Tensor:
    return _fake_combined(handle, workspace, given)


def _define(
    name: str,
    schema: str,
    call: Callable[..., object],
    fake: Callable[..., object],
) -> Any:
    # Not `torch.library.custom_op`: it puts more Python around each call than the call itself is.
    _LIBRARY.define(
        f"{name}{schema}",
        # The native module takes rows as they are laid out when traced.
        tags=(torch.Tag.needs_exact_strides,),
    )
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, call, device)
    torch.library.register_fake(f"weft::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.weft, name).default


#: By name, without `weft::`.
OPERATORS: Final[dict[str, Any]] = {
    name: _define(name, schema, call, fake)
    for name, schema, call, fake in (
        ("moe_dispatch_send", f"({_CHANNEL}, {_BATCH}) -> ()", _dispatch_send, _nothing),
        ("moe_dispatch_recv", f"({_CHANNEL}, {_LOAD}) -> Tensor", _dispatch_recv, _fake_buffer),
        ("moe_dispatch", f"({_CHANNEL}, {_LOAD}, {_BATCH}) -> Tensor", _dispatch, _fake_buffer),
        ("moe_landed", f"({_CHANNEL}) -> (Tensor, Tensor)", _landed, _fake_landed),
        ("moe_combine_send", f"({_CHANNEL}, Tensor outputs) -> ()", _combine_send, _nothing),
        (
            "moe_combine_recv",
            f"({_CHANNEL}, {_SUMS}) -> Tensor",
            _combine_recv,
            _fake_combine_recv,
        ),
        (
            "moe_combine",
            f"({_CHANNEL}, Tensor outputs, {_SUMS}) -> Tensor",
            _combine,
            _fake_combine,
        ),
        ("moe_release", f"({_CHANNEL}) -> ()", _release, _nothing),
    )
}
