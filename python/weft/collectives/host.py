"""Collectives on CPU memory, over any provider, through the native module's C table.

The torch.distributed backend uses the same table (`weft/torch/shim/weft.h`); here ctypes calls it.
"""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NoReturn

from weft import _native
from weft.base.errors import (
    ClosedError,
    ConfigurationError,
    GroupPoisonedError,
    WaitTimeoutError,
    WeftError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.group.communicator import Communicator

__all__ = ["ELEMENTS", "HostCall", "HostCollectives"]

#: `weft.h` version.
ABI: Final = 2
#: Seconds to wait between two calls to `between`.
SLICE: Final = 0.05
#: Maximum error text length, in bytes.
TEXT: Final = 4096

#: Element names by number in `weft.h`; unsigned 16- to 64-bit types are missing.
ELEMENTS: Final = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
)
REDUCTIONS: Final = ("sum", "product", "min", "max", "and", "or", "xor")
OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
OK, TIMEOUT, LOST, INVALID, CLOSED = range(5)


class HostCall(NamedTuple):
    """A collective on host memory.

    Attributes:
        operation: operation name.
        element: one name from `ELEMENTS`; "uint8" in calls without arithmetic.
        elements: elements in the whole vector: the output for an all-gather, else the input.
        input: input address.
        output: output address. In an all-reduce it may be the input, in a broadcast it is.
        reduction: "sum", "product", "min", "max", "and", "or" or "xor".
        root: root for a broadcast.
    """

    operation: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    element: str
    elements: int
    input: int
    output: int
    reduction: str = "sum"
    root: int = 0


class _Call(ctypes.Structure):
    """`weft_call`."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("scale", ctypes.c_uint32),
        ("factor", ctypes.c_double),
        ("root", ctypes.c_uint32),
        ("elements", ctypes.c_uint64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


_POINTER: Final = ctypes.c_void_p
_NUMBER: Final = ctypes.POINTER(ctypes.c_uint64)
_RUN: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, ctypes.POINTER(_Call), ctypes.c_uint64, _NUMBER
)
_WAIT: Final = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32)
)
_LAST_ERROR: Final = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
_END: Final = ctypes.CFUNCTYPE(None, _POINTER)


class _Table(ctypes.Structure):
    """`weft_table`."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("start", _POINTER),
        ("run", _RUN),
        ("exchange", _POINTER),
        ("send", _POINTER),
        ("receive", _POINTER),
        ("is_done", _POINTER),
        ("wait", _WAIT),
        ("last_error", _LAST_ERROR),
        ("poison", _POINTER),
        ("end_waits", _END),
        ("close", _END),
        ("release", _END),
    )


class HostCollectives:
    """Collectives on the ranks' CPU memory, which reduce in rank order.

    All ranks make the same calls in the same order, from one thread at a time.

    Args:
        communicator: communicator over the ranks; `close` closes it as well.
        timeout: maximum seconds to wait for all ranks to construct theirs.
    """

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        table, context, _ = _native.collectives_table(communicator._native, timeout, (True, 1))
        self._communicator = communicator
        self._table = _Table.from_address(table)
        self._context: int | None = context
        if self._table.abi != ABI:
            raise ConfigurationError(
                f"the native module has version {self._table.abi} of weft.h: expected {ABI}; "
                "install both from one build"
            )

    def run(self, call: HostCall, timeout: float, between: Callable[[], object]) -> None:
        """Make a call and wait until it is done. Other threads run meanwhile.

        Args:
            call: memory in it stays valid until the call is done; after an error, until `close`.
            timeout: maximum seconds for the call.
            between: called several times a second; an exception from it ends the wait.

        Raises:
            WaitTimeoutError: other ranks did not come; the text names them.
            GroupPoisonedError: or a subclass: a rank was lost, or the group has ended.
            ConfigurationError: if the call is not supported.
            ClosedError: after `close`, and if `end_waits` is called meanwhile.
        """
        if self._context is None:
            raise ClosedError("the collectives were closed")
        described = _Call(
            kind=OPERATIONS.index(call.operation),
            element=ELEMENTS.index(call.element),
            reduction=REDUCTIONS.index(call.reduction),
            root=call.root,
            elements=call.elements,
            input=call.input,
            output=call.output,
        )
        number, sender, left = ctypes.c_uint64(), ctypes.c_uint32(), timeout
        step = min(SLICE, left)
        status = self._table.run(self._context, described, int(step * 1e9), number)
        while status == TIMEOUT:
            between()
            left -= step
            step = max(min(SLICE, left), 0.0)
            status = self._table.wait(self._context, number, int(step * 1e9), sender)
            if status == TIMEOUT and left <= 0:
                self._refuse_late(call, timeout)
        if status != OK:
            self._refuse(call, status)

    def end_waits(self) -> None:
        """End all threads' waits, now and later, with `ClosedError`."""
        if self._context is not None:
            self._table.end_waits(self._context)

    def close(self) -> None:
        """Leave the group and free all resources; no thread is in a call."""
        context, self._context = self._context, None
        if context is not None:
            end = self._table.release
            self._table.end_waits(context)
            self._table.close(context)
            # The table is freed with the context.
            end(context)
        self._communicator.close()

    def _text(self) -> str:
        text = ctypes.create_string_buffer(TEXT)
        self._table.last_error(text, TEXT)
        return text.value.decode(errors="replace")

    def _refuse_late(self, call: HostCall, timeout: float) -> NoReturn:
        text = self._text()
        late = WaitTimeoutError(f"{call.operation} between hosts: {text} after {timeout:g} s")
        found = re.findall(r"rank (\d+) raised (\d+) of (\d+)", text)
        late.missing = [(int(rank), int(expected), int(seen)) for rank, seen, expected in found]
        if late.missing:
            late.rank = late.missing[0][0]
        raise late

    def _refuse(self, call: HostCall, status: int) -> NoReturn:
        text = f"{call.operation} between hosts: {self._text()}"
        if status == LOST:
            # It has the loss's class and the rank number.
            self._communicator.check()
            raise GroupPoisonedError(text)
        if status == INVALID:
            raise ConfigurationError(text)
        if status == CLOSED:
            raise ClosedError(text)
        raise WeftError(text)
