"""Launcher: all launches from tensors for a device all-to-all.

There are two ways to launch. `Launcher.quick` checks a call's tensors and launches in native code;
it returns `None` or `False`, without a launch, if a tensor does not fit or the channel's streams
have to be ordered. The methods in `Launcher` order the streams and launch, given tensors whose
shapes and dtypes have been checked; they take more time.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from weft import _native
from weft.base.errors import ClosedError
from weft.gpu.memory import address, allocator
from weft.gpu.order import ChannelOrder
from weft.gpu.streams import is_capturing
from weft.moe.device.config import VECTOR
from weft.moe.device.outputs import OutputLayout, Outputs
from weft.moe.device.rows import HeapRows, heap_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft._native import DeviceAllToAll, DeviceCalls
    from weft.moe.device.config import Config

__all__ = ["NOTHING", "Added", "Batch", "Launcher", "of_handle"]


class Batch(NamedTuple):
    """Tensors for a dispatch: see `weft.cuda.AllToAll.dispatch_send`."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    #: None in a round with a handle's plan.
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    #: Number of existing tokens.
    existing: torch.Tensor | None
    #: Layer whose placement applies.
    layer: int = 0


#: Rows that combine adds to the sums, in this order.
Added: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NOTHING: Final[Added] = (None, None, None)


