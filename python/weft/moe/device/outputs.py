"""Dispatch outputs: one buffer, and tensors that are views on it.

The buffer holds received tokens, scales, and four-byte *words*: rows, weights, counts and
offsets. In the indexed layout tokens and scales stay in the heap, and the buffer only has words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.moe.device.config import VECTOR

if TYPE_CHECKING:
    from weft.moe.device.config import Config

__all__ = ["Arrived", "OutputLayout", "Outputs"]

#: Word size in bytes.
WORD = 4


class Arrived(NamedTuple):
    """Received tensors on a rank: see `weft.cuda.Received`.

    `scales` are empty if there are none, `m_indices` if the layout has none.
    """

    tokens: torch.Tensor
    scales: torch.Tensor
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    m_indices: torch.Tensor


class View(NamedTuple):
    """A range in a buffer, as `torch.as_strided` takes it."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    #: First element.
    first: int


@dataclass(frozen=True, kw_only=True)
class OutputLayout:
    """Layout for dispatch outputs in a buffer.

    Attributes:
        device: owner of the buffer's memory.
        dtype: element dtype: the wire dtype, or int32 if there are only words.
        positions: maximum positions.
        hidden: elements per token; 0 if tokens stay in the heap.
        columns: scales per token here, or words with four scales; 0 if there are none.
        scale: scale dtype.
        groups: arrays with scales in columns, each for the same number of positions; 0 if a row's
            scales stand together.
        by_expert: true if each group belongs to one expert.
        counted: maximum experts on a rank, for which kernels write counts.
        experts: experts on this rank.
        indexed: positions whose expert is written: all in the contiguous layout.
        choices: ids and weights per position in the dense layout; 0 in the others.
        ids: dtype for ids, or for rows.
        bounds: offsets that kernels write, less one: by expert, or by source in the dense layout.
    """

    device: torch.device
    dtype: torch.dtype
    positions: int
    hidden: int
    columns: int
    scale: torch.dtype
    groups: int
    by_expert: bool
    counted: int
    experts: int
    indexed: int
    choices: int
    ids: torch.dtype
    bounds: int

    @classmethod
    def of(
        cls,
        config: Config,
        device: torch.device,
        positions: int,
        experts: int,
        counted: int,
        ranks: int,
    ) -> OutputLayout:
        """Layout for an all-to-all."""
        placed, dense = config.layout != "indexed", config.layout == "dense"
        scale, columns = config.placed_scales
        groups = counted if config.layout == "padded" else 1
        return cls(
            device=device,
            dtype=getattr(torch, config.wire_dtype) if placed else torch.int32,
            positions=positions,
            hidden=config.hidden if placed else 0,
            columns=columns if placed else 0,
            scale=getattr(torch, scale),
            groups=0 if config.scale_layout == "row" else groups,
            by_expert=config.layout == "padded",
            counted=counted,
            experts=experts,
            indexed=positions if config.layout == "contiguous" else 0,
            choices=config.top_k if dense else 0,
            ids=getattr(torch, config.ids_dtype) if dense else torch.int32,
            bounds=ranks if dense else counted,
        )

    @cached_property
    def token_bytes(self) -> int:
        """Bytes for all tokens; scales begin behind them."""
        return whole(self.positions * self.hidden * self.dtype.itemsize)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes for all scales; words begin behind them."""
        rows = self.groups * self.column_length if self.groups else self.positions
        return whole(rows * self.columns * self.scale.itemsize)

    @cached_property
    def column_length(self) -> int:
        """Elements between the starts of adjacent scale columns."""
        size: int = self.scale.itemsize
        return whole(self.positions // self.groups * size) // size

    @cached_property
    def word_begins(self) -> tuple[int, int, int, int, int, int]:
        """First word for rows, weights, counts, offsets and m_indices; one past the last."""
        values = self.positions * (self.choices or 1)
        weights = whole_words(values * self.ids.itemsize // WORD)
        counts = weights + whole_words(values)
        offsets = counts + whole_words(self.counted)
        indices = offsets + whole_words(self.bounds + 1)
        return 0, weights, counts, offsets, indices, indices + whole_words(self.indexed)

    @cached_property
    def elements(self) -> int:
        """Elements in the buffer."""
        words = WORD * self.word_begins[-1]
        size: int = self.dtype.itemsize
        return (self.token_bytes + self.scale_bytes + words) // size

    @cached_property
    def places(self) -> dict[str, int | None]:
        """Byte offsets for the native module, and the element count."""
        first = self.token_bytes + self.scale_bytes
        rows, weights, counts, offsets, indices, _ = (first + WORD * at for at in self.word_begins)
        return {
            "tokens": 0 if self.hidden else None,
            "scales": self.token_bytes if self.columns else None,
            "counts": counts,
            "offsets": offsets,
            "rows": rows,
            "weights": weights,
            "experts": indices if self.indexed else None,
            "elements": self.elements,
        }

    @cached_property
    def views(self) -> dict[str, View]:
        """Views by tensor name in `Arrived`."""
        places, positions = self.places, self.positions
        each = (positions, self.choices) if self.choices else (positions,)
        bounds = self.bounds if self.choices else self.experts
        lists = (
            ("expert_counts", "counts", torch.int32, (self.experts,)),
            ("expert_offsets", "offsets", torch.int32, (bounds + 1,)),
            ("rows", "rows", self.ids, each),
            ("weights", "weights", torch.float32, each),
            ("m_indices", "experts", torch.int32, (self.indexed,)),
        )
        views = {
            name: View(dtype, size, (*size[1:], 1), (places[place] or 0) // dtype.itemsize)
            for name, place, dtype, size in lists
        }
        first = self.token_bytes // self.scale.itemsize
        views["tokens"] = View(self.dtype, (positions, self.hidden), (self.hidden, 1), 0)
        views["scales"] = View(self.scale, *self._scale_extent(), first)
        return views

    def _scale_extent(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Scale size and strides."""
        columns = self.columns
        if not self.groups:
            return (self.positions, columns), (columns, 1)
        length = self.column_length
        if not self.by_expert:
            return (self.positions, columns), (1, length)
        size = self.experts, self.positions // self.groups, columns
        return size, (columns * length, 1, length)


