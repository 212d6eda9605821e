"""Random collective calls with their results on the CPU, and groups that make them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.gpu.collective_reference import BITWISE, FLOATS, INTEGERS, OPS, drawn, reduce, to_bytes
from weft import cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.gpu.collective_reference import Array

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
EXCHANGES = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")
#: Calls whose input has a part for each rank, and whose output has.
PARTED = ("reduce_scatter", "all_to_all", "scatter")
GATHERED = ("all_gather", "all_to_all", "gather")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
#: Calls that have a direct form, for tensors in symmetric memory.
DIRECT = (
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "scatter",
)
#: Dtypes without arithmetic.
OTHERS = ("float8_e4m3fnuz", "complex64", "complex128")
#: Guard bytes around tensors, and their value.
GUARD, UNWRITTEN = 64, 0xA5


@dataclass
class Call:
    """A call on all ranks."""

    name: str
    dtype: str = "float32"
    op: str = "sum"
    #: Rows in a part, and elements in a row.
    rows: int = 4
    row: tuple[int, ...] = (3,)
    root: int = 0
    #: "new": allocated by the call; "out": given; "in place".
    mode: str = "out"
    #: Elements from an aligned address; `mixed`: on even ranks only.
    offset: int = 0
    mixed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    #: True if tensors are in symmetric memory.
    symmetric: bool = False
    #: For an uneven all-to-all: rows from each rank to each.
    splits: list[list[int]] | None = None

    @property
    def width(self) -> int:
        """Bytes in a row."""
        return prod(self.row) * int(torch_dtype(self.dtype).itemsize)

    def input_rows(self, rank: int, ranks: int) -> int:
        if self.splits is not None:
            return sum(self.splits[rank])
        return self.rows * (ranks if self.name in PARTED else 1)

    def output_rows(self, rank: int, ranks: int) -> int:
        if self.splits is not None:
            return sum(each[rank] for each in self.splits)
        return self.rows * (ranks if self.name in GATHERED else 1)

    def memory_bytes(self, ranks: int) -> int:
        """Symmetric memory bytes for the input or output on any rank."""
        rows = [
            rows_of(rank, ranks)
            for rows_of in (self.input_rows, self.output_rows)
            for rank in range(ranks)
        ]
        element = int(torch_dtype(self.dtype).itemsize)
        return max(rows) * self.width + 2 * GUARD + self.offset * element

    def draw(self, random: np.random.Generator, ranks: int) -> list[Array]:
        """Every rank's input bytes."""
        dtype, row = torch_dtype(self.dtype), prod(self.row)
        counts = [self.input_rows(rank, ranks) * row for rank in range(ranks)]
        return [drawn(random, dtype, count) for count in counts]

    def results(self, inputs: list[Array]) -> list[Array | None]:
        """Every rank's output bytes; `None` if it has none."""
        ranks, part = len(inputs), self.rows * self.width
        if self.name == "all_reduce":
            return [reduce(self.op, self.dtype, inputs)] * ranks
        if self.name == "reduce":
            return self._at_root(reduce(self.op, self.dtype, inputs), ranks)
        if self.name == "reduce_scatter":
            whole = reduce(self.op, self.dtype, inputs)
            return [whole[rank * part : (rank + 1) * part] for rank in range(ranks)]
        if self.name == "all_gather":
            return [np.concatenate(inputs)] * ranks
        if self.name == "gather":
            return self._at_root(np.concatenate(inputs), ranks)
        if self.name == "broadcast":
            return [inputs[self.root]] * ranks
        if self.name == "scatter":
            source = inputs[self.root]
            return [source[rank * part : (rank + 1) * part] for rank in range(ranks)]
        splits = self.splits or [[self.rows] * ranks] * ranks
        parts = [
            np.split(given, np.cumsum(sizes)[:-1] * self.width)
            for given, sizes in zip(inputs, splits, strict=True)
        ]
        return [np.concatenate([each[rank] for each in parts]) for rank in range(ranks)]

    def _at_root(self, result: Array, ranks: int) -> list[Array | None]:
        return [result if rank == self.root else None for rank in range(ranks)]


