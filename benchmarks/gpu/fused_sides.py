"""Sides of the benchmark of fused operators.

The fused operator; a computation and then a collective, by each library; the operators of torch's
asynchronous tensor parallelism; and the parts alone. Weft's own computation is the fused kernel
without its communication. An ablation has the fused operator alone, with one size of its tiling
after the other. A comparison of stores has it with several tilings, and Weft's parts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from collectives_sides import Nccl, Side
from fused_cases import SYMMETRIC
from triton.runtime.errors import OutOfResources

from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from collectives_sides import Bound
    from fused_context import Context
    from fused_data import Data

__all__ = ["Calls", "Varied", "Way", "defaults", "sides_of"]

#: Reason to skip a value that an ablation's first side has.
DEFAULT: Final = "it is the default"


@dataclass
class Calls:
    """A case on a side's memory."""

    #: Enqueue the operation on a slot; its result, or a tuple of them.
    run: Callable[[int], Any]
    #: Enqueue what makes the inputs of a replay, by its number.
    refill: Callable[[int], None]
    #: Enqueue a rendezvous of all ranks.
    meet: Callable[[], None]
    #: By slot: the last results.
    results: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def call(self, slot: int) -> None:
        """Enqueue the operation and keep its results."""
        made = self.run(slot)
        self.results[slot] = made if isinstance(made, tuple) else (made,)


class Way(Side):
    """One way to do a case, or a part of it."""

    #: False for a part alone, which has no result of the case.
    is_whole = True
    #: Name of the library that `start` sets up, if other sides have it too.
    library_name = ""

    def __init__(self, context: Context, data: Data) -> None:
        super().__init__(context)
        self.data, self.case, self.meet = data, data.case, context.meet

    def bind(self, case: Any) -> Any:
        """Calls on buffers of their own; a collective call."""
        return self.calls()

    def calls(self) -> Calls:
        """Allocate buffers and return the calls; a collective call."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""
        if self.ours:
            import_module("weft").check()


class Fused(Way):
    """The operator of `weft.fused`."""

    ours = True

    def __init__(self, context: Context, data: Data, **options: Any) -> None:
        super().__init__(context, data)
        self.name, self.options = " ".join(["fused", *options.values()]), options

    def calls(self) -> Calls:
        """Results are the operator's own."""
        data, options = self.data, self.options
        return Calls(
            lambda slot: data.fused(slot, **options),
            lambda turn: data.refill("weft", turn),
            self.meet,
        )


class Default(Fused):
    """The operator by its own choice between its kernel and a composition."""

    def __init__(self, context: Context, data: Data) -> None:
        super().__init__(context, data)
        self.name, self.options = "default", {"fused": None}


class Varied(Fused):
    """The operator with one size of its tiling, or number of multiprocessors, given."""

    def __init__(self, context: Context, data: Data, size: str, value: int) -> None:
        super().__init__(context, data)
        self.name, self.size, self.value = f"{size} {value}", size, value
        if size == "num_sms":
            self.options = {size: value}
        else:
            self.options = {"tiling": data.tiling()._replace(**{size: value})}

    def unable(self, case: Any) -> str | None:
        """The default is a side of its own."""
        return DEFAULT if defaults(self.data)[self.size] == self.value else None

    def calls(self) -> Calls:
        """As of the operator; a tiling that does not fit the GPU is refused."""
        return fitting(self.name, super().calls())


class Stored(Fused):
    """The operator with a tiling, by the fields that differ from the default's."""

    def __init__(self, context: Context, data: Data, fields: dict[str, int]) -> None:
        super().__init__(context, data)
        self.name = named(fields)
        self.options = {"tiling": data.tiling()._replace(**fields)}

    def calls(self) -> Calls:
        """As of the operator; a tiling that does not fit the GPU is refused."""
        return fitting(self.name, super().calls())


