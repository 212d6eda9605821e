"""Collectives between GPUs on one host, on torch tensors.

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
from weft.base.arguments import expect
from weft.base.environment import check_variables
from weft.base.errors import ConfigurationError
from weft.base.timeout import seconds
from weft.collectives.device.exchanges import Exchanges
from weft.collectives.device.reductions import Reductions
from weft.collectives.device.transfers import Transfers
from weft.gpu import symmetric
from weft.gpu.device import place_of
from weft.group.communicator import Communicator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Collectives", "local_collectives", "local_symmetric_empty"]


class Collectives(Reductions, Exchanges, Transfers):
    """All-reduce, reduce-scatter, all-gather, all-to-all and others between GPUs on one host.

    Every call puts one kernel on torch's current stream and returns without waiting on the host, so
    calls may be captured into CUDA graphs. All ranks make the same calls in the same order, with
    equal shapes, dtypes and options; only an uneven `all_to_all` has different lengths. Calls to
    one object come from one thread at a time. On several streams each call waits for the last one;
    the program orders graph replays, as for `weft.cuda.AllToAll`. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.

    *Tensors* are on `device` and contiguous, at any address that is a multiple of the element size.
    Calls without arithmetic take any dtype. Reductions take bool, 8- to 64-bit integers,
    float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64. `out` overlaps the input
    only in the form that a method names as in place. A tensor may be dropped once the call has
    returned; do not change it on another stream before the kernel has run.

    *Reductions.* `op` is "sum", "product" (or "prod"), "min", "max" or "avg", and for bool and
    integers also "and", "or" and "xor" ("band", "bor", "bxor"). Contributions are combined in rank
    order. So all ranks, runs, algorithms and sizes give the same bits as the same reduction on the
    CPU: integers wrap; sums, products and averages of 8-bit and 16-bit floats are kept in float32
    and rounded once, with overflow to infinity, or to NaN in float8_e4m3fn; "avg" is the sum
    divided by the rank count, truncated for integers; a minimum or maximum is NaN if a contribution
    is, and -0 is less than +0; a NaN is positive and quiet. For bool, sum and maximum are OR,
    product and minimum AND.

    *Messages.* `send`, `recv` and `batch` run between two ranks, without the others. In each
    direction between a pair, messages are matched in call order, independently of other pairs.

    *Failures.* When a wait on the device times out, or a rank is lost, the device records it, and
    output bytes that did not arrive are 0xFF: NaN in float dtypes. `check`, `weft.check()` and
    later calls raise the error.

    *Symmetric memory.* Calls on tensors from `symmetric_empty` (or `weft.symmetric_empty` for the
    same communicator, device and `memory`), or registered by `weft.symmetric_register`, need no
    copies through Weft's buffers: algorithm "direct". Tensors that peers access are at the same
    place in the same allocation or registration on all ranks: input and output for `all_reduce`,
    the input for `reduce_scatter` and `reduce`, the output for `all_gather`, even `all_to_all`,
    `broadcast` and `scatter`. Either all ranks pass such tensors to a call or none: otherwise pass
    `algorithm="two_shot"` on all ranks, or the call times out. Registered addresses have the same
    remainder modulo 16 on all ranks, or calls are not direct. Keep a captured call's symmetric
    tensors and registrations as long as the graph, on all ranks.

    *Copy engines.* `all_gather`, even `all_to_all`, `broadcast` and `scatter` take
    `copy_engine=True`: the GPUs' copy engines write into the symmetric outputs, and two single-warp
    kernels meet the other ranks before and after the copies. Outputs are placed as for "direct",
    without the condition modulo 16. A copy on a stream cannot be made conditional: a failing call
    still makes all copies, even into the outputs of peers that had not reached the call.

    As a context manager it closes itself at the end of the block; if the block raises, it closes
    only on this rank.

    Args:
        communicator: from `weft.init()`; all ranks are on one host. `HierarchicalCollectives` takes
            several hosts.
        device: "cuda" (torch's current one), "cuda:1" or a `torch.device`; "twin" does the same on
            the CPU, with CPU tensors.
        num_sms: maximum SMs per call, equal on all ranks (default: the fastest number). Memory is
            proportional to it.
        memory: how ranks share memory: "fd" or "ipc".
        skew_timeout: maximum seconds that a kernel waits for a peer; operators in one domain use
            the longest limit.
        timeout: maximum seconds to wait for all ranks to construct theirs.
        concurrent: calls may overlap with the process's other concurrent operators on the GPU, in
            an order that differs between ranks: the constructor then rejects launches that do not
            fit on the GPU at once. The streams must have a higher priority than streams with
            kernels that fill the GPU.
        copy_engine: default for `copy_engine` in calls: True: copy engines move messages from 1 MiB
            up to symmetric outputs, and kernels all others; equal on all ranks.
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
        #: The same object on all ranks in a local group.
        self._siblings: object = None
        ranks = communicator.rank, communicator.world_size
        self._begin(native, place, ranks, watchdog=watchdog)
        # Closed with the communicator, as all-to-alls are.
        communicator._all_to_alls.add(self)

    def symmetric_empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        timeout: float = 60.0,
    ) -> torch.Tensor:
        """Zero tensor in the symmetric heap, which peers can access in direct calls.

        Every rank calls this with the same shape and dtype, in the same order. The memory is freed
        with the tensor, as in `weft.symmetric_empty`. In a `local_collectives` group use
        `local_symmetric_empty`. For example,
        `collectives.symmetric_empty((4096, 4096), torch.bfloat16)`.

        Args:
            shape: tensor shape.
            dtype: tensor dtype; by default torch's default.
            timeout: maximum seconds to wait for the other ranks.

        Raises:
            AllocationError, SizeError: if there is too little memory.
            ConfigurationError: in a local group, or if a size is negative.
            ConfigurationMismatchError: if ranks ask for different byte counts.
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

    For one process that drives several GPUs, and for tests. `weft.cuda.local_group` lists rules for
    ranks in one process, and on one GPU: launch every rank's kernel before waiting for any, and
    `prepare` reductions before. With "twin", whose calls work synchronously, make each rank's
    calls on a separate thread.

    Args:
        world_size: rank count.
        devices: device by rank, as `Collectives` takes them; by default "cuda:0" and on.
        num_sms: as in `Collectives`.
        memory: as in `Collectives`.
        skew_timeout: as in `Collectives`.
        concurrent: as in `Collectives`.
        copy_engine: as in `Collectives`.
        watchdog: as in `Collectives`; a thread for each rank.
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
    """Zero tensor in the symmetric heap for each rank in a local group, in rank order.

    See `Collectives.symmetric_empty`.

    Args:
        group: all ranks, as `local_collectives` returned them.
        shape: shape on each rank.
        dtype: tensor dtype; by default torch's default.

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
