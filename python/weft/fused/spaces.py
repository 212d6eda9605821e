"""Spaces: a fused operator's symmetric memory and state, for each communicator and device.

An operator's first call makes the space, on all ranks together, and so does the first call that
needs more than it has. Former spaces are kept for the graphs that use them.
"""

from __future__ import annotations

import weakref
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft import _native
from weft.base.errors import ConfigurationError, ConfigurationMismatchError
from weft.base.timeout import seconds
from weft.fused.kernels.agreement import TABLE_WORDS
from weft.fused.kernels.rounds import STATE_WORDS
from weft.gpu import symmetric
from weft.gpu.lazy import symmetric_empty
from weft.gpu.order import ChannelOrder
from weft.gpu.streams import is_capturing
from weft.triton.contexts import context

if TYPE_CHECKING:
    from weft.group.communicator import Communicator

__all__ = ["Agreed", "Space", "drop", "launch", "programs_of", "set_timeout", "space", "timeout"]

#: Alignment for a space's data in bytes: an L2 line.
_LINE: Final = 128
#: Bytes for the digests from all ranks.
_AGREEMENT: Final = 8 * TABLE_WORDS
#: Cache of digests by arguments.
_DIGESTS: Final[dict[str, int]] = {}
_MOST_DIGESTS: Final = 1 << 16
#: Programs in a kernel on the CPU, where they run one after another.
_TWIN_PROGRAMS: Final = 3