def named(fields: dict[str, int]) -> str:
    """Name of a tiling: its fields."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def fitting(name: str, calls: Calls) -> Calls:
    """Calls that are refused if a tiling does not fit the GPU."""
    run = calls.run

    def refused(slot: int) -> Any:
        try:
            return run(slot)
        except OutOfResources as error:
            raise ConfigurationError(f"{name}: {error}") from error

    calls.run = refused
    return calls


class Computed(Way):
    """A computation alone: of Weft or of torch."""

    is_whole = False

    def __init__(self, context: Context, data: Data, library: str) -> None:
        super().__init__(context, data)
        self.library, self.name = library, f"{library} {data.word}"
        self.ours = library == "weft"

    def calls(self) -> Calls:
        """Of the inputs for a collective, or of what it would return."""
        data, compute = self.data, self.data.computations[self.library]
        received: list[Any] = [None] * self.case.buffers
        if self.case.is_gathered:
            parts = data.ranks if self.case.collective == "all_gather" else 1
            shards = [data.load(slot) for slot in range(self.case.buffers)]
            received = [self.torch.cat([shard] * parts) for shard in shards]
        return Calls(
            lambda slot: compute(slot, received[slot], None),
            lambda turn: data.refill(self.library, turn),
            self.meet,
        )


class Exchanged(Way):
    """A collective alone, by a library."""

    is_whole = False

    def __init__(self, context: Context, data: Data, side: Side, bounds: dict[str, Bound]) -> None:
        super().__init__(context, data)
        self.side, self.bounds, self.library_name = side, bounds, side.name
        self.name = f"{side.name} alone"
        self.ours = side.ours

    def unable(self, case: Any) -> str | None:
        """The reason of the library."""
        return self.side.unable(self.case.exchange(self.context.ranks))

    def start(self) -> None:
        """Set up the library."""
        self.side.ready()

    def bound(self) -> Bound:
        """Buffers of the library for this case, which sides use in turn."""
        if self.side.name not in self.bounds:
            made = self.side.bind(self.case.exchange(self.context.ranks))
            for each in made.inputs:
                each.zero_()
            self.bounds[self.side.name] = made
        return self.bounds[self.side.name]

    def calls(self) -> Calls:
        """Of buffers as they are."""
        return Calls(self.bound().call, lambda turn: None, self.meet)

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""
        super().check()
        self.side.check()


class FusedSymmetric(Exchanged):
    """The operator of `weft.fused` with results in symmetric memory, into which peers store."""

    is_whole = True

    def __init__(
        self, context: Context, data: Data, side: Side, bounds: dict[str, Bound], **options: Any
    ) -> None:
        super().__init__(context, data, side, bounds)
        self.name, self.options = "fused symmetric", options

    def calls(self) -> Calls:
        """Results are parts of the memory of Weft's side."""
        data, outputs, options = self.data, self.bound().outputs, self.options
        return Calls(
            lambda slot: data.fused(slot, outputs[slot], **options),
            lambda turn: data.refill("weft", turn),
            self.meet,
        )


class DefaultSymmetric(FusedSymmetric):
    """The same by its own choice between its kernel and a composition."""

    def __init__(self, context: Context, data: Data, side: Side, bounds: dict[str, Bound]) -> None:
        super().__init__(context, data, side, bounds, fused=None)
        self.name = "default symmetric"


class StoredSymmetric(FusedSymmetric):
    """The same with a tiling, by the fields that differ from the default's."""

    def __init__(
        self,
        context: Context,
        data: Data,
        side: Side,
        bounds: dict[str, Bound],
        fields: dict[str, int],
    ) -> None:
        tiling = data.tiling()._replace(**fields)
        super().__init__(context, data, side, bounds, tiling=tiling)
        self.name = f"symmetric {named(fields)}"

    def calls(self) -> Calls:
        """As of the operator; a tiling that does not fit the GPU is refused."""
        return fitting(self.name, super().calls())


