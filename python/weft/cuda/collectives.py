"""Collectives between GPUs of one host, on torch tensors.

Each call puts one kernel on torch's current stream and returns::

    import weft.cuda

    with weft.init() as communicator, weft.cuda.Collectives(communicator) as collectives:
        collectives.all_reduce(gradients)
        shard = collectives.reduce_scatter(gradients, "avg")
        gathered = collectives.all_gather(shard)
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from weft import _native
from weft._arguments import expect
from weft._environment import check_variables
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.cuda import symmetric
from weft.cuda.collective_exchanges import Exchanges
from weft.cuda.collective_reductions import Reductions
from weft.cuda.collective_transfers import Transfers
from weft.cuda.device import place_of
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Collectives", "local_collectives", "local_symmetric_empty"]


class Collectives(Reductions, Exchanges, Transfers):
    """All-reduce, reduce-scatter, all-gather, all-to-all and others between GPUs of one host.

    Every call puts one kernel on torch's current stream and returns without a wait on the host, so
    calls may be captured into CUDA graphs. All ranks make the same calls in the same order, with
    equal shapes, dtypes and options; uneven `all_to_all` alone has lengths that differ. Calls of
    one object come from one thread at a time. On several streams each call waits for the last one;
    the program orders replays of graphs, as for `weft.cuda.AllToAll`.

    *Tensors* are on `device` and contiguous, at any address that is a multiple of an element.
    Those without arithmetic may have any dtype. Reductions are of bool, integers of 8 to 64 bits,
    float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64. `out` overlaps the input
    only in the form that a method names as in place. A tensor may be dropped once the call has
    returned; do not change it on another stream before the kernel has run.

    *Reductions.* `op` is "sum", "product" (or "prod"), "min", "max" or "avg", and for bool and
    integers also "and", "or" and "xor" ("band", "bor", "bxor"). Contributions are combined in the
    order of ranks. So all ranks, runs, algorithms and sizes give the same bits, which are those of
    the same reduction on the CPU: integers wrap; sums and products of floats of 8 and 16 bits
    are kept in float32 and rounded once, beyond the largest number to infinity, or to NaN of
    float8_e4m3fn; "avg" is the rounded sum divided by the number of ranks and rounded again, of
    integers truncated; a minimum or maximum is NaN if a contribution is, and -0 is less than +0; a
    NaN is positive and quiet. Sum and maximum of bool are OR, product and minimum AND.

    *Messages.* `send`, `recv` and `batch` are between two ranks, without the others. The messages
    of a pair in one direction are matched in the order of their calls, at each end among the
    messages of that pair alone.

    *Failures.* When a wait on the device times out, or a rank is lost, the device records it, and
    bytes of outputs that did not arrive are 0xFF: NaN in float dtypes. `check`, `weft.check()` and
    later calls raise the error.

    *Symmetric memory.* Calls of tensors from `symmetric_empty` (or `weft.symmetric_empty` for the
    same communicator, device and `memory`), or registered by `weft.symmetric_register`, need no
    copies through buffers of Weft: algorithm "direct". The tensors that peers access are at the
    same place of the same allocation or registration on all ranks: of `all_reduce` both input and
    output, of `reduce_scatter` and `reduce` the input, of `all_gather`, even `all_to_all`,
    `broadcast` and `scatter` the output. Either all ranks pass such tensors to a call or none:
    otherwise pass `algorithm="two_shot"` on all of them, or the call times out. Addresses of
    registered tensors have the same remainder by 16 on all ranks, or calls are not direct. Keep the
    symmetric tensors of a captured call, and their registrations, as long as its graph, on all
    ranks.

    *Copy engines.* `all_gather`, even `all_to_all`, `broadcast` and `scatter` take
    `copy_engine=True`: copy engines of the GPUs write into the symmetric outputs, and two kernels
    of one warp meet the other ranks before and behind them. Outputs have places as for "direct",
    without a condition on remainders by 16. A copy on a stream cannot be made conditional: those of
    a call that fails are made all the same, into the outputs of peers that had not come to it too.

    As a context manager it closes itself at the end of the block; if the block raises, on this rank
    alone.

    Args:
        communicator: what `weft.init()` returned; its ranks are on one host, those of
            `HierarchicalCollectives` on several.
        device: "cuda" (torch's current one), "cuda:1" or a `torch.device`; "twin" runs the same on
            the CPU, with CPU tensors.
        num_sms: maximum number of multiprocessors of a call, equal on all ranks (default: the
            fastest number). Memory is proportional to it.
        memory: sharing of peers' memory: "fd" or "ipc".
        skew_timeout: maximum number of seconds that a kernel waits for a peer; in a domain, the
            longest of all its operators.
        timeout: maximum number of seconds to wait for the same construction on all ranks.
        concurrent: its calls may overlap with those of the process's other concurrent operators on
            the GPU, in an order that differs between ranks: the constructor then rejects launches
            that do not fit on the GPU at once.
        copy_engine: default of `copy_engine` of calls: True: copy engines move messages of 1 MiB
            and more to symmetric outputs, and kernels all others; equal on all ranks.
        watchdog: poll for errors every 0.1 s on a thread: they are logged (logger `weft.cuda`), and
            poison the group at every rank at once. `check` raises them as well.

    Raises:
        SizeError, AllocationError: if the memory exceeds a limit.
        ConfigurationError: if an argument is out of range, or launches do not fit on the GPU.
        ConfigurationMismatchError: if `num_sms`, `skew_timeout`, `concurrent` or `copy_engine`
            differ between ranks.
        ProviderError: if there is no such device, or a rank is on another host.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        device: object = "cuda",
        num_sms: int | None = None,
        memory: Literal["fd", "ipc"] = "fd",
        skew_timeout: float = 30.0,
        timeout: float = 60.0,
        concurrent: bool = False,
        copy_engine: bool = False,
        watchdog: bool = False,
    ) -> None:
        expect(communicator, Communicator, "communicator")
        name, place = place_of(device)
        native = _native.DeviceCollectives(
            communicator._native,
            device=name,
            memory=memory,
            num_sms=num_sms,
            skew_timeout=seconds(skew_timeout, "skew_timeout"),
            timeout=seconds(timeout),
            concurrent=concurrent,
            copy_engine=copy_engine,
        )
        #: `None` in a local group.
        self.communicator: Communicator | None = communicator
        self._memory = memory
        #: The same object in all ranks of a local group.
        self._siblings: object = None
        ranks = communicator.rank, communicator.world_size
        self._begin(native, place, ranks, watchdog=watchdog)
        # Closed with the communicator, as its all-to-alls are.
        communicator._all_to_alls.add(self)  # type: ignore[arg-type]

    def symmetric_empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        timeout: float = 60.0,
    ) -> torch.Tensor:
        """A tensor of zeros in the symmetric heap, which peers can access in direct calls.

        Every rank calls this with the same shape and dtype, in the same order. The memory is freed
        with the tensor, as of `weft.symmetric_empty`. In a group of `local_collectives` use
        `local_symmetric_empty`.

        Args:
            shape: of the tensor.
            dtype: of the tensor; by default torch's default.
            timeout: maximum number of seconds to wait for the other ranks.

        Raises:
            AllocationError, SizeError: if there is too little memory.
            ConfigurationError: in a local group, or if a size is negative.
            ConfigurationMismatchError: if ranks ask for different numbers of bytes.
        """
        self._open()
        if self.communicator is None:
            raise ConfigurationError(
                "ranks of a local group allocate together: use weft.cuda.local_symmetric_empty"
            )
        device = self.device if self._on_gpu else "twin"
        communicator, memory = self.communicator, self._memory
        return symmetric.empty(
            shape, dtype, device=device, communicator=communicator, memory=memory, timeout=timeout
        )


