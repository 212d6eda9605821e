"""Rounds in a CPU all-to-all: dispatched, received, combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from weft.base.arguments import expect_number, shown
from weft.base.array import empty_like, view
from weft.base.errors import ClosedError, OutOfRangeError, ShapeError, StageError
from weft.base.float8 import scale_count
from weft.base.timeout import seconds
from weft.moe.differentiable import gradient_module, refuse_out

if TYPE_CHECKING:
    import weakref

    from numpy.typing import NDArray

    from weft import _native
    from weft.base.array import Array
    from weft.moe import gradient

__all__ = ["Combine", "Dispatch", "Received"]


class Owner(Protocol):
    """All-to-all that owns a round in CPU memory."""

    #: Native all-to-all; on a device, another class.
    _native: Any
    _received: weakref.WeakSet[Received]
    _closed: bool
    dtype: str
    output_dtype: str
    layout: str
    hidden: int
    scales: tuple[str, int] | None

    def _out(self, out: object, sent: int) -> Array: ...


class Dispatch:
    """A round whose dispatch is in flight."""

    #: Set in a differentiable round.
    _source: gradient.Source | None = None

    def __init__(
        self,
        all_to_all: Owner,
        number: int,
        tokens: int,
        like: object,
        source: gradient.Source | None,
    ) -> None:
        self._all_to_all = all_to_all
        self._like, self._source = like, source
        self.round = number
        self.sent = tokens

    def recv(self, *, timeout: float = 30.0) -> Received:
        """Wait until every token for this rank's experts is here and this rank's own have left.

        Raises:
            WaitTimeoutError: names who is missing; the call may be repeated.
            CapacityError: on every rank alike; the round is over.
            PeerLostError: or another `GroupPoisonedError`.
        """
        native = self._all_to_all._native.dispatch_recv(self.round, seconds(timeout))
        received = Received(self._all_to_all, self, native, self._like)
        if self._source is not None:
            gradient_module().attach(received, self._source)
        return received


class Received:
    """Tokens for this rank's experts. Views on Weft's memory: valid until released.

    Attributes:
        expert_counts: `[local experts]` int64: token counts.
        expert_offsets: `[local experts + 1]` int64: local expert e has the positions from
            `expert_offsets[e]` on; padding follows the tokens.
        rows: `[positions]` int64: the row in `tokens` at each position; -1 for padding. In the
            contiguous layout positions are rows, and this is the slot from which each was copied.
        weights: `[positions]` float32: router weights; 0 for padding. In a differentiable round
            `weights` and `tokens` are torch tensors that the caller owns.
        expert_load: `[experts]` int64: token count for every expert in the group in this round.
    """

    #: Set in a differentiable round.
    _source: gradient.Source | None = None

    def __init__(
        self, all_to_all: Owner, dispatch: Dispatch, native: _native.Received, like: object
    ) -> None:
        self._all_to_all = all_to_all
        self._like = like
        self._released = False
        #: True if the outputs were sent back.
        self._sent: object = False
        self.round = dispatch.round
        self.sent = dispatch.sent
        self.positions = len(native.slots)
        self.expert_counts: NDArray[np.int64] = np.array(native.expert_counts, dtype=np.int64)
        self.expert_offsets: NDArray[np.int64] = np.array(native.expert_offsets, dtype=np.int64)
        slots = np.array(native.slots, dtype=np.int64)
        self.rows: NDArray[np.int64] = np.where(slots == np.iinfo(np.uint32).max, -1, slots)
        self.weights: NDArray[np.float32] = np.array(native.weights, dtype=np.float32)
        self.expert_load: NDArray[np.int64] = np.array(native.expert_load, dtype=np.int64)
        shape = (native.row_count, all_to_all.hidden)
        self._tokens = view(native.rows, all_to_all.dtype, shape, native.stride, like)
        self._scales: Any = None
        if all_to_all.scales and native.scales is not None:
            dtype, block = all_to_all.scales
            shape = (native.row_count, scale_count(all_to_all.hidden, block))
            self._scales = view(native.scales, dtype, shape, native.scale_stride, like)
        all_to_all._received.add(self)

    @property
    def tokens(self) -> Any:
        """Received tokens, in `dtype`.

        In the contiguous layout `[positions, hidden]`, grouped by expert; in the indexed layout
        `[slots, hidden]`, all slots, of which `rows` names the used ones.

        Raises:
            StageError: if the round was released.
            ClosedError: if the all-to-all or the communicator was closed.
        """
        self._alive()
        return self._tokens

    @property
    def scales(self) -> Any:
        """Scales for `tokens`, row by row: `[rows, ceil(hidden / block)]`; 0 for padding.

        `None` if tokens have none.

        Raises:
            StageError, ClosedError: as in `tokens`.
        """
        self._alive()
        return self._scales

    def of_expert(self, expert: int) -> Any:
        """Tokens for local expert `expert`: a view (contiguous layout) or a copy (indexed)."""
        return self.tokens[self._rows_of(expert)]

    def scales_of_expert(self, expert: int) -> Any:
        """Scales for local expert `expert`: as in `of_expert`."""
        if self.scales is None:
            raise ShapeError(f"tokens of dtype {self._all_to_all.dtype} have no scales")
        return self.scales[self._rows_of(expert)]

    def copies_sent(self) -> tuple[int, int]:
        """Rows that this rank sent in the dispatch, and rows if each expert had got a copy."""
        sent: tuple[int, int] = self._all_to_all._native.copies_sent(self.round)
        return sent

    def release(self) -> None:
        """Release the channel; do not read the arrays afterwards. Once is enough."""
        if not self._released:
            self._alive()
            self._all_to_all._native.release(self.round)
            self._released, self._tokens, self._scales = True, None, None

    def _own_tokens(self) -> Any:
        """Received rows as torch tensors, in memory that stays."""
        return self._tokens.clone()

    def _rows_of(self, expert: int) -> slice | NDArray[np.int64]:
        expert, count = expect_number(expert, "expert"), len(self.expert_counts)
        if not 0 <= expert < count:
            raise OutOfRangeError(f"expert {shown(expert)}: expected a local one, 0 to {count - 1}")
        begin = int(self.expert_offsets[expert])
        positions = slice(begin, begin + int(self.expert_counts[expert]))
        return self.rows[positions] if self._all_to_all.layout == "indexed" else positions

    def _alive(self) -> None:
        if self._all_to_all._closed:
            raise ClosedError("the all-to-all was closed")
        if self._released:
            raise StageError(f"round {self.round} has been released")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.release()
        except Exception:
            # The block's exception is the cause; this one is a consequence.
            if kind is None:
                raise


class Combine:
    """A round whose replies are in flight."""

    def __init__(self, all_to_all: Owner, received: Received, outputs: object) -> None:
        self._all_to_all = all_to_all
        self._received = received
        #: For the backward pass.
        self._outputs = None if received._source is None else outputs

    def recv(self, *, out: Any | None = None, timeout: float = 30.0) -> Any:
        """Wait for all replies and sum them.

        Args:
            out: `[tokens, hidden]` in `output_dtype` to write to; a new array if not given.
            timeout: seconds.

        Returns:
            `[tokens, hidden]` in `output_dtype`, in the order in which tokens were sent; same array
            type as dispatched. A token without experts gives zeros.

        Raises:
            WaitTimeoutError, PeerLostError: as in `Dispatch.recv`.
        """
        if self._received._source is None:
            return self._recv(out, timeout)
        refuse_out(out)
        outputs = self._outputs
        return gradient_module().combined(
            self._received, outputs, lambda: self._recv(None, timeout)
        )

    def _recv(self, out: Any | None, timeout: float) -> Any:
        all_to_all = self._all_to_all
        if out is None:
            shape = (self._received.sent, all_to_all.hidden)
            out = empty_like(self._received._like, shape, all_to_all.output_dtype)
        given = all_to_all._out(out, self._received.sent)
        all_to_all._native.combine_recv(self._received.round, given.native(), seconds(timeout))
        return out