class Outputs:
    """Memory that dispatch writes to, allocated once for any number of rounds.

    Made by `AllToAll.empty_outputs`, for `out=`. Its tensors belong to the last round dispatched to
    it, as `Received` describes them.
    """

    def __init__(self, layout: OutputLayout, buffer: torch.Tensor) -> None:
        self._layout, self._buffer = layout, buffer
        # Views are made at first use: making all of them takes longer than a launch.
        self._views: dict[str, torch.Tensor] = {}
        self._whole = {layout.dtype: buffer}

    @property
    def tokens(self) -> torch.Tensor:
        """Received tokens; not in the indexed layout."""
        return self._view("tokens")

    @property
    def scales(self) -> torch.Tensor:
        """Scales for received tokens, if there are any; not in the indexed layout."""
        return self._view("scales")

    @property
    def expert_counts(self) -> torch.Tensor:
        """Token count by local expert."""
        return self._view("expert_counts")

    @property
    def expert_offsets(self) -> torch.Tensor:
        """First position for each local expert's group, then the last group's end.

        In the dense layout, the first row from each source.
        """
        return self._view("expert_offsets")

    @property
    def rows(self) -> torch.Tensor:
        """The row at each position; in the dense layout, the local experts."""
        return self._view("rows")

    @property
    def weights(self) -> torch.Tensor:
        """Router weight at each position; in the dense layout, for each choice."""
        return self._view("weights")

    @property
    def m_indices(self) -> torch.Tensor:
        """Local expert at each position; only in the contiguous layout."""
        return self._view("m_indices")

    def arrived(self) -> Arrived:
        """All tensors; empty ones for tokens and scales that stay in the heap."""
        return Arrived(*map(self._view, Arrived._fields))

    def _view(self, name: str) -> torch.Tensor:
        made = self._views.get(name)
        if made is None:
            dtype, size, strides, first = self._layout.views[name]
            made = self._views[name] = self._as(dtype).as_strided(size, strides, first)
        return made

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer as elements in another dtype."""
        made = self._whole.get(dtype)
        if made is None:
            made = self._whole[dtype] = self._buffer.view(dtype)
        return made


def whole(length: int) -> int:
    """Bytes rounded up to a multiple of `VECTOR`."""
    return -(-length // VECTOR) * VECTOR


def whole_words(words: int) -> int:
    """Words rounded up to a multiple of `VECTOR` bytes."""
    return whole(WORD * words) // WORD