def torch_dtype(name: str) -> torch.dtype:
    made: torch.dtype = getattr(torch, name)
    return made


class Buffer:
    """A rank's rows in guarded memory, at the call's offset."""

    def __init__(
        self, call: Call, rank: int, rows: int, memory: torch.Tensor | torch.device
    ) -> None:
        dtype = torch_dtype(call.dtype)
        offset = 0 if call.mixed and rank % 2 else call.offset
        self.begin = GUARD + offset * dtype.itemsize
        self.bytes = rows * call.width
        size = self.begin + self.bytes + GUARD
        if isinstance(memory, torch.Tensor):
            self.all = memory[:size].fill_(UNWRITTEN)
        else:
            self.all = torch.full((size,), UNWRITTEN, dtype=torch.uint8, device=memory)
        self.tensor = self.own.view(dtype).view(rows, *call.row)

    @property
    def own(self) -> torch.Tensor:
        return self.all[self.begin : self.begin + self.bytes]

    def fill(self, values: Array) -> None:
        self.own.copy_(torch.from_numpy(values))

    def fetch(self) -> Array:
        """Bytes on the CPU; fails if memory around them was written."""
        everything: Array = self.all.cpu().numpy()
        end = self.begin + self.bytes
        around = np.concatenate([everything[: self.begin], everything[end:]])
        assert (around == UNWRITTEN).all(), (
            f"{(around != UNWRITTEN).sum()} bytes around were written"
        )
        return everything[self.begin : end]


class Prepared:
    """A call of one rank: its tensors, made before any launch."""

    def __init__(
        self,
        call: Call,
        rank: int,
        given: Array,
        member: cuda.Collectives,
        memory: Sequence[torch.Tensor] = (),
    ) -> None:
        self.call, self.rank, self.ranks = call, rank, member.world_size
        self.given = given
        #: Source and target memory.
        self.memory: Sequence[torch.Tensor | torch.device] = memory or [member.device] * 2
        if call.symmetric and not memory:
            size = call.memory_bytes(self.ranks)
            self.memory = [member.symmetric_empty(size, torch.uint8) for _ in range(2)]
        part = slice(rank * call.rows, (rank + 1) * call.rows)
        self.source: Buffer | None = None
        self.target: Buffer | None = None
        self.out: torch.Tensor | None = None
        rows = call.input_rows(rank, self.ranks)
        if call.mode == "in place" and call.name in GATHERED and self.has_result:
            self.target = Buffer(call, rank, call.output_rows(rank, self.ranks), self.memory[1])
            self.input = self.target.tensor[part]
            size = call.rows * call.width
            self.target.own[rank * size : (rank + 1) * size].copy_(torch.from_numpy(given))
            self.out = self.target.tensor
            return
        self.source = Buffer(call, rank, rows, self.memory[0])
        self.source.fill(given)
        self.input = self.source.tensor
        if call.mode == "in place" and call.name in PARTED:
            if call.name == "scatter" and rank != call.root:
                self._make_target()
            else:
                self.out = self.input[part]
        elif call.name == "scatter" or (call.mode == "out" and self.has_result):
            self._make_target()

    def _make_target(self) -> None:
        if self.call.name != "broadcast":
            rows = self.call.output_rows(self.rank, self.ranks)
            self.target = Buffer(self.call, self.rank, rows, self.memory[1])
            self.out = self.target.tensor

    @property
    def has_result(self) -> bool:
        return self.call.name not in ("reduce", "gather") or self.rank == self.call.root

    def make(self, member: cuda.Collectives, **more: Any) -> Any:
        """Make the call; its result."""
        call, options = self.call, self.call.options | more
        arguments: list[Any] = [self.input]
        if call.name == "scatter" and self.rank != call.root:
            arguments = [None]
        if call.name in ROOTED:
            arguments.append(call.root)
        if call.name in REDUCTIONS:
            options["op"] = call.op
        if call.name != "broadcast" and self.out is not None:
            options["out"] = self.out
        if call.splits is not None:
            options["input_splits"] = call.splits[self.rank]
            options["output_splits"] = [each[self.rank] for each in call.splits]
        return getattr(member, call.name)(*arguments, **options)

    def check(self, result: torch.Tensor | None, expected: Array | None) -> None:
        """Compare the result and all memory with what is expected."""
        if expected is None:
            assert result is None, self.call
        else:
            assert result is not None, self.call
            assert result.dtype == torch_dtype(self.call.dtype), self.call
            assert result.shape[1:] == self.call.row, self.call
            seen = to_bytes(result)
            wrong = np.flatnonzero(seen != expected)
            assert not len(wrong), (self.call, self.rank, len(wrong), wrong[:4])
        if self.target is not None:
            self.target.fetch()
        if self.source is None:
            return
        left = self.given.copy()
        if self.call.name in ("all_reduce", "reduce", "broadcast") and self.out is None:
            left[:] = left if expected is None else expected
        elif self.out is not None and self.target is None and expected is not None:
            size = self.call.rows * self.call.width
            left[self.rank * size : (self.rank + 1) * size] = expected
        changed = np.flatnonzero(self.source.fetch() != left)
        assert not len(changed), (self.call, self.rank, "input", changed[:4])


