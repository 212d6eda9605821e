"""All ranks in a group in one process, on GPUs or on their CPU twin, with all outputs."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

import weft
from tests.gpu.case import BYTES, POISON, UNWRITTEN, Batch, Result, Shape
from tests.gpu.experts import Scratch, run_experts
from weft import _native

Mode: TypeAlias = Literal["halves", "apart", "fused", "graph"]
#: Native class arguments that are not part of a shape.
PLACED: dict[str, Any] = {
    "num_sms": None,
    "memory": "fd",
    "skew_timeout": 10.0,
    "max_bytes": None,
    "timeout": 30.0,
}
#: Guard bytes behind every output, which must stay unchanged.
GUARD = 256
#: SMs for a rank's kernels: half its GPU's, divided by the ranks on it, so that
#: kernels which wait for each other are always resident together.
SHARE = 2


def devices(kind: str, ranks: int) -> list[str]:
    """Rank devices: all GPUs in turn, or the twin."""
    if kind == "twin":
        return ["twin"] * ranks
    return [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]


def native_group(shape: Shape, kind: str, **more: Any) -> list[Any]:
    """The native class on every rank, in this process."""
    places = devices(kind, shape.ranks)
    options = dict(PLACED)
    if kind == "cuda":
        on_one = -(-shape.ranks // torch.cuda.device_count())
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        options["num_sms"] = max(1, processors // SHARE // on_one)
    group: list[Any] = _native.DeviceAllToAll.local_group(
        shape.ranks, places, **(shape.options() | options | more)
    )
    return group


class Guarded:
    """An output: its bytes, and the guard bytes behind it."""

    def __init__(self, rows: int, row_bytes: int, device: str) -> None:
        self.bytes = rows * row_bytes
        self.all = torch.empty(self.bytes + GUARD, dtype=torch.uint8, device=device)
        self.own = self.all[: self.bytes].view(rows, row_bytes)
        self.unwrite()

    def unwrite(self) -> None:
        self.all.fill_(UNWRITTEN)

    @property
    def address(self) -> int:
        return self.all.data_ptr() if self.bytes else 0

    def fetch(self, what: str) -> torch.Tensor:
        """Its bytes copied to the CPU."""
        everything = self.all.cpu()
        beyond = everything[self.bytes :] != UNWRITTEN
        assert not beyond.any(), f"{what}: {int(beyond.sum())} bytes behind it were written"
        return everything[: self.bytes].view(self.own.shape)


class Rank:
    """A rank's native object, its stream, and call inputs and outputs."""

    def __init__(self, shape: Shape, native: Any, device: str) -> None:
        self.shape, self.native = shape, native
        begin, end = native.local_experts
        self.own_experts: int = end - begin
        self.device = device = "cpu" if device == "twin" else device
        self.stream = torch.cuda.Stream(device) if device != "cpu" else None
        most, positions, local = shape.max_tokens, native.positions, shape.local_experts
        scale = 4 if shape.scales and shape.scales[0] == "float32" else 1

        def room(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8, device=device)

        self.given_tokens = room(most, shape.hidden * BYTES[shape.token_dtype])
        self.given_scales = room(most, shape.scale_count * scale)
        ids = torch.int64 if shape.ids_dtype == "int64" else torch.int32
        self.ids = torch.zeros(most, shape.top_k, dtype=ids, device=device)
        self.given_weights = torch.zeros(most, shape.top_k, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.factors = torch.zeros(positions, device=device)

        def output(rows: int, row_bytes: int) -> Guarded:
            return Guarded(rows, row_bytes, device)

        kept = 0 if shape.layout == "indexed" else positions
        self.tokens = output(kept, shape.hidden * BYTES[shape.wire])
        groups, columns, length, element = shape.placed_scales(kept)
        self.scales = output(kept, shape.scale_count * scale)
        if shape.scale_layout != "row":
            self.scales = output(groups * columns, length * element)
        #: Values at each position: in the dense layout ids, in the input id dtype.
        self.dense = shape.layout == "dense"
        each = shape.top_k if self.dense else 1
        self.counts = output(local, 4)
        self.offsets = output((shape.ranks if self.dense else local) + 1, 4)
        self.rows = output(positions, each * (self.ids.element_size() if self.dense else 4))
        self.weights = output(positions, each * 4)
        self.groups = output(positions, 4)
        self.combined = output(most, shape.hidden * BYTES[shape.output])
        self.scratch = Scratch(shape, positions, device)
        self.outputs = [self.tokens, self.scales, self.counts, self.offsets, self.rows]
        self.outputs += [self.weights, self.groups, self.combined]
        self.landed = [self._landed(channel) for channel in range(shape.channels)]
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def load(self, batch: Batch) -> None:
        """Copy a batch to the device, and reset all outputs to `UNWRITTEN`."""
        given = batch.given
        self.given_tokens[:given] = batch.tokens.view(torch.uint8).to(self.device)
        if batch.scales is not None:
            self.given_scales[:given] = batch.scales.to(self.device)
        self.ids[:given] = torch.from_numpy(batch.ids).to(self.ids)
        # Tokens beyond `count` must not be read.
        self.ids[given:] = self.shape.experts + 7
        self.given_weights[:given] = (
            torch.from_numpy(batch.weights).to(self.device) if batch.weights is not None else 1.0
        )
        self.count.fill_(given if batch.count is None else batch.count)
        self.factors.copy_(batch.factors)
        for output in self.outputs:
            output.unwrite()

    def inputs(self, batch: Batch | None) -> tuple[int, ...]:
        """Dispatch input addresses, and the token count; without a batch: for graphs."""
        shape = self.shape
        scaled = shape.scales is not None and not shape.cast
        weighted = batch is None or batch.weights is not None
        counted = batch is None or batch.count is not None
        return (
            self.given_tokens.data_ptr(),
            self.given_scales.data_ptr() if scaled else 0,
            self.ids.data_ptr(),
            self.given_weights.data_ptr() if weighted else 0,
            self.count.data_ptr() if counted else 0,
            shape.max_tokens if batch is None else batch.given,
        )

    def receipts(self) -> tuple[int, ...]:
        """Dispatch output addresses."""
        outputs = (self.tokens, self.scales, self.counts, self.offsets, self.rows, self.weights)
        return tuple(output.address for output in outputs)

    def counted(self, batch: Batch | None) -> tuple[int, int]:
        """Combine's tokens: count address, and count."""
        inputs = self.inputs(batch)
        return inputs[4], inputs[5]

    @property
    def on(self) -> int:
        """Stream as the native class takes it."""
        return 0 if self.stream is None else self.stream.cuda_stream

    def received(self, channel: int) -> torch.Tensor:
        """`[positions, bytes in a token]`: tokens by position, in every layout."""
        if self.shape.layout != "indexed":
            return self.tokens.own
        rows = self.rows.own.view(torch.int32)[:, 0]
        landed = self.landed[channel]
        assert landed is not None
        width = self.shape.hidden * BYTES[self.shape.wire]
        return landed[rows.clamp(0, len(landed) - 1).long(), :width]

    def experts(self, channel: int) -> None:
        run_experts(self.shape, self.received(channel), self.factors, self.scratch)

    def result(self, channel: int, exist: int, error: str | None) -> Result:
        """Outcome on the CPU; `exist`: dispatched token count."""
        fetched = {
            name: getattr(self, name).fetch(name) for name in Result._fields if name != "error"
        }
        for name in ("counts", "offsets", "rows", "weights", "groups"):
            fetched[name] = fetched[name].view(torch.int32).flatten()
        # Ranks may own one expert more or less; outputs have room for the maximum.
        fetched["counts"] = fetched["counts"][: self.own_experts]
        if not self.dense:
            fetched["offsets"] = fetched["offsets"][: self.own_experts + 1]
        if error is not None:
            # A failed round may poison the rows beyond the tokens, or leave them.
            beyond = fetched["combined"][exist:]
            beyond[(beyond == POISON).all(dim=1)] = UNWRITTEN
        if self.shape.layout == "indexed":
            fetched["tokens"], fetched["scales"] = self._landed_rows(channel, fetched["rows"])
        return Result(**fetched, error=error)

    def _landed(self, channel: int) -> torch.Tensor | None:
        """The received rows, `[rows, row bytes with padding]`."""
        if self.shape.layout != "indexed":
            return None
        address, stride, count = self.native.received(channel)
        return memory(address, (count, stride), self.device)

    def _landed_rows(self, channel: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and scales at positions with a row; others count as unwritten."""
        shape, landed = self.shape, self.landed[channel]
        assert landed is not None
        here = landed.cpu()
        width, scale = shape.hidden * BYTES[shape.wire], self.given_scales.shape[1]
        tokens = torch.full((len(rows), width), UNWRITTEN, dtype=torch.uint8)
        scales = torch.full((len(rows), scale), UNWRITTEN, dtype=torch.uint8)
        used = (rows >= 0) & (rows < len(here))
        tokens[used] = here[rows[used].long(), :width]
        at = shape.row_scales_at
        scales[used] = here[rows[used].long(), at : at + scale]
        return tokens, scales


class Side:
    """A group whose rounds can be compared with another's."""

    def __init__(self, shape: Shape, kind: str, **more: Any) -> None:
        self.shape, self.kind = shape, kind
        places = devices(kind, shape.ranks)
        natives = native_group(shape, kind, **more)
        self.ranks = [Rank(shape, *each) for each in zip(natives, places, strict=True)]
        self.positions: int = natives[0].positions

    def run(self, batches: list[Batch], channel: int = 0, mode: Mode = "halves") -> list[Result]:
        """A round with dispatch, experts and combine at every rank.

        Args:
            batches: each rank's.
            channel: channel index.
            mode: separate phases; phases with a barrier on all ranks in between; the fused
                launches; a captured graph of them replayed.
        """
        for rank, batch in zip(self.ranks, batches, strict=True):
            rank.load(batch)
            if mode == "graph":
                # A graph has the maximum row count, so only the count delimits the valid ones.
                rank.count.fill_(batch.tokens_that_exist)
            if self.kind == "cuda" and mode == "graph" and channel not in rank.graphs:
                self._capture(rank, channel)
        self.synchronise()
        if mode == "graph" and self.kind == "cuda":
            for rank in self.ranks:
                with torch.cuda.stream(rank.stream):
                    rank.graphs[channel].replay()
        elif mode != "fused" or self.kind == "cuda":
            self._phases(batches, channel, mode)
        else:
            with ThreadPoolExecutor(len(self.ranks)) as pool:
                list(pool.map(lambda rank, batch: fused(rank, batch, channel), self.ranks, batches))
        self.synchronise()
        return [
            rank.result(channel, batch.tokens_that_exist, raised(rank.native))
            for rank, batch in zip(self.ranks, batches, strict=True)
        ]

    def synchronise(self) -> None:
        """Wait for all launches."""
        if self.kind == "cuda":
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Free all memory, each rank separately: no other rank uses it any more."""
        self.synchronise()
        for rank in self.ranks:
            rank.graphs.clear()
            rank.native.abandon()

    def _phases(self, batches: list[Batch], channel: int, mode: Mode) -> None:
        """Each phase on all ranks, before the next one."""
        pairs = list(zip(self.ranks, batches, strict=True))
        if mode == "fused":
            for rank, batch in pairs:
                with torch.cuda.stream(rank.stream):
                    fused(rank, batch, channel)
            return

        def pause() -> None:
            if mode == "apart":
                self.synchronise()

        for rank, batch in pairs:
            inputs, layer = rank.inputs(batch), self.shape.layer
            rank.native.dispatch_send(rank.on, channel, *inputs, layer=layer)
        pause()
        for rank, _ in pairs:
            rank.native.dispatch_recv(
                rank.on, channel, *rank.receipts(), experts=rank.groups.address
            )
        pause()
        for rank, _ in pairs:
            with torch.cuda.stream(rank.stream):
                rank.experts(channel)
                rank.native.combine_send(rank.on, channel, rank.scratch.outputs.data_ptr(), False)
        pause()
        for rank, batch in pairs:
            rank.native.combine_recv(
                rank.on, channel, rank.combined.address, *rank.counted(batch), False
            )

    def _capture(self, rank: Rank, channel: int) -> None:
        graph = torch.cuda.CUDAGraph()
        # Once outside, so that the capture neither loads nor allocates.
        with torch.cuda.stream(rank.stream):
            rank.experts(channel)
        self.synchronise()
        with torch.cuda.graph(graph, stream=rank.stream, capture_error_mode="thread_local"):
            fused(rank, None, channel)
        rank.graphs[channel] = graph


def fused(rank: Rank, batch: Batch | None, channel: int) -> None:
    """Dispatch, experts and combine in the fewest launches."""
    given, to, layer = rank.inputs(batch), rank.receipts(), rank.shape.layer
    experts = rank.groups.address
    rank.native.dispatch(rank.on, channel, *given, *to, out_experts=experts, layer=layer)
    rank.experts(channel)
    outputs = rank.scratch.outputs.data_ptr()
    rank.native.combine(
        rank.on, channel, outputs, rank.combined.address, *rank.counted(batch), False
    )


def raised(native: Any) -> str | None:
    """Error class name from `check`."""
    try:
        native.check()
    except weft.WeftError as error:
        return type(error).__name__
    return None


def memory(address: int, shape: tuple[int, int], device: str) -> torch.Tensor:
    """Tensor over memory with another owner."""
    if device != "cpu":
        return torch.as_tensor(DeviceBytes(address, shape), device=device)
    size = shape[0] * shape[1]
    held = (ctypes.c_uint8 * size).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(held)).view(shape)


class DeviceBytes:
    """GPU address with CUDA's array interface."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
