"""Sides in the device collectives benchmark: Weft, NCCL, NCCL on windows, torch's operators.

A side binds a case to its own kind of memory and returns calls on it. Every side takes the same
inputs; NCCL and torch's two-shot operator reduce in place, the others write to another buffer.
NVLink multicast is off for all sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from harness.side import ALIGNMENT, Arena, Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectives_cases import Case
    from harness.context import Context

__all__ = [
    "Bound",
    "CopyEngines",
    "Exchanging",
    "Nccl",
    "Symmetric",
    "Torch",
    "Weft",
    "Windows",
    "lengths",
    "sides_of",
    "swept",
]

#: Longest vector for torch's one-shot all-reduce, which reads all bytes from every rank.
ONE_SHOT_BYTES: Final = 8 << 20
#: Shortest vector for copy engines on GPUs.
COPIED_BYTES: Final = 1 << 20


@dataclass
class Bound:
    """A case on a side's memory."""

    inputs: list[Any]
    #: Result for each input; the input itself if the side reduces in place.
    outputs: list[Any]
    #: Enqueue the operation on a buffer.
    call: Callable[[int], None]
    #: Enqueue a rendezvous between all ranks.
    meet: Callable[[], None]

    @property
    def in_place(self) -> bool:
        """True if results replace inputs."""
        return any(a is b for a, b in zip(self.inputs, self.outputs, strict=True))