class Group:
    """All ranks in a group in this process.

    Args:
        kind: "cuda" or "twin".
        ranks: rank count; GPUs are taken in turn.
        options: arguments to `weft.cuda.local_collectives`.
    """

    def __init__(self, kind: str, ranks: int, **options: Any) -> None:
        self.kind = kind
        devices = ["twin"] * ranks
        if kind == "cuda":
            gpus = torch.cuda.device_count()
            devices = [f"cuda:{rank % gpus}" for rank in range(ranks)]
            # Kernels that wait for each other are resident together.
            processors = torch.cuda.get_device_properties(0).multi_processor_count
            options.setdefault("num_sms", min(32, processors // 2 // -(-ranks // gpus)))
        self.members = cuda.local_collectives(ranks, devices, **options)
        self.streams = [
            torch.cuda.Stream(device=each.device) if kind == "cuda" else None
            for each in self.members
        ]
        #: True if ranks share GPUs.
        self.shared = kind == "cuda" and ranks > torch.cuda.device_count()
        self._pool = ThreadPoolExecutor(ranks)

    @property
    def ranks(self) -> range:
        return range(len(self.members))

    def run(self, work: Callable[[int, cuda.Collectives], Any], seconds: float = 60) -> list[Any]:
        """Call `work` for each rank, and wait until its launches end.

        Ranks have a thread each. Those that share GPUs are launched by one, since calls on the host
        wait for each other there.
        """

        def one(rank: int) -> Any:
            with self.on(rank):
                return work(rank, self.members[rank])

        if self.shared:
            results = [one(rank) for rank in self.ranks]
        else:
            waits = [self._pool.submit(one, rank) for rank in self.ranks]
            results = [each.result(seconds) for each in waits]
        self.synchronise()
        return results

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """A rank's calls on its stream."""
        stream = self.streams[rank]
        if stream is None:
            yield
            return
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def synchronise(self) -> None:
        """Wait for all GPUs."""
        if self.kind == "cuda":
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)

    def prepare(self, calls: list[Call]) -> None:
        """Load the calls' kernels."""
        pairs = {(each.op, each.dtype) for each in calls if each.name in REDUCTIONS}
        for member in self.members:
            for op, dtype in sorted(pairs):
                member.prepare(op, torch_dtype(dtype))

    def verify(self, calls: list[Call], seed: int, **more: Any) -> None:
        """Make calls after each other, and compare all results."""
        random, ranks = np.random.default_rng([seed, 1]), len(self.members)
        inputs = [call.draw(random, ranks) for call in calls]
        memory = [self._memory(call) for call in calls]
        prepared = [
            [
                Prepared(call, rank, given[rank], self.members[rank], parts[rank])
                for call, given, parts in zip(calls, inputs, memory, strict=True)
            ]
            for rank in self.ranks
        ]
        self.prepare(calls)
        self.synchronise()

        def work(rank: int, member: cuda.Collectives) -> list[Any]:
            return [each.make(member, **more) for each in prepared[rank]]

        outcomes = self.run(work)
        for number, (call, given) in enumerate(zip(calls, inputs, strict=True)):
            for rank, expected in enumerate(call.results(given)):
                result = outcomes[rank][number]
                if more.get("async_finish"):
                    result, event = result
                    assert event.query()
                prepared[rank][number].check(result, expected)
        assert self.raised() == [""] * ranks

    def _memory(self, call: Call) -> list[list[torch.Tensor]]:
        """By rank: symmetric source and target memory, if the call needs it."""
        if not call.symmetric:
            return [[] for _ in self.members]
        size = call.memory_bytes(len(self.members))
        made = [cuda.local_symmetric_empty(self.members, size, torch.uint8) for _ in range(2)]
        return [list(each) for each in zip(*made, strict=True)]

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
        self.synchronise()
        self._pool.shutdown()
        for member in self.members:
            member.close()


def draw_call(random: np.random.Generator, ranks: int, allocate: bool = True) -> Call:
    """A random call; `allocate`: its result may be allocated by the call."""
    name = str(random.choice([*REDUCTIONS, "all_reduce", *EXCHANGES]))
    reduces = name in REDUCTIONS
    dtype = str(random.choice([*INTEGERS, *FLOATS, *FLOATS, *(() if reduces else OTHERS)]))
    op = str(random.choice([*OPS, *(() if dtype in FLOATS else BITWISE)]))
    modes = ["out", "in place"] if name != "all_to_all" else ["out"]
    call = Call(
        name=name,
        dtype=dtype,
        op=op,
        rows=int(random.choice([0, 1, 2, 5, 16, 33, 200])),
        row=((), (1,), (3,), (8,), (64,), (2, 50), (1000,))[int(random.integers(7))],
        root=int(random.integers(ranks)),
        mode=str(random.choice([*modes, *(["new"] if allocate else [])])),
        offset=int(random.choice([0, 0, 1, 3, 8])),
        mixed=bool(random.random() < 0.5),
    )
    if random.random() < 0.2:
        call.options["num_sms"] = 1
    if name == "all_to_all" and random.random() < 0.5:
        call.splits = random.integers(0, 1 + call.rows, (ranks, ranks)).tolist()
        call.symmetric = bool(random.random() < 0.3)
    elif name in DIRECT and random.random() < 0.5:
        # Tensors that peers access are at the same place on all ranks.
        call.symmetric, call.mixed = True, False
        if name == "scatter":
            # The root's part in place is not where the others have their outputs.
            call.mode = "out"
        # An output that the call allocates is not symmetric.
        if name not in ("all_gather", "all_to_all") or call.mode != "new":
            call.options["algorithm"] = str(
                random.choice(["direct", "direct", "one_shot", "two_shot"])
            )
        if call.options.get("algorithm") == "one_shot" and call.rows * call.width > 2048:
            del call.options["algorithm"]
    elif random.random() < 0.6:
        short = call.rows * call.width <= 2048
        call.options["algorithm"] = str(random.choice(["one_shot", "two_shot"][not short :]))
    return call


def calls_of(seed: int, ranks: int, count: int, *, allocate: bool) -> list[Call]:
    """A seed's random calls."""
    chance = np.random.default_rng(seed)
    return [draw_call(chance, ranks, allocate) for _ in range(count)]


def ranks_of(kind: str, seed: int) -> int:
    """Ranks in a group: on GPUs one for each, or two that share one."""
    if kind == "twin":
        return (2, 3, 4, 1, 5)[seed % 5]
    return max(2, int(torch.cuda.device_count()))