def local_collectives(
    world_size: int,
    devices: Sequence[object] | None = None,
    *,
    num_sms: int | None = None,
    memory: Literal["fd", "ipc"] = "fd",
    skew_timeout: float = 30.0,
    concurrent: bool = False,
    copy_engine: bool = False,
    watchdog: bool = False,
) -> list[Collectives]:
    """All ranks in this process: `Collectives` for each, in rank order, without a communicator.

    For one process that drives several GPUs, and for tests; `weft.cuda.local_group` lists what
    ranks in one process, and on one GPU, have to observe: launch every rank's kernel before waiting
    for any, and `prepare` reductions before. With "twin", whose calls do their work at once, each
    rank's calls are made on a thread of its own.

    Args:
        world_size: number of ranks.
        devices: of each rank, as `Collectives` takes them; by default "cuda:0" and on.
        num_sms: as of `Collectives`.
        memory: as of `Collectives`.
        skew_timeout: as of `Collectives`.
        concurrent: as of `Collectives`.
        copy_engine: as of `Collectives`.
        watchdog: as of `Collectives`; a thread for each rank.
    """
    check_variables()
    given = [f"cuda:{rank}" for rank in range(world_size)] if devices is None else devices
    if len(given) != world_size:
        raise ConfigurationError(f"{len(given)} devices are given for {world_size} ranks")
    if world_size < 1:
        raise ConfigurationError(f"world_size is {world_size}: expected at least 1")
    names, places = zip(*map(place_of, given), strict=True)
    natives = _native.DeviceCollectives.local_group(
        world_size,
        list(names),
        memory=memory,
        num_sms=num_sms,
        skew_timeout=seconds(skew_timeout, "skew_timeout"),
        concurrent=concurrent,
        copy_engine=copy_engine,
    )
    group: list[Collectives] = []
    siblings = object()
    for rank, (native, place) in enumerate(zip(natives, places, strict=True)):
        member = object.__new__(Collectives)
        member.communicator, member._siblings = None, siblings
        member._begin(native, place, (rank, world_size), watchdog=watchdog)
        member._place = places[:rank].count(place)
        group.append(member)
    return group


def local_symmetric_empty(
    group: Sequence[Collectives], shape: int | Sequence[int], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """A tensor of zeros in the symmetric heap for each rank of a local group, in rank order.

    See `Collectives.symmetric_empty`.

    Args:
        group: all ranks, as `local_collectives` returned them.
        shape: of each tensor.
        dtype: of the tensors; by default torch's default.

    Raises:
        AllocationError, SizeError: if there is too little memory.
        ConfigurationError: if `group` is not a whole local group, or a size is negative.
    """
    ranks = [member.rank for member in group]
    siblings = {id(member._siblings) for member in group if member._siblings is not None}
    if not group or ranks != list(range(group[0].world_size)) or len(siblings) != 1:
        raise ConfigurationError("expected all ranks of local_collectives, in their order")
    sizes, element = symmetric.size_of(shape, dtype)
    natives = _native.DeviceCollectives.allocate_local(
        [member._native for member in group], prod(sizes) * element.itemsize
    )
    return [
        symmetric.shown(native, member.device, member.rank, sizes, element)
        for native, member in zip(natives, group, strict=True)
    ]