def lengths(case: Case, ranks: int) -> tuple[int, int]:
    """Elements in a rank's input and output."""
    if case.operation == "barrier":
        return 0, 0
    part = max(1, case.bytes // 2 // ranks)
    own, whole = part, part * ranks
    if case.operation == "all_gather":
        return own, whole
    return whole, own if case.operation == "reduce_scatter" else whole


def arena_elements(cases: list[Case], ranks: int) -> int:
    """Elements that the largest case takes from an arena."""
    most = 0
    for case in cases:
        each = sum(-(-2 * count // ALIGNMENT) * ALIGNMENT for count in lengths(case, ranks))
        most = max(most, case.buffers * each)
    return max(most, ALIGNMENT) // 2


class Exchanging(Side):
    """A side with collectives."""

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue a collective; returns the result, which is `given` if the side works in place."""
        raise NotImplementedError

    def buffers(self, case: Case, *, in_place: bool = False) -> tuple[list[Any], list[Any]]:
        """Inputs and outputs."""
        taken, made = lengths(case, self.context.ranks)
        inputs = [self.memory(taken) for _ in range(case.buffers)]
        if in_place:
            return inputs, inputs
        return inputs, [self.memory(made) for _ in range(case.buffers)]

    def calls(
        self, case: Case, inputs: list[Any], outputs: list[Any], meet: Callable[[], None]
    ) -> Bound:
        """The case on these buffers; a barrier is the rendezvous."""

        def call(slot: int) -> None:
            if case.operation == "barrier":
                meet()
            else:
                self.operate(case.operation, inputs[slot], outputs[slot])

        return Bound(inputs, outputs, call, meet)


class Weft(Exchanging):
    """`weft.cuda.Collectives`."""

    ours = True

    def __init__(
        self, context: Context, name: str = "weft", most_sms: int | None = None, **options: Any
    ) -> None:
        super().__init__(context)
        #: SMs passed at construction; None: Weft's choice.
        self.name, self.most_sms, self.options = name, most_sms, options
        #: Memory that sides share; None: each has separate memory.
        self.arena: Arena | None = None

    def start(self) -> None:
        """Construct the collectives and compile the kernels."""
        self.collectives = self.context.collectives(self.most_sms)

    def check(self) -> None:
        """Raise the error from a wait that timed out."""
        self.collectives.check()

    def bind(self, case: Case) -> Bound:
        """Results go to buffers apart from the inputs.

        Sides with one arena have the same buffers: they run in turn, each writes the inputs anew
        before a replay, and results are judged before the next side runs.
        """
        if self.arena is not None:
            self.arena.used = 0
        return self.calls(case, *self.buffers(case), self.collectives.barrier)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue a collective into `out`."""
        getattr(self.collectives, operation)(given, out=out, **self.options)
        return out

    def memory(self, elements: int) -> Any:
        """A part of the arena, if there is one."""
        return super().memory(elements) if self.arena is None else self.arena.take(elements)


class Symmetric(Weft):
    """`weft.cuda.Collectives` on symmetric memory."""

    def __init__(
        self,
        context: Context,
        name: str = "weft symmetric",
        most_sms: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(context, name, most_sms, **options)

    def start(self) -> None:
        """Allocate symmetric memory, which all sides in this class share."""
        super().start()
        self.arena = self.context.once("symmetric", self.allocate)

    def allocate(self) -> Arena:
        """Symmetric memory for the largest case."""
        elements = arena_elements(self.context.cases, self.context.ranks)
        return Arena(self.collectives.symmetric_empty(elements, self.context.dtype))


class CopyEngines(Symmetric):
    """`weft.cuda.Collectives` by copy engines, on symmetric memory."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, "weft copy engines", copy_engine=True)

    def unable(self, case: Case) -> str | None:
        """Copy engines take long calls."""
        if case.bytes < COPIED_BYTES and self.context.device.kind == "cuda":
            return f"measured from {COPIED_BYTES} bytes on"
        return super().unable(case)


class Nccl(Exchanging):
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
        """All-reduce on one element."""
        self.distributed.all_reduce(self.token)

    def bind(self, case: Case) -> Bound:
        """All-reduce replaces the input."""
        buffers = self.buffers(case, in_place=case.operation == "all_reduce")
        return self.calls(case, *buffers, self.meet)

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
        """Buffers are arena parts."""
        self.arena.used = 0
        return super().bind(case)

    def memory(self, elements: int) -> Any:
        """An arena part."""
        return self.arena.take(elements)


class Torch(Nccl):
    """torch operators on symmetric memory, without multicast."""

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
        """Symmetric memory for the largest all-reduce, and the handle."""
        symmetric = import_module("torch.distributed._symmetric_memory")
        reductions = [case for case in self.context.cases if case.operation == "all_reduce"]
        elements = arena_elements(reductions, self.context.ranks)
        name = self.context.device.name
        memory = symmetric.empty(elements, dtype=self.context.dtype, device=name)
        return Arena(memory), symmetric.rendezvous(memory, self.distributed.group.WORLD)

    def meet(self) -> None:
        """Barrier in the memory."""
        self.handle.barrier(channel=0)

    def bind(self, case: Case) -> Bound:
        """Inputs are arena parts; the one-shot operator's outputs are ordinary memory."""
        # Both operators in a case have parts: the second one's come behind the first one's.
        if self.context.binding != case.name:
            self.context.binding, self.arena.used = case.name, 0
        taken, made = lengths(case, self.context.ranks)
        inputs = [self.arena.take(taken) for _ in range(case.buffers)]
        outputs = inputs
        if self.algorithm == "one_shot":
            outputs = [self.memory(made) for _ in range(case.buffers)]
        return self.calls(case, inputs, outputs, self.meet)

    def operate(self, operation: str, given: Any, out: Any) -> Any:
        """Enqueue an all-reduce on an arena part."""
        group = self.distributed.group.WORLD.group_name
        operators = self.torch.ops.symm_mem
        if self.algorithm == "two_shot":
            operators.two_shot_all_reduce_(given, "sum", group)
            return given
        operators.one_shot_all_reduce_out(given, "sum", group, out)
        return out


def sides_of(context: Context) -> dict[str, list[Exchanging]]:
    """Sides by operation, Weft first; an operation's sides share libraries."""
    weft, symmetric = Weft(context), Symmetric(context)
    copies = CopyEngines(context)
    algorithms = [Weft(context, f"weft {a}", algorithm=a) for a in ("one_shot", "two_shot")]
    if context.device.kind == "twin":
        exchanges: list[Exchanging] = [weft, symmetric, copies]
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


def swept(context: Context, case: Case) -> list[Exchanging]:
    """Sides in a sweep: Weft's choices, then each SM count, by kind of memory."""
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
