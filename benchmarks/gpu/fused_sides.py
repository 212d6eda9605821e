"""Sides in the fused operator benchmark.

The fused operator; a computation and then a collective, by each library; torch's asynchronous
tensor parallelism operators; and the separate parts. Weft's own computation is the fused kernel
without communication. An ablation has only the fused operator, with one tiling size after the
other. A store comparison has it with several tilings, and Weft's separate parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from collectives_sides import Nccl
from fused_cases import SYMMETRIC
from harness.side import Side
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

    #: Enqueue the operation on a slot; returns the result, or a tuple.
    run: Callable[[int], Any]
    #: Enqueue what makes a replay's inputs, by replay number.
    refill: Callable[[int], None]
    #: Enqueue a rendezvous between all ranks.
    meet: Callable[[], None]
    #: By slot: the last results.
    results: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def call(self, slot: int) -> None:
        """Enqueue the operation and keep the results."""
        made = self.run(slot)
        self.results[slot] = made if isinstance(made, tuple) else (made,)


class Way(Side):
    """One way to run a case, or a part."""

    #: False for a separate part, which has no whole result.
    is_whole = True
    #: Name of the library that `start` sets up, if other sides have it too.
    library_name = ""

    def __init__(self, context: Context, data: Data) -> None:
        super().__init__(context)
        self.data, self.case, self.meet = data, data.case, context.meet

    def bind(self, case: Any) -> Any:
        """Calls on separate buffers; a collective call."""
        return self.calls()

    def calls(self) -> Calls:
        """Allocate buffers and return the calls; a collective call."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""
        if self.ours:
            import_module("weft").check()


class Fused(Way):
    """The `weft.fused` operator, called with options."""

    ours = True

    def __init__(self, context: Context, data: Data, name: str = "fused", **options: Any) -> None:
        super().__init__(context, data)
        self.name, self.options = name, options

    def calls(self) -> Calls:
        """Results are the operator's own."""
        data, options = self.data, self.options
        return fitting(self, lambda slot: data.fused(slot, **options))


class Varied(Fused):
    """The operator with one tiling size, or SM count, given."""

    def __init__(self, context: Context, data: Data, size: str, value: int) -> None:
        options = {size: value} if size == "num_sms" else tiled(data, {size: value})
        super().__init__(context, data, f"{size} {value}", **options)
        self.size, self.value = size, value

    def unable(self, case: Any) -> str | None:
        """The default is a separate side."""
        return DEFAULT if defaults(self.data)[self.size] == self.value else None


def tiled(data: Data, fields: dict[str, int]) -> dict[str, Any]:
    """Options for a tiling, by the fields that differ from the default's."""
    return {"tiling": data.tiling()._replace(**fields)}


def fitting(side: Fused | FusedSymmetric, run: Callable[[int], Any]) -> Calls:
    """The operator's calls, refused if a given tiling does not fit the GPU."""
    is_default = side.options.keys().isdisjoint(("tiling", "num_sms"))

    def refused(slot: int) -> Any:
        try:
            return run(slot)
        except OutOfResources as error:
            raise ConfigurationError(f"{side.name}: {error}") from error

    data = side.data
    return Calls(run if is_default else refused, lambda turn: data.refill("weft", turn), side.meet)


class Computed(Way):
    """Only a computation: Weft's or torch's."""

    is_whole = False

    def __init__(self, context: Context, data: Data, library: str) -> None:
        super().__init__(context, data)
        self.library, self.name = library, f"{library} {data.word}"
        self.ours = library == "weft"

    def calls(self) -> Calls:
        """Calls on the inputs for a collective, or on what it would return."""
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
    """Only a collective, by a library."""

    is_whole = False

    def __init__(self, context: Context, data: Data, side: Side, bounds: dict[str, Bound]) -> None:
        super().__init__(context, data)
        self.side, self.bounds, self.library_name = side, bounds, side.name
        self.name = f"{side.name} alone"
        self.ours = side.ours

    def unable(self, case: Any) -> str | None:
        """The library's reason."""
        return self.side.unable(self.case.exchange(self.context.ranks))

    def start(self) -> None:
        """Set up the library."""
        self.side.ready()

    def bound(self) -> Bound:
        """The library's buffers for this case, which sides use in turn."""
        if self.side.name not in self.bounds:
            made = self.side.bind(self.case.exchange(self.context.ranks))
            for each in made.inputs:
                each.zero_()
            self.bounds[self.side.name] = made
        return self.bounds[self.side.name]

    def calls(self) -> Calls:
        """Calls on buffers as they are."""
        return Calls(self.bound().call, lambda turn: None, self.meet)

    def check(self) -> None:
        """Raise the error that the device recorded, after `synchronise`."""
        super().check()
        self.side.check()