class Launcher:
    """A native all-to-all, with device and streams."""

    def __init__(
        self, native: DeviceAllToAll, config: Config, device: torch.device, ranks: int
    ) -> None:
        self.native, self.config, self.device = native, config, device
        self.positions = native.positions
        begin, end = native.local_experts
        #: Rows in the landing area: one for each token on each rank.
        self.landing_rows = ranks * config.max_tokens
        counted = native.most_local_experts
        #: Layout for dispatch outputs.
        self.layout = OutputLayout.of(config, device, self.positions, end - begin, counted, ranks)
        self._heap_rows: list[HeapRows] = []
        if config.layout == "indexed":
            # Made here, since the first call may be captured.
            places = map(native.received, range(config.channels))
            self._heap_rows = [heap_rows(config, device, place, native) for place in places]
        self._order = [ChannelOrder(is_capturing) for _ in range(config.channels)]
        #: Declared as changed by all operators, so that compilers keep the order.
        self.workspace = torch.zeros(4, dtype=torch.int32, device=device)
        self._empty = allocator(device)
        self._combined = getattr(torch, config.output_dtype)
        on_gpu = device.type == "cuda"
        if on_gpu:
            # Else torch.compile(mode="reduce-overhead") makes no graph of operators that change it.
            torch._dynamo.mark_static_address(self.workspace)
        #: The device's current stream, as a CUDA handle.
        self.stream: Callable[[], int] = _no_stream
        if on_gpu:
            self.stream = partial(torch._C._cuda_getCurrentRawStream, device.index)
        #: `None` if this version of torch lacks DLPack's C functions.
        self.quick: DeviceCalls | None = _native.DeviceCalls.of(
            native, torch.Tensor, device.index if on_gpu else None, self.layout.places
        )
        #: Compiled code may be cached on disk, by operator arguments: a handle names another shape
        #: only if 31 hash bits agree.
        experts = end - begin, counted
        shape = config.digest(self.positions, experts, ranks, device.type)
        self.handle = next(
            handle
            for serial in itertools.count()
            if (handle := shape << 20 | serial) not in _LAUNCHERS
        )
        self._known = _LAUNCHERS[self.handle] = weakref.ref(self, partial(_forget, self.handle))

    def buffer(self) -> torch.Tensor:
        """Memory for dispatch outputs."""
        layout = self.layout
        return self._empty((layout.elements,), (1,), layout.dtype)

    def outputs(self) -> Outputs:
        """Memory for dispatch outputs, with views."""
        return Outputs(self.layout, self.buffer())

    def combined(self, given: int) -> torch.Tensor:
        """Memory for the combine result of `given` tokens."""
        hidden = self.config.hidden
        return self._empty((given, hidden), (hidden, 1), self._combined)

    def heap_rows(self, channel: int) -> HeapRows | None:
        """A channel's received rows in the heap, in the indexed layout."""
        return self._heap_rows[channel] if self._heap_rows else None

    def dispatch_send(self, channel: int, batch: Batch, num_sms: int | None = None) -> None:
        """Launch the dispatch send half."""
        given = self._inputs(batch)
        stream = self._stream(channel)
        rows, layer = len(batch.tokens), batch.layer
        self.native.dispatch_send(stream, channel, *given, rows, num_sms=num_sms, layer=layer)

    def dispatch_recv(
        self,
        channel: int,
        buffer: torch.Tensor,
        num_sms: int | None = None,
        load: torch.Tensor | None = None,
    ) -> None:
        """Launch the dispatch receive half."""
        to, experts = self._outputs(buffer)
        more, stream = self._load(load), self._stream(channel)
        self.native.dispatch_recv(stream, channel, *to, experts=experts, num_sms=num_sms, **more)

    def dispatch(
        self,
        channel: int,
        batch: Batch,
        buffer: torch.Tensor,
        num_sms: int | None = None,
        load: torch.Tensor | None = None,
    ) -> None:
        """Launch both dispatch halves as one kernel."""
        more = self._load(load) | {"layer": batch.layer}
        given, (to, experts) = self._inputs(batch), self._outputs(buffer)
        stream, rows = self._stream(channel), len(batch.tokens)
        self.native.dispatch(
            stream, channel, *given, rows, *to, out_experts=experts, num_sms=num_sms, **more
        )

    def combine_send(
        self, channel: int, outputs: torch.Tensor, num_sms: int | None = None, **site: Any
    ) -> None:
        """Launch the combine send half."""
        given = self._address(outputs, "outputs", VECTOR)
        site |= {"num_sms": num_sms, "positions": len(outputs)}
        self.native.combine_send(self._stream(channel), channel, given, False, **site)

    def combine_recv(
        self,
        channel: int,
        given: int,
        count: torch.Tensor | None,
        out: torch.Tensor,
        num_sms: int | None = None,
        added: Added = NOTHING,
        **site: Any,
    ) -> None:
        """Launch the combine receive half."""
        into, number = self._address(out, "out", VECTOR), self._count(count)
        more, stream = self._added(added), self._stream(channel)
        site |= {"added": more, "num_sms": num_sms}
        self.native.combine_recv(stream, channel, into, number, given, False, **site)

    def combine(
        self,
        channel: int,
        outputs: torch.Tensor,
        given: int,
        count: torch.Tensor | None,
        out: torch.Tensor,
        num_sms: int | None = None,
        added: Added = NOTHING,
        **site: Any,
    ) -> None:
        """Launch both combine halves as one kernel."""
        rows, into = self._address(outputs, "outputs", VECTOR), self._address(out, "out", VECTOR)
        more, number = self._added(added), self._count(count)
        stream = self._stream(channel)
        site |= {"added": more, "num_sms": num_sms, "positions": len(outputs)}
        self.native.combine(stream, channel, rows, into, number, given, False, **site)

    def release(self, channel: int) -> None:
        """Launch a release for a round without replies, in place of combine."""
        self.native.combine(self._stream(channel), channel, 0, 0, 0, 0, True)

    def end(self) -> None:
        """Drop the handle: compiled code that still names it raises `ClosedError`."""
        _forget(self.handle, self._known)
        self._heap_rows = []

    def _inputs(self, batch: Batch) -> tuple[int, int, int, int, int]:
        tokens, scales, ids, weights, existing, _ = batch
        return (
            self._address(tokens, "tokens", VECTOR),
            0 if scales is None else self._address(scales, "scales"),
            0 if ids is None else self._address(ids, "ids"),
            0 if weights is None else self._address(weights, "weights"),
            self._count(existing),
        )

    def _load(self, load: torch.Tensor | None) -> dict[str, Any]:
        if load is None:
            return {}
        return {"load": self._address(load, "expert_load"), "load_bytes": load.itemsize}

    def _added(self, added: Added) -> tuple[int, int, int]:
        first, second, last = (
            0 if rows is None else self._address(rows, what, VECTOR)
            for rows, what in zip(added, ("bias", "bias", "out"), strict=True)
        )
        return first, second, last

    def _count(self, count: torch.Tensor | None) -> int:
        return 0 if count is None else self._address(count, "count")

    def _address(self, tensor: torch.Tensor, what: str, alignment: int = 1) -> int:
        # An empty tensor has no address, which would read as "not given".
        return address(tensor, what, alignment) or int(self.workspace.data_ptr())

    def _outputs(self, buffer: torch.Tensor) -> tuple[list[int], int]:
        """Addresses for the native module to write to; received rows may stay in the heap.

        The last address receives each row's expert.
        """
        begin: Any = buffer.data_ptr()
        names = ("tokens", "scales", "counts", "offsets", "rows", "weights", "experts")
        places = map(self.layout.places.get, names)
        *to, experts = (0 if place is None else begin + place for place in places)
        return to, experts

    def _stream(self, channel: int) -> int:
        """The current stream, behind the channel's last call."""
        if self.device.type != "cuda":
            return 0
        if self.quick is not None and self.quick.follows(channel, handle := self.stream()):
            return handle
        stream = torch.cuda.current_stream(self.device)
        if self.device.index == torch.cuda.current_device():
            capturing = torch.cuda.is_current_stream_capturing()
        else:
            capturing = is_capturing(stream)
        self._order[channel].follow(stream, capturing)
        handle = int(stream.cuda_stream)
        if self.quick is not None:
            self.quick.follow(channel, handle, capturing)
        return handle


def _no_stream() -> int:
    """Stream for a twin."""
    return 0


#: Not a `WeakValueDictionary`, whose look-ups take longer.
_LAUNCHERS: Final[dict[int, weakref.ref[Launcher]]] = {}


def _forget(handle: int, known: weakref.ref[Launcher]) -> None:
    # A later launcher may have the number.
    if _LAUNCHERS.get(handle) is known:
        del _LAUNCHERS[handle]


def of_handle(handle: int) -> Launcher:
    """Launcher for an operator's handle.

    Raises:
        ClosedError: if it was closed.
    """
    known = _LAUNCHERS.get(int(handle))
    launcher = None if known is None else known()
    if launcher is None:
        raise ClosedError("the all-to-all of this compiled code was closed: compile it anew")
    return launcher