class Space:
    """Memory for an operator.

    Attributes:
        words: int32, symmetric, zero at first: flags that peers raise.
        agreement: int64, symmetric, zero at first: argument digests from all ranks.
        data: uint8, symmetric, aligned to 128 bytes: inboxes.
        context: for `words` and `data`, used by the functions in `weft.triton`.
        state: int32 in this device's memory, zero at first; `weft.fused.kernels.rounds` uses the
            first `STATE_WORDS`.
        rank, ranks: this rank, and the communicator's size.
    """

    def __init__(
        self, group: Communicator, device: torch.device, sizes: _Sizes, order: ChannelOrder
    ) -> None:
        head = -(-sizes.words * 4 // _LINE) * _LINE
        name: object = "twin" if device.type == "cpu" else device
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            total = head + _AGREEMENT + sizes.data
            block = symmetric_empty(total, torch.uint8, device=name, communicator=group)
            self.words = block[: sizes.words * 4].view(torch.int32)
            self.agreement = block[head : head + _AGREEMENT].view(torch.int64)
            self.data = block[head + _AGREEMENT :]
        self.sizes = sizes
        self.context = context(block, timeout=_TIMEOUT[0])
        self.state = torch.zeros(sizes.state, dtype=torch.int32, device=device)
        self.rank, self.ranks = group.rank, group.world_size
        self._owner = symmetric.owner(block)
        self._order = order

    def check(self) -> None:
        """Raise what the device recorded.

        Raises:
            ConfigurationMismatchError, WaitTimeoutError, PeerLostError: an earlier call failed.
        """
        self._owner.check()

    def enter(self) -> None:
        """Begin a call: raise what the device recorded, order this stream after the last call's.

        Raises:
            ConfigurationMismatchError, WaitTimeoutError, PeerLostError: an earlier call failed.
        """
        self._owner.check()
        device = self.words.device
        if device.type == "cuda":
            self._order.follow(torch.cuda.current_stream(device))

    def agreed(self, arguments: str) -> Agreed:
        """Kernel arguments to compare a call's arguments on all ranks.

        Args:
            arguments: operator, and everything that ranks must agree on, in words for the error.
        """
        if self.ranks == 1:
            return Agreed(None, 0)
        digest = _DIGESTS.get(arguments)
        if digest is None:
            # Positive, so that it is int32 in each launch.
            digest = zlib.crc32(arguments.encode()) & 0x7FFFFFFF
            if len(_DIGESTS) < _MOST_DIGESTS:
                _DIGESTS[arguments] = digest
            _native.describe_arguments(digest, arguments)
        return Agreed(self.agreement, digest)


class Agreed(NamedTuple):
    """Kernel arguments for `weft.fused.kernels.agreement`.

    Attributes:
        agreement: digests from all ranks; None on one rank, where nothing is compared.
        digest: this rank's digest.
    """

    agreement: torch.Tensor | None
    digest: int


class _Sizes(NamedTuple):
    words: int
    data: int
    state: int

    def cover(self, other: _Sizes) -> bool:
        return all(own >= its for own, its in zip(self, other, strict=True))


#: Time limit in seconds for waits in kernels, for spaces made from now on.
_TIMEOUT: Final = [30.0]
#: By communicator and device: kernels from all operators are serialized, since two that wait for
#: peers may not fit on a GPU at once.
_ORDERS: Final[weakref.WeakKeyDictionary[Communicator, dict[torch.device, ChannelOrder]]] = (
    weakref.WeakKeyDictionary()
)
#: By communicator: the current spaces, and those that were too small.
_SPACES: Final[weakref.WeakKeyDictionary[Communicator, dict[tuple[str, torch.device], Space]]] = (
    weakref.WeakKeyDictionary()
)
_FORMER: Final[weakref.WeakKeyDictionary[Communicator, list[tuple[str, Space]]]] = (
    weakref.WeakKeyDictionary()
)


def set_timeout(timeout: float) -> None:
    """Set the time limit for waits in fused kernels, for operators first called after this.

    For example, `set_timeout(300)` lets a slow rank compile. A domain uses the longest limit that
    any user has set, so a later call never shortens it.

    Args:
        timeout: in seconds (default 30); equal on all ranks.
    """
    _TIMEOUT[0] = seconds(timeout)


def timeout() -> float:
    """Time limit in seconds for waits in kernels that are made from now on."""
    return _TIMEOUT[0]


def space(
    operator: str,
    device: torch.device,
    communicator: Communicator | None = None,
    *,
    words: int,
    data: int,
    state: int = STATE_WORDS,
) -> Space:
    """An operator's space, which all ranks make together if it is missing or too small.

    Args:
        operator: name.
        device: the call's tensors: a GPU, or the CPU as the twin.
        communicator: group that shares the space; by default the only one that is open.
        words: minimum number of flags, equal on all ranks.
        data: minimum data size in bytes, equal on all ranks.
        state: number of int32 in the state.

    Raises:
        ConfigurationError: if the space must be made while a CUDA graph is captured, or no
            communicator is given and not exactly one is open.
        ConfigurationMismatchError: if ranks need different sizes.
        NoRouteError: if ranks are on several hosts.
    """
    group = symmetric.only_open() if communicator is None else communicator
    spaces = _SPACES.setdefault(group, {})
    found = spaces.get((operator, device))
    needed = _Sizes(words, data, state)
    if found is not None and found.sizes.cover(needed):
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigurationError(
            f"weft.fused.{operator}: memory for these shapes has to be made, which a capture does "
            "not allow; make the same call once before the capture"
        )
    if found is not None:
        _FORMER.setdefault(group, []).append((operator, found))
        needed = _Sizes(*(max(pair) for pair in zip(found.sizes, needed, strict=True)))
    # Powers of two, so that few sizes are made as shapes grow.
    data = 1 << max(needed.data - 1, 0).bit_length()
    words = 1 << max(needed.words - 1, 0).bit_length()
    orders = _ORDERS.setdefault(group, {})
    order = orders.setdefault(device, ChannelOrder(is_capturing))
    try:
        made = Space(group, device, _Sizes(words, data, needed.state), order)
    except ConfigurationMismatchError as error:
        mismatch = ConfigurationMismatchError(
            f"weft.fused.{operator}: {error}; pass equal shapes, dtypes and options"
        )
        mismatch.rank = error.rank
        raise mismatch from None
    spaces[operator, device] = made
    return made


def drop(operator: str, communicator: Communicator) -> None:
    """Drop an operator's spaces; kernels and graphs have ended on all ranks.

    Args:
        operator: name; a later call makes a new space.
        communicator: group that shares the spaces.
    """
    spaces = _SPACES.get(communicator, {})
    for key in [key for key in spaces if key[0] == operator]:
        del spaces[key]
    former = _FORMER.get(communicator, [])
    former[:] = [(name, each) for name, each in former if name != operator]


def launch(
    kernel: Any, programs: int, device: torch.device, *values: object, **constants: object
) -> None:
    """Launch a kernel on a device's current stream."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](*values, **constants)
    else:
        kernel[(programs,)](*values, **constants)


@cache
def programs_of(device: torch.device) -> int:
    """Number of programs, one for each SM on a GPU; a few on the CPU."""
    if device.type == "cpu":
        return _TWIN_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