class FusedSymmetric(Exchanged):
    """The `weft.fused` operator with results in symmetric memory, into which peers store."""

    is_whole = True

    def __init__(
        self,
        context: Context,
        data: Data,
        side: Side,
        bounds: dict[str, Bound],
        name: str = "fused symmetric",
        **options: Any,
    ) -> None:
        super().__init__(context, data, side, bounds)
        self.name, self.options = name, options

    def calls(self) -> Calls:
        """Results lie in the memory of Weft's side."""
        data, outputs, options = self.data, self.bound().outputs, self.options
        return fitting(self, lambda slot: data.fused(slot, outputs[slot], **options))


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
        """The first one's output is the second one's input, where the memory permits it."""
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
    """torch's asynchronous tensor parallelism operators, on symmetric memory."""

    name = library_name = "torch pipelined"

    def unable(self, case: Any) -> str | None:
        """NCCL takes one rank for each GPU."""
        return Nccl.unable(self, case)  # type: ignore[arg-type]

    def start(self) -> None:
        """Join the group, and allow torch's symmetric memory on it."""
        self.group = self.context.distributed().group.WORLD.group_name
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(self.group)

    def calls(self) -> Calls:
        """GEMMs with transposed weights."""
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
    """The operator's default values, for the sizes that an ablation varies."""
    tiling = data.tiling()
    spaces: Any = import_module("weft.fused.spaces")
    every = spaces.programs_of(data.context.device.torch.device(data.device))
    return {size: every if size == "num_sms" else getattr(tiling, size) for size in data.case.sizes}


def sides_of(context: Context, data: Data) -> list[Way]:
    """All sides for a case: the fused operator, the other wholes, then the parts."""
    bounds: dict[str, Bound] = {}
    case, libraries = data.case, list(data.computations)
    if case.kind == "ablation":
        varied = [(size, value) for size, values in case.sizes.items() for value in values]
        return [Fused(context, data), *(Varied(context, data, *each) for each in varied)]
    exchanges = context.exchanges(case.collective)
    weft, is_symmetric = exchanges[0], case.operator in SYMMETRIC
    found: list[Way] = [Fused(context, data)]
    if is_symmetric:
        found.append(FusedSymmetric(context, data, weft, bounds))
    if case.kind == "stores":
        for fields in case.tilings:
            name = ", ".join(f"{field} {value}" for field, value in fields.items())
            options = tiled(data, fields)
            found.append(
                FusedSymmetric(context, data, weft, bounds, f"symmetric {name}", **options)
                if is_symmetric
                else Fused(context, data, name, **options)
            )
        return [*found, Computed(context, data, "weft"), Exchanged(context, data, weft, bounds)]
    found += [Fused(context, data, f"fused {each}", algorithm=each) for each in case.algorithms]
    if case.has_choice:
        # The operator chooses between the kernel and a composition.
        found.append(Fused(context, data, "default", fused=None))
        if is_symmetric:
            made = FusedSymmetric(context, data, weft, bounds, "default symmetric", fused=None)
            found.append(made)
    for library in libraries:
        found += [Composed(context, data, library, side, bounds) for side in exchanges]
    is_pipelined = case.operator in ("all_gather_gemm", "gemm_reduce_scatter")
    if is_pipelined and case.kind != "scaled" and context.gpus:
        found.append(Pipelined(context, data))
    found += [Computed(context, data, library) for library in libraries]
    found += [Exchanged(context, data, side, bounds) for side in exchanges]
    return found
