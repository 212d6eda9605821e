"""Every collective of a backend beside gloo, with random shapes, layouts and dtypes."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from tests.workers.backend.process_group import TIMEOUT, beside_gloo, named, start

INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
COMMON = ["SUM", "PRODUCT", "MIN", "MAX"]
OPS = {
    **{dtype: [*COMMON, "BAND", "BOR", "BXOR"] for dtype in INTEGERS},
    **{dtype: [*COMMON, "AVG"] for dtype in FLOATS},
    **{dtype: ["SUM", "AVG"] for dtype in COMPLEX},
}
#: Reduced in another order than by gloo.
TOLERANCES = {
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}

#: Arguments to a collective: this rank's random source, equal random source, dtype, op, group.
Case = Callable[["Inputs"], list[Any]]


class Inputs:
    """Random tensors: the shape is equal on all ranks, the values are this rank's."""

    def __init__(self, seed: str, dtype: Any, op: Any, group: Any) -> None:
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self.common = random.Random(seed)
        self.values = torch.Generator().manual_seed(
            random.Random(f"{seed} {self.rank}").getrandbits(40)
        )
        self.dtype, self.op, self.group = dtype, op, group
        self.is_reference = distributed.get_backend(group) == "gloo"
        self.root = self.common.randrange(self.ranks)

    def peer(self, rank: int) -> int:
        """Default-group number for a rank in the group."""
        return int(distributed.get_global_rank(self.group or distributed.group.WORLD, rank))

    def shape(self) -> list[int]:
        return [self.common.choice([0, 1, 2, 3, 5, 17]) for _ in range(self.common.randint(1, 3))]

    def tensor(self, shape: list[int]) -> Any:
        """Small values, so that products and sums stay in range; sometimes not contiguous."""
        values = torch.randint(-2, 3, shape, generator=self.values).double()
        if self.dtype.is_floating_point:
            values += torch.rand(shape, generator=self.values).double()
        if self.dtype in (torch.uint8, torch.bool):
            values = values.abs()
        values = values.to(self.dtype)
        if self.dtype.is_complex:
            values += 1j * torch.randint(-2, 3, shape, generator=self.values)
        layout = self.common.choice(["contiguous", "transposed", "strided"])
        if self.is_reference:
            # Gloo reads and writes tensors that are not contiguous as if they were.
            return values
        if layout == "transposed" and len(shape) > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "strided":
            return torch.stack([values, values], -1)[..., 0]
        return values

    def tensors(self, shape: list[int]) -> list[Any]:
        return [self.tensor(shape) for _ in range(self.ranks)]


def all_reduce(inputs: Inputs) -> list[Any]:
    value = inputs.tensor(inputs.shape())
    distributed.all_reduce(value, inputs.op, group=inputs.group)
    return [value]


def reduce(inputs: Inputs) -> list[Any]:
    value = inputs.tensor(inputs.shape())
    distributed.reduce(value, inputs.peer(inputs.root), inputs.op, group=inputs.group)
    return [value] if inputs.rank == inputs.root else []


