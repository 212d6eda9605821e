"""Reference for dispatch and combine: arithmetic on whole arrays, without areas, slots or rounds.

It shares only the result description with the kernels and their CPU twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tests.gpu.case import BYTES, POISON, UNWRITTEN, Batch, Result, Shape
from tests.gpu.experts import run_experts

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pairs(NamedTuple):
    """Every (token, expert) pair on all ranks, in position order: expert, source, token."""

    expert: NDArray[np.int64]
    source: NDArray[np.int64]
    token: NDArray[np.int64]
    choice: NDArray[np.int64]
    weight: NDArray[np.float32]


class Reference:
    """Reference with the interface of `tests.gpu.side.Side`."""

    def __init__(self, shape: Shape, positions: int) -> None:
        self.shape, self.positions = shape, positions

    def run(self, batches: list[Batch], channel: int = 0, mode: str = "halves") -> list[Result]:
        """A round; channel and mode are ignored."""
        shape = self.shape
        pairs = all_pairs(shape, batches)
        sent = [wire(shape, batch) for batch in batches]
        slots = [slots_of(shape, batch, rank) for rank, batch in enumerate(batches)]
        placed = [self._offsets(pairs, rank) for rank in range(shape.ranks)]
        if shape.layout == "dense":
            placed = [self._dense_offsets(slots, batches, rank) for rank in range(shape.ranks)]
        overflow = any(offsets is None for offsets in placed)
        results, outputs = [], []
        where = np.full(len(pairs.expert), -1, dtype=np.int64)
        for rank, offsets in enumerate(placed):
            result = self._nothing(rank)
            if offsets is not None:
                if shape.layout == "dense":
                    self._place_dense(rank, batches, offsets, sent, slots, where, pairs, result)
                else:
                    self._place(rank, pairs, offsets, sent, slots, where, result)
            outputs.append(run_experts(shape, result.tokens, batches[rank].factors))
            results.append(result)
        for rank, batch in enumerate(batches):
            exist = batch.tokens_that_exist
            if overflow:
                results[rank].combined[:exist] = POISON
                results[rank] = results[rank]._replace(error="CapacityError")
            elif exist:
                combined = self._combine(rank, exist, pairs, where, outputs)
                results[rank].combined[:exist] = combined.view(torch.uint8)
        return results

    def close(self) -> None:
        """No resources to free."""

    def _nothing(self, rank: int) -> Result:
        """Unwritten result for a round without tokens."""
        shape, own = self.shape, len(self.shape.experts_of(rank))

        def unwritten(*size: int) -> torch.Tensor:
            return torch.full(size, UNWRITTEN, dtype=torch.uint8)

        def numbers(count: int) -> torch.Tensor:
            return unwritten(count * 4).view(torch.int32)

        groups, columns, length, element = shape.placed_scales(self.positions)
        scales = unwritten(self.positions, columns * element)
        if shape.scale_layout != "row":
            scales = unwritten(groups * columns, length * element)
        dense = shape.layout == "dense"
        choices = self.positions * shape.top_k if dense else self.positions
        ids = choices * (2 if dense and shape.ids_dtype == "int64" else 1)
        return Result(
            tokens=unwritten(self.positions, shape.hidden * BYTES[shape.wire]),
            scales=scales,
            counts=torch.zeros(own, dtype=torch.int32),
            offsets=torch.zeros((shape.ranks if dense else own) + 1, dtype=torch.int32),
            # Dense rows without a token have no experts.
            rows=torch.full((ids,), -1, dtype=torch.int32) if dense else numbers(ids),
            weights=torch.zeros(choices, dtype=torch.int32) if dense else numbers(choices),
            groups=torch.full((self.positions,), -1, dtype=torch.int32),
            combined=unwritten(shape.max_tokens, shape.hidden * BYTES[shape.output]),
            error=None,
        )

    def _offsets(self, pairs: Pairs, rank: int) -> NDArray[np.int64] | None:
        """Local expert group offsets and the last end; `None`: over capacity."""
        shape, mine = self.shape, self.shape.experts_of(rank)
        local = pairs.expert[(pairs.expert >= mine.start) & (pairs.expert < mine.stop)] - mine.start
        totals = np.bincount(local, minlength=len(mine))
        if shape.layout == "padded":
            room = np.full(len(totals), shape.capacity)
            fits = bool((totals <= room).all())
        else:
            room = -(-totals // shape.pad_to) * shape.pad_to
            fits = int(room.sum()) <= self.positions
        return np.concatenate([[0], np.cumsum(room)]) if fits else None

    def _dense_offsets(
        self, slots: list[NDArray[np.int64]], batches: list[Batch], rank: int
    ) -> NDArray[np.int64] | None:
        """Each source's row offsets and the last end; `None`: over capacity."""
        each = enumerate(batches)
        rows = [len(rows_to(self.shape, batch, source, rank)) for source, batch in each]
        return np.concatenate([[0], np.cumsum(rows)]) if sum(rows) <= self.positions else None

    def _place_dense(
        self,
        rank: int,
        batches: list[Batch],
        offsets: NDArray[np.int64],
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        slots: list[NDArray[np.int64]],
        where: NDArray[np.int64],
        pairs: Pairs,
        result: Result,
    ) -> None:
        """Write outputs for `rank`; record in `where` each pair's row."""
        shape, mine = self.shape, self.shape.experts_of(rank)
        result.offsets[:] = torch.from_numpy(offsets)
        local = pairs.expert[(pairs.expert >= mine.start) & (pairs.expert < mine.stop)] - mine.start
        result.counts[:] = torch.from_numpy(np.bincount(local, minlength=len(mine)))
        words = 2 if shape.ids_dtype == "int64" else 1
        ids = result.rows.view(torch.int64 if words == 2 else torch.int32).view(-1, shape.top_k)
        weights = result.weights.view(torch.float32).view(-1, shape.top_k)
        for source, batch in enumerate(batches):
            token = rows_to(shape, batch, source, rank)
            at = slice(int(offsets[source]), int(offsets[source + 1]))
            tokens, scales = sent[source]
            result.tokens[at] = tokens[token]
            self._place_scales(result.scales, np.arange(at.start, at.stop), scales[token])
            named = shape.physical(batch.ids[: batch.tokens_that_exist], source)[token]
            here = (named >= mine.start) & (named < mine.stop)
            ids[at] = torch.from_numpy(np.where(here, named - mine.start, -1)).to(ids.dtype)
            given = (
                np.ones(named.shape, np.float32) if batch.weights is None else batch.weights[token]
            )
            weights[at] = torch.from_numpy(np.where(here, given, np.float32(0)))
            of_pair = (pairs.source == source) & (pairs.expert >= mine.start)
            of_pair &= pairs.expert < mine.stop
            where[of_pair] = offsets[source] + slots[source][pairs.token[of_pair], rank]

    def _place(
        self,
        rank: int,
        pairs: Pairs,
        offsets: NDArray[np.int64],
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        slots: list[NDArray[np.int64]],
        where: NDArray[np.int64],
        result: Result,
    ) -> None:
        """Write outputs for `rank`; record in `where` each pair's position."""
        shape, mine = self.shape, self.shape.experts_of(rank)
        result.offsets[:] = torch.from_numpy(offsets)
        result.rows[: offsets[-1]] = -1
        result.weights[: offsets[-1]] = 0
        for local, expert in enumerate(mine):
            group = np.flatnonzero(pairs.expert == expert)
            result.counts[local] = len(group)
            if not len(group):
                continue
            at = offsets[local] + np.arange(len(group))
            where[group] = at
            source, token = pairs.source[group], pairs.token[group]
            rows = [
                s * shape.max_tokens + slots[s][t, rank] for s, t in zip(source, token, strict=True)
            ]
            result.rows[at] = torch.tensor(rows, dtype=torch.int32)
            weights = torch.from_numpy(pairs.weight[group])
            result.weights[at] = weights.view(torch.int32)
            result.groups[at] = local
            for each in np.unique(source):
                from_it = source == each
                tokens, scales = sent[each]
                result.tokens[at[from_it]] = tokens[token[from_it]]
                self._place_scales(result.scales, at[from_it], scales[token[from_it]])

    def _place_scales(self, to: torch.Tensor, at: NDArray[np.int64], scales: torch.Tensor) -> None:
        """Write scale rows to positions, in `scale_layout`."""
        shape = self.shape
        if shape.scale_layout == "row":
            to[at] = scales
            return
        groups, columns, length, element = shape.placed_scales(self.positions)
        missing = columns * element - scales.shape[1]
        whole = torch.nn.functional.pad(scales, (0, missing)).view(len(at), columns, element)
        rows = shape.capacity if shape.layout == "padded" else self.positions
        placed = to.view(groups, columns, length, element)
        placed[at // rows, :, at % rows] = whole

    def _combine(
        self,
        rank: int,
        exist: int,
        pairs: Pairs,
        where: NDArray[np.int64],
        outputs: list[torch.Tensor],
    ) -> torch.Tensor:
        """`[exist, hidden]`: float32 sums at each rank in top-k order, rounded, then over ranks."""
        shape = self.shape
        answer: torch.dtype = getattr(torch, shape.answer)
        total = torch.zeros(exist, shape.hidden)
        for owner in range(shape.ranks):
            mine = shape.experts_of(owner)
            here = (
                (pairs.source == rank) & (pairs.expert >= mine.start) & (pairs.expert < mine.stop)
            )
            partial = torch.zeros(exist, shape.hidden)
            if shape.layout == "dense":
                # An output row is for all experts on the rank.
                token, first = np.unique(pairs.token[here], return_index=True)
                partial[token] = outputs[owner][where[here][first]].float()
            for choice in range(shape.top_k if shape.layout != "dense" else 0):
                chosen = np.flatnonzero(here & (pairs.choice == choice))
                rows = outputs[owner][where[chosen]].float()
                if shape.weighting == "combine":
                    rows = rows * torch.from_numpy(pairs.weight[chosen])[:, None]
                partial[pairs.token[chosen]] += rows
            asked = np.unique(pairs.token[here])
            total[asked] += partial[asked].to(answer).float()
        output: torch.dtype = getattr(torch, shape.output)
        return total.to(output)


def all_pairs(shape: Shape, batches: list[Batch]) -> Pairs:
    columns: list[list[NDArray[np.int64]]] = []
    weights: list[NDArray[np.float32]] = []
    for source, batch in enumerate(batches):
        ids = shape.physical(batch.ids[: batch.tokens_that_exist], source)
        token, choice = np.nonzero(ids >= 0)
        columns.append([ids[token, choice], np.full(len(token), source), token, choice])
        given = batch.weights
        ones = np.ones(len(token), dtype=np.float32)
        weights.append(ones if given is None else given[token, choice])
    expert, sources, token, choice = (np.concatenate(each) for each in zip(*columns, strict=True))
    order = np.lexsort((token, sources, expert))
    flat = np.concatenate(weights)
    return Pairs(expert[order], sources[order], token[order], choice[order], flat[order])


def rows_to(shape: Shape, batch: Batch, source: int, rank: int) -> NDArray[np.int64]:
    """Tokens in `source`'s batch with an expert at `rank`."""
    ids = shape.physical(batch.ids[: batch.tokens_that_exist], source)
    mine = shape.experts_of(rank)
    tokens: NDArray[np.int64] = np.flatnonzero(
        ((ids >= mine.start) & (ids < mine.stop)).any(axis=1)
    )
    return tokens


def slots_of(shape: Shape, batch: Batch, rank: int) -> NDArray[np.int64]:
    """`[tokens, ranks]`: count of this rank's earlier tokens for that rank."""
    ids = shape.physical(batch.ids[: batch.tokens_that_exist], rank)
    goes = np.zeros((len(ids), shape.ranks), dtype=np.int64)
    token, choice = np.nonzero(ids >= 0)
    goes[token, shape.owner(ids[token, choice])] = 1
    slots: NDArray[np.int64] = np.cumsum(goes, axis=0) - goes
    return slots


def wire(shape: Shape, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and scales on the wire, in bytes."""
    if not shape.cast:
        none = torch.empty((batch.given, 0), dtype=torch.uint8)
        return batch.tokens.view(torch.uint8), none if batch.scales is None else batch.scales
    assert shape.scales is not None
    kind, block = shape.scales
    values = torch.nn.functional.pad(batch.tokens.float(), (0, -shape.hidden % block))
    blocks = values.reshape(batch.given, shape.scale_count, block)
    largest = torch.nan_to_num(blocks.abs(), nan=0.0, posinf=torch.inf).amax(dim=2)
    scale = torch.clamp(largest / 448, min=2.0**-126)
    if kind != "float32":
        # The next power of two; frexp's mantissa is at least a half.
        mantissa, exponent = torch.frexp(largest.double() / 448)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-127)
        power = torch.pow(2.0, exponent.double()).float()
        scale = torch.where(largest.isinf(), torch.inf, power)
    scale = torch.where(largest == 0, 1.0, scale)
    scale = scale.clone(memory_format=torch.contiguous_format)
    scaled = (blocks * (1 / scale)[:, :, None]).clamp(-448, 448)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), 0x7F, codes)
    codes = codes.flatten(1)[:, : shape.hidden].contiguous()
    if kind == "float32":
        return codes, scale.view(torch.uint8)
    # A float32 exponent; the smallest power, subnormal in float32, has 0 as well.
    return codes, (scale.view(torch.int32) >> 23).to(torch.uint8)
