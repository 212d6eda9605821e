"""Sides of the benchmark of device collectives: Weft, NCCL, NCCL on windows, torch's operators.

A side binds a case to memory of its own kind and returns calls on it. Every side takes the same
inputs; NCCL and torch's two-shot operator reduce in place, the others write to another buffer.
NVLink multicast is off for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectives_cases import Case
    from collectives_context import Context

__all__ = [
    "Bound",
    "CopyEngines",
    "Nccl",
    "Side",
    "Symmetric",
    "Torch",
    "Weft",
    "Windows",
    "lengths",
    "sides_of",
    "swept",
]

#: Longest vector of a one-shot all-reduce of torch, which reads all of it from every rank.
ONE_SHOT_BYTES: Final = 8 << 20
#: Shortest vector of copy engines on GPUs.
COPIED_BYTES: Final = 1 << 20
#: Alignment of buffers in an arena, in bytes.
ALIGNMENT: Final = 4096


@dataclass
class Bound:
    """A case on a side's memory."""

    inputs: list[Any]
    #: The result of each input; the input itself if the side reduces in place.
    outputs: list[Any]
    #: Enqueue the operation on a buffer.
    call: Callable[[int], None]
    #: Enqueue a rendezvous of all ranks.
    meet: Callable[[], None]

    @property
    def in_place(self) -> bool:
        """True if results replace inputs."""
        return any(a is b for a, b in zip(self.inputs, self.outputs, strict=True))


