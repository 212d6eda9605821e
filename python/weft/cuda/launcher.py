"""The native all-to-all of a device behind tensors: the one place that launches.

Every call checks addresses, allocates what it gives back, and puts one kernel on torch's current
stream. Shapes and dtypes have been checked by then.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weft.cuda.config import VECTOR
from weft.cuda.memory import Landed, address, landed
from weft.cuda.order import ChannelOrder
from weft.errors import ClosedError

if TYPE_CHECKING:
    from weft._native import DeviceAllToAll
    from weft.cuda.config import Config

__all__ = ["Arrived", "Batch", "Launcher", "of_handle"]


class Batch(NamedTuple):
    """What a rank sends: see `weft.cuda.AllToAll.dispatch_send`."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor | None
    #: How many of the tokens exist.
    existing: torch.Tensor | None


class Arrived(NamedTuple):
    """What a rank received: see `weft.cuda.Received`. `scales` is empty if there are none."""

    tokens: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor


class Launcher:
    """A native all-to-all, its device and its streams."""

    def __init__(
        self, native: DeviceAllToAll, config: Config, device: torch.device, ranks: int
    ) -> None:
        self.native, self.config, self.device = native, config, device
        self.positions = native.positions
        begin, end = native.local_experts
        self.local_experts = end - begin
        #: Rows that can land: each rank's tokens have a place here.
        self.landing_rows = ranks * config.max_tokens
        #: The most experts of any rank, for which kernels write counts.
        self._counted = -(-config.experts // ranks)
        self._landed: list[Landed] = []
        if config.layout == "indexed":
            # Made here, since the first call may be one that is captured.
            places = map(native.received, range(config.buffers))
            self._landed = [landed(config, device, place, native) for place in places]
        self._no_scales = torch.empty((0, 0), device=device)
        self._order = [ChannelOrder(_is_capturing) for _ in range(config.buffers)]
        #: Threaded through all operators as if they changed it, so that compilers keep their order.
        self.workspace = torch.zeros(4, dtype=torch.int32, device=device)
        if device.type == "cuda":
            # Else torch.compile(mode="reduce-overhead") makes no graph of what changes it.
            torch._dynamo.mark_static_address(self.workspace)
        #: Compiled code may be kept on disk, by what its operators were given: a handle is that of
        #: another shape only if 31 bits of a hash agree.
        shape = config.digest(self.positions, self.local_experts, ranks, device.type)
        self.handle = next(
            handle
            for serial in itertools.count()
            if (handle := shape << 20 | serial) not in _LAUNCHERS
        )
        _LAUNCHERS[self.handle] = self

    def dispatch_send(self, channel: int, batch: Batch, num_sms: int | None = None) -> None:
        """Launch the send half of dispatch."""
        given = self._inputs(batch)
        stream = self._stream(channel)
        self.native.dispatch_send(stream, channel, *given, len(batch.tokens), num_sms=num_sms)

    def dispatch_recv(self, channel: int, num_sms: int | None = None) -> Arrived:
        """Launch its receive half."""
        arrived = self._outputs(channel)
        stream, to = self._stream(channel), self._addresses(arrived)
        self.native.dispatch_recv(stream, channel, *to, num_sms=num_sms)
        return self._local(arrived)

    def dispatch(self, channel: int, batch: Batch, num_sms: int | None = None) -> Arrived:
        """Launch both as one kernel."""
        given, arrived = self._inputs(batch), self._outputs(channel)
        stream, to = self._stream(channel), self._addresses(arrived)
        rows = len(batch.tokens)
        self.native.dispatch(stream, channel, *given, rows, *to, num_sms=num_sms)
        return self._local(arrived)

    def combine_send(self, channel: int, outputs: torch.Tensor, num_sms: int | None = None) -> None:
        """Launch the send half of combine."""
        given = self._address(outputs, "outputs", VECTOR)
        self.native.combine_send(self._stream(channel), channel, given, False, num_sms=num_sms)

    def combine_recv(
        self,
        channel: int,
        given: int,
        count: torch.Tensor | None,
        out: torch.Tensor | None = None,
        num_sms: int | None = None,
    ) -> torch.Tensor:
        """Launch its receive half."""
        out = self._combined(given) if out is None else out
        into, number = self._address(out, "out", VECTOR), self._count(count)
        stream = self._stream(channel)
        self.native.combine_recv(stream, channel, into, number, given, False, num_sms=num_sms)
        return out

    def combine(
        self,
        channel: int,
        outputs: torch.Tensor,
        given: int,
        count: torch.Tensor | None,
        out: torch.Tensor | None = None,
        num_sms: int | None = None,
    ) -> torch.Tensor:
        """Launch both as one kernel."""
        out = self._combined(given) if out is None else out
        rows, into = self._address(outputs, "outputs", VECTOR), self._address(out, "out", VECTOR)
        stream, number = self._stream(channel), self._count(count)
        self.native.combine(stream, channel, rows, into, number, given, False, num_sms=num_sms)
        return out

    def release(self, channel: int) -> None:
        """Launch, in place of combine, what tells the peers that there are no answers."""
        self.native.combine(self._stream(channel), channel, 0, 0, 0, 0, True)

    def end(self) -> None:
        """Forget it: compiled code that still names it is told so."""
        _LAUNCHERS.pop(self.handle, None)
        self._landed = []

    def _inputs(self, batch: Batch) -> tuple[int, int, int, int, int]:
        tokens, scales, ids, weights, existing = batch
        return (
            self._address(tokens, "tokens", VECTOR),
            0 if scales is None else self._address(scales, "scales"),
            self._address(ids, "ids"),
            0 if weights is None else self._address(weights, "weights"),
            self._count(existing),
        )

    def _count(self, count: torch.Tensor | None) -> int:
        return 0 if count is None else self._address(count, "count")

    def _address(self, tensor: torch.Tensor, what: str, alignment: int = 1) -> int:
        # An empty tensor has no address, which would read as "not given".
        return address(tensor, what, alignment) or int(self.workspace.data_ptr())

    def _outputs(self, channel: int) -> Arrived:
        config, device, positions = self.config, self.device, self.positions
        if config.layout == "indexed":
            tokens, scales = self._landed[channel]
        else:
            tokens, scales = self._rows(positions)
        return Arrived(
            tokens,
            scales,
            torch.empty(self._counted, dtype=torch.int32, device=device),
            torch.empty(self._counted + 1, dtype=torch.int32, device=device),
            torch.empty(positions, dtype=torch.int32, device=device),
            torch.empty(positions, dtype=torch.float32, device=device),
        )

    def _rows(self, rows: int) -> Landed:
        """Room for tokens as they are received, and for their scales."""
        config, device = self.config, self.device
        wire = getattr(torch, config.wire_dtype)
        tokens = torch.empty((rows, config.hidden), dtype=wire, device=device)
        if config.scales is None:
            return Landed(tokens, self._no_scales)
        scale = getattr(torch, config.scales[0])
        scales = torch.empty((rows, config.scale_columns), dtype=scale, device=device)
        return Landed(tokens, scales)

    def _addresses(self, arrived: Arrived) -> tuple[int, ...]:
        """What kernels write to; landed rows stay where they are."""
        stay = self.config.layout == "indexed"
        return (
            0 if stay else arrived.tokens.data_ptr(),
            0 if stay or not self.config.scales else arrived.scales.data_ptr(),
            *(tensor.data_ptr() for tensor in arrived[2:]),
        )

    def _local(self, arrived: Arrived) -> Arrived:
        """Without the counts of experts that only other ranks have as many of."""
        if self.local_experts == self._counted:
            return arrived
        counts = arrived.counts[: self.local_experts]
        return arrived._replace(counts=counts, offsets=arrived.offsets[: self.local_experts + 1])

    def _combined(self, given: int) -> torch.Tensor:
        dtype = getattr(torch, self.config.output_dtype)
        return torch.empty((given, self.config.hidden), dtype=dtype, device=self.device)

    def _stream(self, channel: int) -> int:
        """The current stream, behind the channel's last call."""
        if self.device.type != "cuda":
            return 0
        stream = torch.cuda.current_stream(self.device)
        capturing = None
        if self.device.index == torch.cuda.current_device():
            capturing = torch.cuda.is_current_stream_capturing()
        self._order[channel].follow(stream, capturing)
        return int(stream.cuda_stream)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


_LAUNCHERS: Final[weakref.WeakValueDictionary[int, Launcher]] = weakref.WeakValueDictionary()


def of_handle(handle: int) -> Launcher:
    """The launcher that an operator means.

    Raises:
        ClosedError: if there is none any more.
    """
    launcher = _LAUNCHERS.get(int(handle))
    if launcher is None:
        raise ClosedError("the all-to-all of this compiled code was closed: compile it anew")
    return launcher
