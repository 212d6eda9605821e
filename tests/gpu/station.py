"""A rank that runs endless rounds on two channels, and checks each on its device.

Tokens, weights and expert factors are small integers, so that every sum is exact in every type
and the correct result follows without another implementation.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.case import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

#: Different batches, used in turn.
BATCHES = 16
CHANNELS = 2
#: Maximum delay before a phase: cycles on a GPU, and seconds on the twin.
MOST_CYCLES = 60_000
MOST_SECONDS = 0.002


class Channel:
    """Inputs and outputs in one round."""

    def __init__(self, shape: Shape, positions: int, device: str) -> None:
        most, hidden, local = shape.max_tokens, shape.hidden, shape.local_experts

        def room(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def dtype(name: str) -> torch.dtype:
            kind: torch.dtype = getattr(torch, name)
            return kind

        self.tokens = room(most, hidden, dtype=dtype(shape.token_dtype))
        self.ids = room(most, shape.top_k, dtype=torch.int64)
        self.weights = room(most, shape.top_k, dtype=torch.float32)
        self.count = room(1, dtype=torch.int32)
        self.arrived = room(positions, hidden, dtype=dtype(shape.wire))
        self.scales = room(positions, max(1, shape.scale_count), dtype=torch.uint8)
        self.counts = room(local, dtype=torch.int32)
        self.offsets = room(local + 1, dtype=torch.int32)
        self.rows = room(positions, dtype=torch.int32)
        self.arrived_weights = room(positions, dtype=torch.float32)
        self.outputs = room(positions, hidden, dtype=dtype(shape.combine_dtype))
        self.combined = room(most, hidden, dtype=dtype(shape.output))


class Station:
    """A rank: its native object, its stream, and a device counter for wrong values."""

    def __init__(self, shape: Shape, native: Any, device: str, rank: int, seed: int) -> None:
        self.shape, self.native, self.rank = shape, native, rank
        self.on_gpu = device != "twin"
        self.device = device if self.on_gpu else "cpu"
        self.stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.channels = [Channel(shape, native.positions, self.device) for _ in range(CHANNELS)]
        self.chance = random.Random(seed * 1000 + rank)
        chosen = torch.Generator().manual_seed(seed * 1000 + rank)
        many = (BATCHES, shape.max_tokens, shape.top_k)
        keys = torch.rand(*many[:2], shape.experts, generator=chosen)
        ids = keys.topk(min(shape.top_k, shape.experts), dim=2).indices
        ids[torch.rand(ids.shape, generator=chosen) < 0.2] = -1
        # The last batch goes to one rank; the one before it has no experts.
        ids[-1] = torch.where(ids[-1] >= 0, ids[-1] % shape.local_experts, -1)
        same = ids[-1][:, :, None] == ids[-1][:, None, :]
        ids[-1][same.tril(-1).any(2)] = -1
        ids[-2] = -1
        counts = torch.randint(0, shape.max_tokens + 1, (BATCHES, 1), generator=chosen)
        weights = torch.randint(1, 3, many, generator=chosen)
        self.all_ids = ids.to(self.device)
        self.all_counts = counts.int().to(self.device)
        self.all_weights = weights.float().to(self.device)
        self.base = torch.randint(0, 8, (shape.max_tokens, shape.hidden), generator=chosen)
        self.base = self.base.to(self.device)
        self.round = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.positions = torch.arange(native.positions, dtype=torch.int32, device=self.device)
        self.first = shape.experts_of(rank).start
        self.token = torch.arange(shape.max_tokens, device=self.device)[:, None]

    def delay(self, most: float = 1.0) -> None:
        """Random delay, zero in half the cases."""
        share = max(0.0, self.chance.uniform(-most, most))
        if self.on_gpu:
            torch.cuda._sleep(int(MOST_CYCLES * share))
        elif share:
            time.sleep(MOST_SECONDS * share)

    def rounds(self) -> None:
        """One round on each channel; the second begins before the first ends."""
        native, on = self.native, self.on
        for number, channel in enumerate(self.channels):
            self.prepare(channel, number)
            self.delay()
            native.dispatch_send(on, number, *self.sent(channel))
        for number, channel in enumerate(self.channels):
            self.delay()
            native.dispatch_recv(on, number, *self.received(channel))
            self.experts(channel)
            self.delay()
            native.combine_send(on, number, channel.outputs.data_ptr(), False)
        for number, channel in enumerate(self.channels):
            self.delay()
            address = channel.combined.data_ptr()
            most = self.shape.max_tokens
            native.combine_recv(on, number, address, channel.count.data_ptr(), most, False)
            self.judge(channel)
        self.round.add_(1)

    def fused_rounds(self) -> None:
        """The same one after the other, by launches for both halves."""
        native, on = self.native, self.on
        for number, channel in enumerate(self.channels):
            self.prepare(channel, number)
            self.delay()
            native.dispatch(on, number, *self.sent(channel), *self.received(channel))
            self.experts(channel)
            self.delay()
            outputs, combined = channel.outputs.data_ptr(), channel.combined.data_ptr()
            most = self.shape.max_tokens
            native.combine(on, number, outputs, combined, channel.count.data_ptr(), most, False)
            self.judge(channel)
        self.round.add_(1)

    def synchronise(self) -> None:
        """Wait for this rank's launches."""
        if self.stream is not None:
            self.stream.synchronize()

    @property
    def on(self) -> int:
        return 0 if self.stream is None else self.stream.cuda_stream

    def sent(self, channel: Channel) -> tuple[int, ...]:
        tokens, ids, weights = channel.tokens, channel.ids, channel.weights
        pointers = (
            tokens.data_ptr(),
            0,
            ids.data_ptr(),
            weights.data_ptr(),
            channel.count.data_ptr(),
        )
        return (*pointers, self.shape.max_tokens)

    def received(self, channel: Channel) -> tuple[int, ...]:
        scales = channel.scales.data_ptr() if self.shape.scales else 0
        return (
            channel.arrived.data_ptr(),
            scales,
            channel.counts.data_ptr(),
            channel.offsets.data_ptr(),
            channel.rows.data_ptr(),
            channel.arrived_weights.data_ptr(),
        )

    def prepare(self, channel: Channel, number: int) -> None:
        """Copy this round's batch, and reset the outputs to `UNWRITTEN`."""
        index = (self.round * CHANNELS + number) % BATCHES
        channel.ids.copy_(self.all_ids[index][0])
        channel.weights.copy_(self.all_weights[index][0])
        channel.count.copy_(self.all_counts[index][0])
        channel.tokens.copy_((self.base + self.round) % 8)
        for output in (channel.arrived, channel.outputs, channel.combined):
            output.view(torch.uint8).fill_(0xA5)
        channel.offsets.fill_(0)

    def experts(self, channel: Channel) -> None:
        """Expert outputs: even ones multiply by one, odd ones by two."""
        group = torch.searchsorted(channel.offsets, self.positions, right=True) - 1
        factor = 1 + (group + self.first) % 2
        values = channel.arrived.float()
        if self.shape.scales:
            # The exponent in a power of two.
            scale = (channel.scales.int() << 23).view(torch.float32)
            block = self.shape.scales[1]
            values = values * scale.repeat_interleave(block, dim=1)[:, : self.shape.hidden]
        channel.outputs.copy_(values * factor[:, None])

    def judge(self, channel: Channel) -> None:
        """Count wrong values; the unwritten output fill is always wrong."""
        factor = torch.where(channel.ids >= 0, 1 + channel.ids % 2, 0)
        total = (channel.weights * factor).sum(dim=1, keepdim=True)
        right = channel.tokens.float() * total
        exists = self.token < channel.count
        differs = (channel.combined.float() != right) & exists
        self.wrong.add_(differs.sum())

    def graphs(self, play: Callable[[], None], many: int) -> list[torch.cuda.CUDAGraph]:
        """Captures of `play`, each with separate delays."""
        made = []
        for _ in range(many):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                play()
            made.append(graph)
        return made


def shapes() -> list[Shape]:
    """One for each path, with tokens as they are and cast to codes."""
    small: dict[str, Any] = {"experts": 32, "top_k": 4, "hidden": 512}
    cast: dict[str, Any] = {"wire_dtype": "float8_e4m3fn", "scales": ("float8_e8m0fnu", 128)}
    return [
        Shape(**small, max_tokens=4, path="packets"),
        Shape(**small, **cast, max_tokens=3, path="packets"),
        Shape(**small, max_tokens=64, path="latency"),
        Shape(**small, **cast, max_tokens=96, path="latency", pad_to=8),
        Shape(**small, max_tokens=200, path="bandwidth"),
        Shape(**small, **cast, max_tokens=130, path="bandwidth", layout="padded"),
    ]