def lengths(case: Case, ranks: int) -> tuple[int, int]:
    """Elements of a rank's input and output."""
    if case.operation == "barrier":
        return 0, 0
    part = max(1, case.bytes // 2 // ranks)
    own, whole = part, part * ranks
    if case.operation == "all_gather":
        return own, whole
    return whole, own if case.operation == "reduce_scatter" else whole


class Side:
    """A library, or an algorithm of it."""

    name = ""
    #: Weft's sides are checked bit for bit, and their failure is that of the case.
    ours = False

    def __init__(self, context: Context) -> None:
        self.context, self.torch = context, context.device.torch
        self._ready = False

    def ready(self) -> None:
        """Set up the library, once."""
        if not self._ready:
            self.start()
            self._ready = True

    def unable(self, case: Case) -> str | None:
        """Reason for which the side does not take part; None if it does."""
        return None

    def start(self) -> None:
        """Set up the library; a collective call."""

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""

    def bind(self, case: Case) -> Bound:
        """Allocate buffers and return the calls; a collective call."""
        raise NotImplementedError

    def memory(self, elements: int) -> Any:
        """An uninitialised buffer."""
        name = self.context.device.name
        return self.torch.empty(elements, dtype=self.context.dtype, device=name)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue a collective; its result, which is `given` if the side works in place."""
        raise NotImplementedError

    def buffers(self, case: Case, *, in_place: bool = False) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs."""
        taken, made = lengths(case, self.context.ranks)
        inputs = [self.memory(taken) for _ in range(case.buffers)]
        if in_place:
            return inputs, inputs
        return inputs, [self.memory(made) for _ in range(case.buffers)]


class Arena:
    """One allocation that every case is given parts of, at the same offsets on all ranks."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.used = memory, 0

    def take(self, elements: int) -> Any:
        """The next part."""
        begin = self.used
        self.used = -(-(begin + 2 * elements) // ALIGNMENT) * ALIGNMENT
        return self.memory[begin // 2 : begin // 2 + elements]


def arena_elements(cases: list[Case], ranks: int) -> int:
    """Elements that the largest case takes of an arena."""
    most = 0
    for case in cases:
        each = sum(-(-2 * count // ALIGNMENT) * ALIGNMENT for count in lengths(case, ranks))
        most = max(most, case.buffers * each)
    return max(most, ALIGNMENT) // 2


class Weft(Side):
    """`weft.cuda.Collectives`."""

    ours = True

    def __init__(
        self, context: Context, name: str = "weft", most_sms: int | None = None, **options: Any
    ) -> None:
        super().__init__(context)
        #: Multiprocessors of the construction; None: Weft's choice.
        self.name, self.most_sms, self.options = name, most_sms, options
        #: Memory that sides share; None: each has its own.
        self.arena: Arena | None = None

    def start(self) -> None:
        """Construct the collectives and compile their kernels."""
        self.collectives = self.context.collectives(self.most_sms)

    def check(self) -> None:
        """Raise the error of a wait that timed out."""
        self.collectives.check()

    def bind(self, case: Case) -> Bound:
        """Results go to buffers apart from the inputs.

        Sides with one arena have the same buffers: they run in turn, each writes the inputs anew
        before a replay, and results are judged before the next side runs.
        """
        if self.arena is not None:
            self.arena.used = 0
        inputs, outputs = self.buffers(case)
        collectives = self.collectives

        def call(slot: int) -> None:
            if case.operation == "barrier":
                collectives.barrier()
            else:
                self.operate(case.operation, inputs[slot], outputs[slot])

        return Bound(inputs, outputs, call, collectives.barrier)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue a collective into `out`."""
        getattr(self.collectives, operation)(given, out=out, **self.options)
        return out

    def memory(self, elements: int) -> Any:
        """A part of the arena, if there is one."""
        return super().memory(elements) if self.arena is None else self.arena.take(elements)


class Symmetric(Weft):
    """`weft.cuda.Collectives` on its symmetric memory."""

    def __init__(
        self,
        context: Context,
        name: str = "weft symmetric",
        most_sms: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(context, name, most_sms, **options)

    def start(self) -> None:
        """Allocate symmetric memory, which all sides of this class share."""
        super().start()
        self.arena = self.context.once("symmetric", self.allocate)

    def allocate(self) -> Arena:
        """Symmetric memory for the largest case."""
        elements = arena_elements(self.context.cases, self.context.ranks)
        return Arena(self.collectives.symmetric_empty(elements, self.context.dtype))


class CopyEngines(Symmetric):
    """`weft.cuda.Collectives` by copy engines, on its symmetric memory."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, "weft copy engines", copy_engine=True)

    def unable(self, case: Case) -> str | None:
        """Copy engines take long calls."""
        if case.bytes < COPIED_BYTES and self.context.device.kind == "cuda":
            return f"measured from {COPIED_BYTES} bytes on"
        return super().unable(case)


class Nccl(Side):
    """torch.distributed with NCCL."""

    name = "nccl"

    def unable(self, case: Case) -> str | None:
        """NCCL takes one rank for each GPU."""
        ranks, gpus = self.context.ranks, self.context.gpus
        return None if ranks <= gpus else f"NCCL does not take {ranks} ranks on {gpus} GPUs"

    def start(self) -> None:
        """Join the group."""
        self.distributed = self.context.distributed()
        name = self.context.device.name
        self.token = self.torch.zeros(1, device=name)

    def meet(self) -> None:
        """All-reduce of one element."""
        self.distributed.all_reduce(self.token)

    def bind(self, case: Case) -> Bound:
        """All-reduce replaces its input."""
        inputs, outputs = self.buffers(case, in_place=case.operation == "all_reduce")

        def call(slot: int) -> None:
            if case.operation == "barrier":
                self.meet()
            else:
                self.operate(case.operation, inputs[slot], outputs[slot])

        return Bound(inputs, outputs, call, self.meet)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue a collective; an all-reduce is in place."""
        distributed = self.distributed
        if operation == "all_reduce":
            distributed.all_reduce(given)
            return given
        if operation == "all_gather":
            distributed.all_gather_into_tensor(out, given)
        elif operation == "reduce_scatter":
            distributed.reduce_scatter_tensor(out, given)
        else:
            distributed.all_to_all_single(out, given)
        return out


class Windows(Nccl):
    """NCCL on memory registered as symmetric windows."""

    name = "nccl windows"

    def start(self) -> None:
        """Allocate by NCCL's allocator and register the pool."""
        super().start()
        torch, name = self.torch, self.context.device.name
        # `symm_mem.set_backend("NCCL")` would exclude torch's own operators from this process.
        backend = self.distributed.group.WORLD._get_backend(torch.device(name))
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        elements = arena_elements(self.context.cases, self.context.ranks)
        with torch.cuda.use_mem_pool(self.pool):
            self.arena = Arena(torch.empty(elements, dtype=self.context.dtype, device=name))
        backend.register_mem_pool(self.pool, symm=True)

    def bind(self, case: Case) -> Bound:
        """Buffers are parts of the arena."""
        self.arena.used = 0
        return super().bind(case)

    def memory(self, elements: int) -> Any:
        """A part of the arena."""
        return self.arena.take(elements)


class Torch(Nccl):
    """Operators of torch on its symmetric memory, without multicast."""

    def __init__(self, context: Context, algorithm: str | None = None) -> None:
        super().__init__(context)
        self.name, self.algorithm = " ".join(filter(None, ("torch", algorithm))), algorithm

    def unable(self, case: Case) -> str | None:
        """One-shot is for short vectors."""
        if self.algorithm == "one_shot" and case.bytes > ONE_SHOT_BYTES:
            return f"measured up to {ONE_SHOT_BYTES} bytes"
        return super().unable(case)

    def start(self) -> None:
        """Allocate symmetric memory, which both operators share."""
        super().start()
        self.arena, self.handle = self.context.once("torch", self.allocate)

    def allocate(self) -> tuple[Arena, Any]:
        """Symmetric memory for the largest all-reduce, and its handle."""
        symmetric = import_module("torch.distributed._symmetric_memory")
        reductions = [case for case in self.context.cases if case.operation == "all_reduce"]
        elements = arena_elements(reductions, self.context.ranks)
        name = self.context.device.name
        memory = symmetric.empty(elements, dtype=self.context.dtype, device=name)
        return Arena(memory), symmetric.rendezvous(memory, self.distributed.group.WORLD)

    def meet(self) -> None:
        """Barrier of the memory."""
        self.handle.barrier(channel=0)

    def bind(self, case: Case) -> Bound:
        """Inputs are parts of the arena; outputs of the one-shot operator are ordinary memory."""
        # Both operators of a case have parts: the second one's come behind the first one's.
        if self.context.binding != case.name:
            self.context.binding, self.arena.used = case.name, 0
        taken, made = lengths(case, self.context.ranks)
        inputs = [self.arena.take(taken) for _ in range(case.buffers)]
        if case.operation == "barrier":
            return Bound(inputs, inputs, lambda slot: self.meet(), self.meet)
        outputs = inputs
        if self.algorithm == "one_shot":
            outputs = [self.memory(made) for _ in range(case.buffers)]

        def call(slot: int) -> None:
            self.operate(case.operation, inputs[slot], outputs[slot])

        return Bound(inputs, outputs, call, self.meet)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue an all-reduce of a part of the arena."""
        group = self.distributed.group.WORLD.group_name
        operators = self.torch.ops.symm_mem
        if self.algorithm == "two_shot":
            operators.two_shot_all_reduce_(given, "sum", group)
            return given
        operators.one_shot_all_reduce_out(given, "sum", group, out)
        return out


def sides_of(context: Context) -> dict[str, list[Side]]:
    """Sides by operation, Weft first; sides of an operation share its libraries."""
    weft, symmetric = Weft(context), Symmetric(context)
    copies = CopyEngines(context)
    algorithms = [Weft(context, f"weft {a}", algorithm=a) for a in ("one_shot", "two_shot")]
    if context.device.kind == "twin":
        exchanges: list[Side] = [weft, symmetric, copies]
        return {
            "all_reduce": [weft, symmetric, *algorithms],
            "all_gather": exchanges,
            "all_to_all": exchanges,
            "other": [weft, symmetric],
            "barrier": [weft],
        }
    nccl, windows = Nccl(context), Windows(context)
    operators = [Torch(context, name) for name in ("one_shot", "two_shot")]
    exchanges = [weft, symmetric, copies, nccl, windows]
    return {
        "all_reduce": [weft, symmetric, *algorithms, nccl, windows, *operators],
        "all_gather": exchanges,
        "all_to_all": exchanges,
        "other": [weft, symmetric, nccl, windows],
        "barrier": [weft, nccl, Torch(context)],
    }


def swept(context: Context, case: Case) -> list[Side]:
    """Sides of a sweep: Weft's choices, then each number of multiprocessors, by kind of memory."""
    most = max(case.num_sms)
    ordinary, symmetric = [Weft(context)], [Symmetric(context)]
    for sms in case.num_sms:
        options: dict[str, Any] = {"most_sms": most, "num_sms": sms}
        ordinary.append(Weft(context, f"weft {sms} SMs", algorithm="two_shot", **options))
        name = f"weft symmetric {sms} SMs"
        symmetric.append(Symmetric(context, name, algorithm="direct", **options))
    arena = Arena(ordinary[0].memory(arena_elements([case], context.ranks)))
    for side in ordinary:
        side.arena = arena
    return [*ordinary, *symmetric]