class Composed(Exchanged):
    """A computation, and the collective after or before it."""

    is_whole = True

    def __init__(
        self, context: Context, data: Data, library: str, side: Side, bounds: dict[str, Bound]
    ) -> None:
        super().__init__(context, data, side, bounds)
        self.library, self.name = library, f"{library} {data.word} + {side.name}"
        self.ours = library == "weft" or side.ours

    def calls(self) -> Calls:
        """The output of the first is the input of the second, where its memory permits it."""
        data, bound = self.data, self.bound()
        compute, operation = data.computations[self.library], self.case.collective
        operate, is_reduction = self.side.operate, "reduce" in operation

        def after(slot: int) -> Any:
            given = bound.inputs[slot]
            made = compute(slot, None, given).view(-1)
            # Addends may have to be symmetric.
            if is_reduction and made.data_ptr() != given.data_ptr():
                made = given.copy_(made)
            return data.finish(slot, operate(operation, made, bound.outputs[slot]))

        def before(slot: int) -> Any:
            received = operate(operation, bound.inputs[slot], bound.outputs[slot])
            return compute(slot, received, None)

        def refill(turn: int) -> None:
            data.refill(self.library, turn)
            # Other sides use these buffers too, and sums may replace their addends.
            if self.case.is_gathered:
                for slot, given in enumerate(bound.inputs):
                    given.copy_(data.load(slot).view(-1))

        return Calls(before if self.case.is_gathered else after, refill, self.meet)


class Pipelined(Way):
    """Operators of torch's asynchronous tensor parallelism, on its symmetric memory."""

    name = library_name = "torch pipelined"

    def unable(self, case: Any) -> str | None:
        """NCCL takes one rank for each GPU."""
        return Nccl.unable(self, case)  # type: ignore[arg-type]

    def start(self) -> None:
        """Join the group, and allow symmetric memory of torch on it."""
        self.group = self.context.distributed().group.WORLD.group_name
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(self.group)

    def calls(self) -> Calls:
        """Products with transposed weights."""
        data: Any = self.data
        group, operators = self.group, self.torch.ops.symm_mem

        def gather(slot: int) -> Any:
            weights = [data.weights[slot].t()]
            _, made = operators.fused_all_gather_matmul(
                data.inputs[slot], weights, 0, group, return_A=False
            )
            return made[0]

        def scatter(slot: int) -> Any:
            given, weights = data.inputs[slot], data.weights[slot].t()
            return operators.fused_matmul_reduce_scatter(given, weights, "sum", 0, group)

        is_gather = self.case.operator == "all_gather_gemm"
        return Calls(gather if is_gather else scatter, lambda turn: None, self.meet)


def defaults(data: Data) -> dict[str, int]:
    """Values that the operator has by default, of the sizes that an ablation varies."""
    tiling = data.tiling()
    spaces: Any = import_module("weft.fused.spaces")
    every = spaces.programs_of(data.context.device.torch.device(data.device))
    return {size: every if size == "num_sms" else getattr(tiling, size) for size in data.case.sizes}


def sides_of(context: Context, data: Data) -> list[Way]:
    """All sides of a case: the fused operator, the other wholes, then the parts."""
    bounds: dict[str, Bound] = {}
    case, libraries = data.case, list(data.computations)
    if case.kind == "ablation":
        varied = [(size, value) for size, values in case.sizes.items() for value in values]
        return [Fused(context, data), *(Varied(context, data, *each) for each in varied)]
    exchanges = context.exchanges(case.collective)
    found: list[Way] = [Fused(context, data)]
    if case.kind == "stores":
        library = exchanges[0]
        if case.operator in SYMMETRIC:
            found.append(FusedSymmetric(context, data, library, bounds))
            tiled = [StoredSymmetric(context, data, library, bounds, each) for each in case.tilings]
            found += tiled
        else:
            found += [Stored(context, data, each) for each in case.tilings]
        return [*found, Computed(context, data, "weft"), Exchanged(context, data, library, bounds)]
    if case.operator in SYMMETRIC:
        found.append(FusedSymmetric(context, data, exchanges[0], bounds))
    found += [Fused(context, data, algorithm=algorithm) for algorithm in case.algorithms]
    if case.has_choice:
        found.append(Default(context, data))
        if case.operator in SYMMETRIC:
            found.append(DefaultSymmetric(context, data, exchanges[0], bounds))
    for library in libraries:
        found += [Composed(context, data, library, side, bounds) for side in exchanges]
    is_pipelined = case.operator in ("all_gather_gemm", "gemm_reduce_scatter")
    if is_pipelined and case.kind != "scaled" and context.gpus:
        found.append(Pipelined(context, data))
    found += [Computed(context, data, library) for library in libraries]
    found += [Exchanged(context, data, side, bounds) for side in exchanges]
    return found