def reduce_scatter(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    parts, output = inputs.tensors(shape), inputs.tensor(shape)
    distributed.reduce_scatter(output, parts, inputs.op, group=inputs.group)
    return [output]


def reduce_scatter_tensor(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    source = inputs.tensor([inputs.ranks * shape[0], *shape[1:]]).contiguous()
    output = inputs.tensor(shape).contiguous()
    distributed.reduce_scatter_tensor(output, source, inputs.op, group=inputs.group)
    return [output]


def broadcast(inputs: Inputs) -> list[Any]:
    value = inputs.tensor(inputs.shape())
    distributed.broadcast(value, inputs.peer(inputs.root), group=inputs.group)
    return [value]


def all_gather(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    outputs = [each.contiguous() for each in inputs.tensors(shape)]
    distributed.all_gather(outputs, inputs.tensor(shape).contiguous(), group=inputs.group)
    return outputs


def all_gather_into_tensor(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    output = inputs.tensor([inputs.ranks * shape[0], *shape[1:]]).contiguous()
    source = inputs.tensor(shape).contiguous()
    distributed.all_gather_into_tensor(output, source, group=inputs.group)
    return [output]


def all_to_all_single(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    shape[0] *= inputs.ranks
    source, output = inputs.tensor(shape).contiguous(), inputs.tensor(shape).contiguous()
    distributed.all_to_all_single(output, source, group=inputs.group)
    return [output]


def all_to_all_uneven(inputs: Inputs) -> list[Any]:
    everyone = range(inputs.ranks)
    sizes = [[inputs.common.choice([0, 1, 4, 9]) for _ in everyone] for _ in everyone]
    sent, received = sizes[inputs.rank], [row[inputs.rank] for row in sizes]
    row = inputs.shape()[1:]
    source = inputs.tensor([sum(sent), *row]).contiguous()
    output = inputs.tensor([sum(received), *row]).contiguous()
    distributed.all_to_all_single(output, source, received, sent, group=inputs.group)
    return [output]


def gather(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    source, outputs = inputs.tensor(shape), [each.contiguous() for each in inputs.tensors(shape)]
    is_root = inputs.rank == inputs.root
    root = inputs.peer(inputs.root)
    distributed.gather(source, outputs if is_root else None, root, group=inputs.group)
    return outputs if is_root else []


def scatter(inputs: Inputs) -> list[Any]:
    shape = inputs.shape()
    parts, output = inputs.tensors(shape), inputs.tensor(shape).contiguous()
    parts = [each.contiguous() for each in parts]
    is_root = inputs.rank == inputs.root
    root = inputs.peer(inputs.root)
    distributed.scatter(output, parts if is_root else None, root, group=inputs.group)
    return [output]


def ring(inputs: Inputs) -> list[Any]:
    """A message to the next rank and one from the previous."""
    shape = inputs.shape()
    source, output = inputs.tensor(shape).contiguous(), inputs.tensor(shape).contiguous()
    after, before = ((inputs.rank + step) % inputs.ranks for step in (1, -1))
    after, before = inputs.peer(after), inputs.peer(before)
    works = [
        distributed.isend(source, after, inputs.group, tag=3),
        distributed.irecv(output, before, inputs.group, tag=3),
    ]
    for work in works:
        work.wait()
    return [output]


REDUCTIONS: list[Case] = [all_reduce, reduce, reduce_scatter, reduce_scatter_tensor]
MOVES: list[Case] = [
    broadcast,
    all_gather,
    all_gather_into_tensor,
    all_to_all_single,
    all_to_all_uneven,
    gather,
    scatter,
    ring,
]


def cases(repeats: int, ranks: int) -> Iterator[tuple[str, Case, Any, Any]]:
    """Name, collective, dtype and op in each case. A gloo rank sends no messages to itself."""
    for repeat in range(repeats):
        for dtype, ops in OPS.items():
            moves = MOVES if ranks > 1 else MOVES[:-1]
            for collective in moves:
                if dtype.is_complex and collective is gather:
                    # Gloo lacks it.
                    continue
                yield f"{repeat} {collective.__name__} {dtype}", collective, dtype, None
            for op in ops:
                for collective in REDUCTIONS:
                    name = f"{repeat} {collective.__name__} {dtype} {op}"
                    yield name, collective, dtype, getattr(distributed.ReduceOp, op)


def differs(expected: Any, found: Any) -> bool:
    tolerance = TOLERANCES.get(expected.dtype, 0)
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    return not torch.allclose(found.to(wide), expected.to(wide), rtol=tolerance, atol=tolerance)


def compare(backend: str, repeats: int, seed: str) -> dict[str, Any]:
    """Names of the cases whose results differ from gloo's, and the number of cases."""
    wrong, count = [], 0
    with beside_gloo(backend) as group:
        for name, collective, dtype, op in cases(repeats, distributed.get_world_size()):
            count += 1
            expected = collective(Inputs(f"{seed} {name}", dtype, op, None))
            found = collective(Inputs(f"{seed} {name}", dtype, op, group))
            if any(map(differs, expected, found)):
                wrong.append(f"{name}: expected {expected}, found {found}")
    return {"wrong": wrong, "cases": count}


def concurrent(backend: str, calls: int, seed: str) -> dict[str, Any]:
    """Random call sequences on several groups at once, each from a separate thread.

    Groups overlap; each has a gloo twin, on which its thread makes the same calls.
    """
    wrong: list[str] = []
    start("gloo")
    members = [[0, 1, 2, 3], [0, 1], [3, 1, 2], [0, 2, 3], [2, 3], [0, 1, 2, 3]]
    pairs = [
        [
            distributed.new_group(ranks, backend=each, timeout=TIMEOUT)
            for each in ("gloo", named(backend))
        ]
        for ranks in members
    ]

    def run(number: int) -> None:
        gloo, group = pairs[number]
        chance = random.Random(f"{seed} {number}")
        every = list(cases(1, len(members[number])))
        try:
            for call in range(calls):
                name, collective, dtype, op = chance.choice(every)
                source = f"{seed} {number} {call} {name}"
                expected = collective(Inputs(source, dtype, op, gloo))
                found = collective(Inputs(source, dtype, op, group))
                if any(map(differs, expected, found)):
                    wrong.append(f"{source}: expected {expected}, found {found}")
        except Exception as error:
            wrong.append(f"{number}: {error}")

    rank = distributed.get_rank()
    mine = [each for each, ranks in enumerate(members) if rank in ranks]
    threads = [threading.Thread(target=run, args=(each,)) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    distributed.barrier()
    distributed.destroy_process_group()
    return {"wrong": wrong, "groups": len(mine)}
