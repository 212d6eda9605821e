"""Device all-to-all state: data that rounds share, and closing."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from weft.base.errors import ClosedError, ConfigurationError
from weft.base.timeout import seconds
from weft.gpu.errors import ON_DEVICES
from weft.gpu.watchdog import Watchdog
from weft.moe import base
from weft.moe.device.checks import ArgumentChecks
from weft.moe.device.launcher import Launcher
from weft.moe.device.operators import OPERATORS
from weft.moe.placement import by_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft._native import DeviceAllToAll, DeviceCalls
    from weft.moe.device.config import Config
    from weft.moe.device.outputs import Outputs
    from weft.moe.placement import Placement

__all__ = ["Base"]


class Base(base.AllToAll):
    """Device all-to-all, below the calls in `weft.cuda.AllToAll`."""

    _native: DeviceAllToAll  # type: ignore[assignment]

    def _begin(
        self,
        native: DeviceAllToAll,
        config: Config,
        place: torch.device,
        ranks: tuple[int, int],
        layers: tuple[Placement, ...],
        *,
        watchdog: bool,
    ) -> None:
        self._native = native
        #: This rank, and how many there are; a local group has no communicator to ask.
        self.rank, self.world_size = ranks
        #: Tensor device: the CPU for a twin.
        self.device = place
        # Among the ranks that a local group has on this device: see `communication_stream`.
        self._place = 0
        self.experts, self.top_k, self.hidden = config.experts, config.top_k, config.hidden
        self.max_tokens, self.layout = config.max_tokens, config.layout
        self.dtype, self.wire_dtype = config.token_dtype, config.wire_dtype
        #: Scale dtype and elements per block, if received tokens have scales.
        self.scales = config.scales
        self.combine_dtype, self.reply_dtype = config.combine_dtype, config.reply_dtype
        self.output_dtype, self.ids_dtype = config.output_dtype, config.ids_dtype
        self._config, self._weighting = config, config.weighting
        self._launcher = Launcher(native, config, place, self.world_size)
        self._experts_here = range(*native.local_experts)
        self._layers = list(layers)
        #: Maximum positions on a rank in one round.
        self.positions = self._launcher.positions
        local = len(self._experts_here)
        physical = sum(layers[0].slots) if layers else config.experts
        self._checks = ArgumentChecks(config, self._launcher, physical, local)
        #: Rows per expert in the padded layout.
        self.expert_capacity = self._checks.expert_capacity
        # Read in code that is being compiled, where the launcher would be inspected.
        self._handle, self._workspace = self._launcher.handle, self._launcher.workspace
        self._layout = self._launcher.layout
        self._busy = [False] * config.channels
        self._received = weakref.WeakSet()
        self._closed = False
        ON_DEVICES.add(self)
        self._watchdog = Watchdog(self) if watchdog else None

    @property
    def local_experts(self) -> range:
        """Experts that this rank owns; with a placement, physical expert numbers."""
        return self._experts_here

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placement for each layer; empty if each expert is held once."""
        return tuple(self._layers)

    def set_placement(
        self,
        placement: Placement | Sequence[Placement],
        *,
        layer: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Change which experts ranks hold; every rank calls this with the same arguments.

        Call it between rounds, the same rounds on all ranks; it waits until the rank's device is
        idle. Later rounds use the new placement, even in captured graphs, without a new compilation
        or capture. The program moves the experts' weights between the same two rounds. The call is
        not part of a graph, and must not run during a capture.

        Args:
            placement: for the layer, or one for each layer; with the same expert count per rank as
                before.
            layer: the layer to change, if there are several and only one changes.
            timeout: seconds to wait for all ranks to make the same call.

        Raises:
            ConfigurationMismatchError: if the ranks' arguments differ.
            ConfigurationError: if the placement has other experts, ranks or expert counts per rank,
                or there is no such layer.
            StageError: if a round is in flight, here or at a peer. In all these cases the placement
                is unchanged on every rank.
        """
        self._open()
        first = 0 if layer is None else layer
        given = by_layer(placement, self.experts, first=first)
        if layer is None and len(given) != len(self._layers):
            raise ConfigurationError(
                f"{len(given)} placements are given for {len(self._layers)} layers: give one for "
                "each, or pass layer="
            )
        changes = [(first + at, each.native) for at, each in enumerate(given)]
        self._native.set_placement(changes, seconds(timeout))
        self._layers[first : first + len(given)] = given

    @property
    def path(self) -> str:
        """Token transfer path: "packets", "latency" or "bandwidth"."""
        return self._native.path

    @property
    def num_sms(self) -> int:
        """SMs that a kernel takes."""
        return self._native.num_sms

    @property
    def build(self) -> dict[str, Any]:
        """Kernel build: `seconds`, and true in `cached` for a cache hit."""
        return self._native.build

    def empty_outputs(self) -> Outputs:
        """Memory for `out=` in dispatch: allocated once, for any number of consecutive rounds.

        A round dispatched to it overwrites the tensors received earlier: use one for each round in
        flight, and read the tensors before the next dispatch to it. All-to-alls with the same shape
        on one device may share it.
        """
        self._open()
        return self._launcher.outputs()

    def check(self) -> None:
        """Raise the error that the device recorded.

        Raises:
            WaitTimeoutError, PeerLostError, StageError: a wait on the device timed out, or launches
                came out of order; all outputs are NaN from this round on.
            ExpertError: a token named an expert that does not exist, or one twice.
            CapacityError: a rank received more than `max_positions` or `expert_capacity`. Both are
                for rounds that are over, and cleared once raised.
        """
        self._open()
        if self._watchdog is not None:
            self._watchdog.raise_noticed()
        self._native.check()

    def _quick(self) -> DeviceCalls | None:
        """Calls that check and launch in native code; none in code that is being compiled."""
        return None if torch.compiler.is_compiling() else self._launcher.quick

    def _operate(self, name: str, channel: int, num_sms: int | None, *arguments: Any) -> Any:
        """Call an operator, in code that is being compiled."""
        return OPERATORS[name](self._handle, channel, num_sms, self._workspace, *arguments)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the all-to-all was closed")

    def _end(self) -> None:
        super()._end()
        ON_DEVICES.discard(self)
        if self._watchdog is not None:
            self._watchdog.stop()
        self._launcher.end()
