"""The calls of an all-to-all as operators of torch, which compilers trace through.

`weft::moe_dispatch_send`, `weft::moe_dispatch_recv`, `weft::moe_combine_send`,
`weft::moe_combine_recv`, both halves at once as `weft::moe_dispatch` and `weft::moe_combine`, and
`weft::moe_release`. `weft.cuda.AllToAll` calls them in code that is being compiled, and what they
stand for otherwise.

An all-to-all is named by `Launcher.handle`. Its workspace is declared to be changed by each
operator, which keeps them in order and keeps those without outputs; nothing reads it. Outputs are
fresh, so received tokens of the indexed layout are copied out of the heap: a compiler may write to
what it takes for its own, and rows of the heap belong to peers again once combine was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from weft.cuda.launcher import Arrived, Batch, of_handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.cuda.config import Config

__all__ = ["OPERATORS"]

_CHANNEL = "SymInt handle, SymInt channel, SymInt? num_sms, Tensor(a!) workspace"
_BATCH = "Tensor tokens, Tensor? scales, Tensor ids, Tensor? weights, Tensor? count"
_ARRIVED = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _dispatch_send(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    *batch: torch.Tensor | None,
) -> None:
    of_handle(handle).dispatch_send(channel, Batch(*batch), num_sms)


def _dispatch_recv(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor
) -> Arrived:
    launcher = of_handle(handle)
    return _owned(launcher.config, launcher.dispatch_recv(channel, num_sms))


def _dispatch(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    *batch: torch.Tensor | None,
) -> Arrived:
    launcher = of_handle(handle)
    return _owned(launcher.config, launcher.dispatch(channel, Batch(*batch), num_sms))


def _combine_send(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor, outputs: torch.Tensor
) -> None:
    of_handle(handle).combine_send(channel, outputs, num_sms)


def _combine_recv(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
) -> torch.Tensor:
    return of_handle(handle).combine_recv(channel, given, count, num_sms=num_sms)


def _combine(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    outputs: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
) -> torch.Tensor:
    return of_handle(handle).combine(channel, outputs, given, count, num_sms=num_sms)


def _release(handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor) -> None:
    of_handle(handle).release(channel)


def _owned(config: Config, arrived: Arrived) -> Arrived:
    """Without views of the heap, and without what several calls share."""
    contiguous = torch.contiguous_format
    if config.layout == "indexed":
        arrived = arrived._replace(tokens=arrived.tokens.clone(memory_format=contiguous))
    if config.layout == "indexed" or config.scales is None:
        arrived = arrived._replace(scales=arrived.scales.clone(memory_format=contiguous))
    return arrived


def _nothing(*_: object) -> None:
    """What an operator without outputs gives."""


def _fake_arrived(
    handle: int, channel: int, num_sms: int | None, workspace: torch.Tensor, *_: object
) -> Arrived:
    launcher = of_handle(handle)
    config, experts, positions = launcher.config, launcher.local_experts, launcher.positions
    rows = launcher.landing_rows if config.layout == "indexed" else positions
    wire = getattr(torch, config.wire_dtype)
    scale = getattr(torch, config.scales[0]) if config.scales else torch.float32
    scales = (rows, config.scale_columns) if config.scales else (0, 0)
    return Arrived(
        workspace.new_empty((rows, config.hidden), dtype=wire),
        workspace.new_empty(scales, dtype=scale),
        workspace.new_empty(experts),
        workspace.new_empty(experts + 1),
        workspace.new_empty(positions),
        workspace.new_empty(positions, dtype=torch.float32),
    )


def _fake_combined(handle: int, workspace: torch.Tensor, given: int) -> torch.Tensor:
    config = of_handle(handle).config
    return workspace.new_empty((given, config.hidden), dtype=getattr(torch, config.output_dtype))


def _fake_combine_recv(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
) -> torch.Tensor:
    return _fake_combined(handle, workspace, given)


def _fake_combine(
    handle: int,
    channel: int,
    num_sms: int | None,
    workspace: torch.Tensor,
    outputs: torch.Tensor,
    given: int,
    count: torch.Tensor | None,
) -> torch.Tensor:
    return _fake_combined(handle, workspace, given)


def _define(
    name: str,
    schema: str,
    call: Callable[..., object],
    fake: Callable[..., object],
) -> Any:
    operator = torch.library.custom_op(
        f"weft::{name}",
        call,
        mutates_args=("workspace",),
        schema=schema,
        # The native module takes rows as they are laid out when traced.
        tags=(torch.Tag.needs_exact_strides,),
    )
    operator.register_fake(fake)
    return operator


#: By name, without `weft::`.
OPERATORS: Final[dict[str, Any]] = {
    name: _define(name, schema, call, fake)
    for name, schema, call, fake in (
        ("moe_dispatch_send", f"({_CHANNEL}, {_BATCH}) -> ()", _dispatch_send, _nothing),
        ("moe_dispatch_recv", f"({_CHANNEL}) -> {_ARRIVED}", _dispatch_recv, _fake_arrived),
        ("moe_dispatch", f"({_CHANNEL}, {_BATCH}) -> {_ARRIVED}", _dispatch, _fake_arrived),
        ("moe_combine_send", f"({_CHANNEL}, Tensor outputs) -> ()", _combine_send, _nothing),
        (
            "moe_combine_recv",
            f"({_CHANNEL}, SymInt given, Tensor? count) -> Tensor",
            _combine_recv,
            _fake_combine_recv,
        ),
        (
            "moe_combine",
            f"({_CHANNEL}, Tensor outputs, SymInt given, Tensor? count) -> Tensor",
            _combine,
            _fake_combine,
        ),
        ("moe_release", f"({_CHANNEL}) -> ()", _release, _nothing),
    )
}
