"""Spaces: symmetric memory and state of a fused operator, one for each communicator and device.

A space is made by the first call of an operator, on all ranks together, and by the first call that
needs more than it has. Former spaces are kept for the graphs that use them.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft._symmetric import symmetric_empty
from weft._timeout import seconds
from weft.cuda import symmetric
from weft.cuda.launcher import _is_capturing
from weft.cuda.order import ChannelOrder
from weft.errors import ConfigurationError
from weft.fused.kernels.rounds import STATE_WORDS
from weft.triton.contexts import context

if TYPE_CHECKING:
    from weft.communicator import Communicator

__all__ = ["Space", "drop", "launch", "programs_of", "set_timeout", "space", "timeout"]

#: Bytes to whose multiples the data of a space are aligned: a line of the L2.
_LINE: Final = 128
#: Programs of a kernel on the CPU, where they run one after another.
_TWIN_PROGRAMS: Final = 3


class Space:
    """Memory of an operator.

    Attributes:
        words: int32, symmetric, zero at first: flags that peers raise.
        data: uint8, symmetric, aligned to 128 bytes: inboxes.
        context: of `words` and `data`, for the functions of `weft.triton`.
        state: int32 in memory of this device, zero at first; the first `STATE_WORDS` are those of
            `weft.fused.kernels.rounds`.
        rank, ranks: of the communicator.
    """

    def __init__(
        self, group: Communicator, device: torch.device, sizes: _Sizes, order: ChannelOrder
    ) -> None:
        head = -(-sizes.words * 4 // _LINE) * _LINE
        name: object = "twin" if device.type == "cpu" else device
        # Tensors of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            block = symmetric_empty(head + sizes.data, torch.uint8, device=name, communicator=group)
            self.words = block[: sizes.words * 4].view(torch.int32)
            self.data = block[head:]
        self.sizes = sizes
        self.context = context(block, timeout=_TIMEOUT[0])
        self.state = torch.zeros(sizes.state, dtype=torch.int32, device=device)
        self.rank, self.ranks = group.rank, group.world_size
        self._owner = symmetric.owner(block)
        self._order = order

    def enter(self) -> None:
        """Begin a call: raise what the device recorded, order this stream behind the last call's.

        Raises:
            WaitTimeoutError, PeerLostError: of earlier calls.
        """
        self._owner.check()
        device = self.words.device
        if device.type == "cuda":
            self._order.follow(torch.cuda.current_stream(device))


class _Sizes(NamedTuple):
    words: int
    data: int
    state: int

    def cover(self, other: _Sizes) -> bool:
        return all(own >= its for own, its in zip(self, other, strict=True))


#: Limit of waits of kernels in seconds, for spaces made from now on.
_TIMEOUT: Final = [30.0]
#: By communicator and device: kernels of all operators come in one order, since two that wait for
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
    """Set the limit of waits for peers in fused kernels, of operators first called after this.

    The limit of a domain is the longest that any of its users has set, so that it falls for none.

    Args:
        timeout: in seconds (default 30); equal on all ranks.
    """
    _TIMEOUT[0] = seconds(timeout)


def timeout() -> float:
    """Limit of waits of kernels in seconds, for what is made from now on."""
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
    """The space of an operator, which all ranks make together if it is missing or too small.

    Args:
        operator: name.
        device: of the call's tensors: a GPU, or the CPU as the twin.
        communicator: that of the ranks; by default the only one that is open.
        words: minimum number of flags, equal on all ranks.
        data: minimum number of bytes of data, equal on all ranks.
        state: number of int32 of state.

    Raises:
        ConfigurationError: if the space has to be made while a CUDA graph is captured, or there is
            not one open communicator and none is given.
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
    # So that few sizes are made as shapes grow.
    data = 1 << max(needed.data - 1, 0).bit_length()
    words = 1 << max(needed.words - 1, 0).bit_length()
    orders = _ORDERS.setdefault(group, {})
    order = orders.setdefault(device, ChannelOrder(_is_capturing))
    made = Space(group, device, _Sizes(words, data, needed.state), order)
    spaces[operator, device] = made
    return made


def drop(operator: str, communicator: Communicator) -> None:
    """Let go of the spaces of an operator; its kernels have ended on all ranks, and its graphs.

    Args:
        operator: name; a later call makes its space anew.
        communicator: that of the ranks.
    """
    spaces = _SPACES.get(communicator, {})
    for key in [key for key in spaces if key[0] == operator]:
        del spaces[key]
    former = _FORMER.get(communicator, [])
    former[:] = [(name, each) for name, each in former if name != operator]


def launch(
    kernel: Any, programs: int, device: torch.device, *values: object, **constants: object
) -> None:
    """Launch a kernel on the current stream of a device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](*values, **constants)
    else:
        kernel[(programs,)](*values, **constants)


@cache
def programs_of(device: torch.device) -> int:
    """Number of programs of one for each multiprocessor of a GPU; few on the CPU."""
    if device.type == "cpu":
        return _TWIN_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
