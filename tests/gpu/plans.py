"""A group's rounds in this process, each rank on a separate thread."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft import cuda

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator


class Sent(NamedTuple):
    """A rank's dispatch input, and other tokens for the same experts."""

    tokens: torch.Tensor
    others: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Seen(NamedTuple):
    """A round's outcome on the CPU, without unwritten bytes."""

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: list[int]
    offsets: list[int]
    rows: list[int]
    weights: torch.Tensor
    #: The local expert for each row, in layouts for grouped GEMMs.
    experts: list[int] | None
    combined: torch.Tensor


class Group:
    """All ranks with one shape.

    Args:
        kind: "cuda" or "twin".
        ranks: rank count.
        shape: arguments to `weft.cuda.AllToAll`.
    """

    def __init__(self, kind: str, ranks: int, **shape: Any) -> None:
        self.kind, self.shape = kind, shape
        devices = ["twin"] * ranks
        if kind == "cuda":
            devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(ranks)]
        self.members = cuda.local_group(ranks, devices, **shape)
        self.streams = [
            torch.cuda.Stream(device=member.device) if kind == "cuda" else None
            for member in self.members
        ]
        self._pool = ThreadPoolExecutor(ranks)

    def run(self, work: Callable[[int, cuda.AllToAll], Any]) -> list[Any]:
        """Call `work` for each rank concurrently; their results."""

        def one(rank: int) -> Any:
            with self.on(rank):
                return work(rank, self.members[rank])

        return [each.result(60) for each in [self._pool.submit(one, r) for r in self.ranks]]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.members))

    def raised(self) -> list[str]:
        """Error from `check` on each rank: class and text."""
        texts = []
        for member in self.members:
            try:
                member.check()
                texts.append("")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    def close(self) -> None:
        """Free all memory."""
        self._pool.shutdown()
        for member in self.members:
            member.close()

    @contextlib.contextmanager
    def on(self, rank: int, *, wait: bool = True) -> Iterator[None]:
        """A rank's calls on its stream, which is synchronised at the end."""
        stream = self.streams[rank]
        if stream is None:
            yield
            return
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield
            if wait:
                stream.synchronize()


def draw(chance: random.Random, path: str) -> dict[str, Any]:
    """A path's shape."""
    layouts = ["contiguous", "padded"] if path == "packets" else ["contiguous", "padded", "indexed"]
    most = {"packets": 8, "latency": 60, "bandwidth": 200}[path]
    experts = chance.randint(1, 24)
    shape: dict[str, Any] = {
        "experts": experts,
        "top_k": chance.randint(1, min(8, experts)),
        "hidden": 16 * chance.randint(1, 40),
        "max_tokens": chance.randint(1, most),
        "layout": chance.choice(layouts),
        "dtype": chance.choice(["bfloat16", "float32"]),
        "weighting": chance.choice(["combine", "expert"]),
        "path": path,
    }
    if shape["layout"] == "contiguous":
        shape["pad_to"] = chance.choice([1, 4, 16])
    if chance.random() < 0.5:
        shape |= {"wire_dtype": "float8_e4m3fn", "block": 32, "dtype": "bfloat16"}
    return shape


def batch(chance: random.Random, member: cuda.AllToAll) -> Sent:
    """A rank's tokens, some with masked slots."""
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    given = chance.randint(0, member.max_tokens)
    keys = torch.rand(given, member.experts, generator=generator)
    ids = keys.argsort(1)[:, : member.top_k].to(getattr(torch, member.ids_dtype)).contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    dtype = getattr(torch, member.dtype)
    rows = torch.randn(2, given, member.hidden, generator=generator).to(dtype)
    weights = torch.rand(ids.shape, generator=generator)
    return Sent(*(each.to(member.device) for each in (rows[0], rows[1], ids, weights)))


def outputs(member: cuda.AllToAll, received: cuda.Received, rows: int) -> torch.Tensor:
    """Expert outputs in a round, functions of token and position."""
    dtype = getattr(torch, member.combine_dtype)
    numbers = torch.arange(rows, device=member.device)[:, None]
    columns = torch.arange(member.hidden, device=member.device)[None, :]
    return ((numbers * 37 + columns * 11) % 97 / 16 - 3).to(dtype).contiguous()


def see(
    member: cuda.AllToAll, received: cuda.Received, halves: bool, rows: int | None = None
) -> Seen:
    """End a round and return its outcome; `rows` outputs, by default one for each position."""
    end = int(received.expert_offsets[-1])
    numbers, weights = received.rows[:end], received.weights[:end].cpu()
    real = (numbers >= 0).nonzero()[:, 0]
    at = numbers[real].long() if member.layout == "indexed" else real
    tokens = received.tokens[at].cpu()
    scales = None if received.scales is None else received.scales[at].cpu()
    counts, offsets = received.expert_counts.tolist(), received.expert_offsets.tolist()
    indices = received.m_indices
    experts = None if indices is None else indices[:end].tolist()
    made = outputs(member, received, received.positions if rows is None else rows)
    if halves:
        combined = member.combine_send(received, made).recv()
    else:
        combined = member.combine(received, made)
    rows_of = counts, offsets, numbers.tolist()
    result = Seen(tokens, scales, *rows_of, weights, experts, combined.cpu())
    received.release()
    return result


def same(left: Seen, right: Seen) -> bool:
    """True if two rounds are equal bit by bit."""
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(bits(mine), bits(theirs)) if isinstance(mine, torch.Tensor) else mine == theirs
        for mine, theirs in pairs
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers, for bit comparison."""
    return tensor.contiguous().view(torch.uint8)
