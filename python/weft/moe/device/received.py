"""Received tokens for a round on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from weft.base.errors import ConfigurationError, StageError
from weft.moe import rounds
from weft.moe.device.outputs import Arrived, Outputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weft.gpu.streams import Event
    from weft.moe.device.base import Base
    from weft.moe.device.planned import Handle, HostCounts, Planned
    from weft.moe.device.rows import HeapRows

__all__ = ["Received"]


class Sent(Protocol):
    """A combine whose send half was launched."""

    _here: bool

    def recv(self) -> torch.Tensor:
        """Launch the receive half."""


class Received(rounds.Received):
    """Tokens for this rank's experts, on the device. Calls return at once unless stated otherwise.

    In the contiguous, padded and dense layouts, `tokens` are `[positions, hidden]`, allocated by
    torch and owned by the caller. In the indexed layout they are a view on Weft's memory,
    `[world_size * max_tokens, hidden]` with a stride between rows, valid until combine is sent or
    the round released; in compiled code, a full copy. The dtype is `wire_dtype`. Rows that `rows`
    does not name are not written: they may be NaN.

    `scales` are `[positions, ceil(hidden / block)]`, laid out by `AllToAll(scale_layout=)`. With
    scale columns in the padded layout they are `[local experts, expert_capacity, columns]`.

    All tensors are views on one buffer, which each of them keeps alive. They are available here
    until the round is released.

    Attributes:
        positions: maximum positions, for any received tokens; with counts on the host, the
            positions in use.

    `expert_tokens`, `expert_scales` and `masked_m` show the padded layout expert by expert, as
    masked grouped GEMMs in [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM) take it.
    """

    _all_to_all: Base
    #: Set in a round with a separate plan or arrays.
    _planned: Planned | None = None
    #: Recorded when a dispatch with `async_finish=True` ends.
    event: Event | None = None

    def __init__(
        self,
        all_to_all: Base,
        channel: int,
        sent: int,
        count: torch.Tensor | None,
        arrived: Arrived | Outputs,
        heap_rows: HeapRows | None,
    ) -> None:
        self._all_to_all = all_to_all
        self._arrived: Arrived | Outputs | None = arrived
        #: Tokens and scales, if they stay in the heap.
        self._heap_rows = heap_rows
        self._released = False
        #: True if both halves of combine were launched, as one kernel.
        self._sent: Sent | Literal[True] | None = None
        self._count = count
        self.round, self.sent = channel, sent
        self.positions = all_to_all.positions

    @property
    def expert_counts(self) -> torch.Tensor:  # type: ignore[override]
        """`[local experts]` int32 on the device: token counts."""
        return self._alive().expert_counts

    @property
    def expert_offsets(self) -> torch.Tensor:  # type: ignore[override]
        """`[local experts + 1]` int32 on the device: first position by expert.

        Local expert e has the positions from `expert_offsets[e]` on; padding follows the tokens.

        Raises:
            ConfigurationError: in the dense layout, which has `source_offsets`.
        """
        self._refuse_dense("expert_offsets", "source_offsets")
        return self._alive().expert_offsets

    @property
    def source_offsets(self) -> torch.Tensor:
        """`[world_size + 1]` int32 on the device, in the dense layout: first row by source.

        Rows from rank r begin at `source_offsets[r]`; the last element is the row count.

        Raises:
            ConfigurationError: in the other layouts.
        """
        self._need_dense("source_offsets")
        return self._alive().expert_offsets

    @property
    def ids(self) -> torch.Tensor:
        """`[positions, top_k]` in `ids_dtype` on the device, in the dense layout: local experts.

        -1 where a choice is not on this rank, and in all rows behind the last.

        Raises:
            ConfigurationError: in the other layouts.
        """
        self._need_dense("ids")
        return self._alive().rows

    @property
    def rows(self) -> torch.Tensor:  # type: ignore[override]
        """`[positions]` int32 on the device: the row at each position; -1 for padding.

        It is `source * max_tokens + slot`, in the indexed layout a row in `tokens`. Positions
        behind `expert_offsets[-1]` are not written.

        Raises:
            ConfigurationError: in the dense layout, where positions are rows and have `ids`.
        """
        self._refuse_dense("rows", "ids")
        return self._alive().rows

    @property
    def weights(self) -> torch.Tensor:
        """`[positions]` float32 on the device: router weights; 0 for padding.

        In the dense layout `[positions, top_k]`, 0 where `ids` is -1.
        """
        return self._alive().weights

    @weights.setter
    def weights(self, weights: torch.Tensor) -> None:
        self._replace(weights=weights)

    @property
    def m_indices(self) -> torch.Tensor | None:
        """`[positions]` int32 on the device, in the contiguous layout: each row's local expert.

        -1 for padding and behind the last group, as contiguous grouped GEMMs in DeepGEMM take it,
        with `pad_to` set to their alignment (128). `None` in the other layouts.
        """
        arrived = self._alive()
        return arrived.m_indices if self._all_to_all.layout == "contiguous" else None

    @property
    def _tokens(self) -> torch.Tensor:
        return (self._heap_rows or self._alive()).tokens

    @_tokens.setter
    def _tokens(self, tokens: torch.Tensor) -> None:
        self._replace(tokens=tokens)

    @property
    def _scales(self) -> torch.Tensor | None:
        if self._all_to_all.scales is None:
            return None
        return (self._heap_rows or self._alive()).scales

    def _replace(self, **tensors: torch.Tensor) -> None:
        assert isinstance(self._arrived, Arrived), "of a differentiable round"
        self._arrived = self._arrived._replace(**tensors)

    @property
    def expert_tokens(self) -> torch.Tensor:
        """`tokens` in the padded layout as `[local experts, expert_capacity, hidden]`: a view.

        For expert e, the first `masked_m[e]` rows are tokens. `AllToAll.combine` takes outputs in
        this shape.

        Raises:
            ConfigurationError: in the other layouts, where experts have no separate rows.
        """
        return self._by_expert(self.tokens, "expert_tokens")

    @property
    def expert_scales(self) -> torch.Tensor | None:
        """`scales` in the same form: `[local experts, expert_capacity, ceil(hidden / block)]`.

        `None` if tokens have none.

        Raises:
            ConfigurationError: as in `expert_tokens`.
        """
        scales = self.scales
        if scales is None or scales.ndim == 3:
            return scales
        return self._by_expert(scales, "expert_scales")

    @property
    def masked_m(self) -> torch.Tensor:
        """`expert_counts`: number of token rows for each expert in `expert_tokens`."""
        return self.expert_counts

    @property
    def handle(self) -> Handle:
        """For `handle=` of later rounds, if this one was dispatched with `keep=True`."""
        if self._planned is None or self._planned.handle is None:
            raise StageError("the plan of this round is not kept: pass keep=True to dispatch")
        return self._planned.handle

    def _owned(self) -> Iterable[torch.Tensor]:
        """Tensors allocated for it."""
        arrived = self._alive()
        made = [arrived._buffer] if isinstance(arrived, Outputs) else list(arrived)
        plan = self._plan()
        return made if plan is None else [*made, plan]

    def _plan(self) -> torch.Tensor | None:
        handle = None if self._planned is None else self._planned.handle
        return None if handle is None else handle._plan

    @property
    def host_counts(self) -> HostCounts | None:
        """Round counts, if the host has waited for them."""
        return None if self._planned is None else self._planned.counts

    def _site(self) -> dict[str, Any]:
        return {} if self._planned is None else self._planned.site()

    def of_expert(self, expert: int) -> torch.Tensor:
        """Tokens for local expert `expert`: a view, or a copy in the indexed layout.

        This first copies the offset and count to the host: it waits for the stream, and cannot be
        used in a CUDA graph. Kernels read `expert_offsets` and `expert_counts` on the device
        instead.
        """
        return super().of_expert(expert)

    def scales_of_expert(self, expert: int) -> torch.Tensor:
        """Scales for local expert `expert`: waits as `of_expert` does."""
        scales = self.scales
        if scales is not None and scales.ndim == 3:
            return scales[expert, : int(self.expert_counts[expert])]
        return super().scales_of_expert(expert)

    def _rows_of(self, expert: int) -> Any:
        if self._all_to_all.layout == "dense":
            raise ConfigurationError(
                f"tokens of local expert {expert}: rows of the dense layout stand by source; find "
                "them by ids"
            )
        return super()._rows_of(expert)

    def _need_dense(self, what: str) -> None:
        if (layout := self._all_to_all.layout) != "dense":
            raise ConfigurationError(f"{what} of layout={layout!r}: only 'dense' has them")

    def _refuse_dense(self, what: str, instead: str) -> None:
        if self._all_to_all.layout == "dense":
            raise ConfigurationError(
                f"{what} of layout='dense': rows stand by source; use {instead}"
            )

    def copies_sent(self) -> tuple[int, int]:
        """Not available: rows are counted only on the device.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("rows sent are not counted on a device")

    def release(self) -> None:
        """Release the channel; the round is over. Once is enough.

        Without a combine, it ends the round at the sources too: every rank then makes this call in
        place of combine.
        """
        if self._released:
            return
        self._alive()
        all_to_all = self._all_to_all
        if self._sent is None:
            if torch.compiler.is_compiling():
                all_to_all._operate("moe_release", self.round, None)
            else:
                all_to_all._launcher.release(self.round)
        elif self._sent is not True and not self._sent._here:
            self._sent.recv()
        # A combine refers to this round: the cycle would keep memory until garbage collection.
        self._released, self._arrived, self._heap_rows, self._sent = True, None, None, None
        all_to_all._busy[self.round] = False

    def _own_tokens(self) -> torch.Tensor:
        return self._tokens

    def _by_expert(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        capacity = self._all_to_all.expert_capacity
        if capacity is None:
            layout = self._all_to_all.layout
            raise ConfigurationError(f"{what} in layout={layout!r}: pass layout='padded'")
        # Ranks with one expert fewer than others have unused positions at the end.
        experts = len(self._all_to_all.local_experts)
        return rows[: experts * capacity].view(experts, capacity, rows.shape[-1])

    def _alive(self) -> Arrived | Outputs:  # type: ignore[override]
        """Received tensors, until the round is released."""
        self._all_to_all._open()
        if self._arrived is None:
            raise StageError("the round has been released")
        return self._arrived
