"""Collectives between GPUs of one host, on torch tensors.

Each call puts one kernel on torch's current stream and returns::

    import weft.cuda

    with weft.init() as communicator, weft.cuda.Collectives(communicator) as collectives:
        collectives.all_reduce(gradients)
        shard = collectives.reduce_scatter(gradients, "avg")
        gathered = collectives.all_gather(shard)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weft import _native
from weft._arguments import expect
from weft._environment import check_variables
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.cuda.collective_exchanges import Exchanges
from weft.cuda.collective_reductions import Reductions
from weft.cuda.device import place_of
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Collectives", "local_collectives"]


class Collectives(Reductions, Exchanges):
    """All-reduce, reduce-scatter, all-gather, all-to-all and others between GPUs of one host.

    Every call puts one kernel on torch's current stream and returns without a wait on the host, so
    calls may be captured into CUDA graphs. All ranks make the same calls in the same order, with
    equal shapes, dtypes and options; uneven `all_to_all` alone has lengths that differ. Calls of
    one object come from one thread at a time. On several streams each call waits for the last one;
    the program orders replays of graphs, as for `weft.cuda.AllToAll`.

    *Tensors* are on `device` and contiguous, at any address that is a multiple of an element.
    Those without arithmetic may have any dtype. Reductions are of bool, integers of 8 to 64 bits,
    float16, bfloat16, float32 and float64. `out` overlaps the input only in the form that a method
    names as in place. A tensor may be dropped once the call has returned; do not change it on
    another stream before the kernel has run.

    *Reductions.* `op` is "sum", "product" (or "prod"), "min", "max" or "avg", and for bool and
    integers also "and", "or" and "xor" ("band", "bor", "bxor"). Contributions are combined in the
    order of ranks. So all ranks, runs, algorithms and sizes give the same bits, which are those of
    the same reduction on the CPU: integers wrap; sums and products of 16-bit floats are kept in
    float32 and rounded once; "avg" is the rounded sum divided by the number of ranks and rounded
    again, of integers truncated; a minimum or maximum is NaN if a contribution is, and -0 is less
    than +0; a NaN is positive and quiet. Sum and maximum of bool
    are OR, product and minimum AND.

    *Failures.* When a wait on the device times out, or a rank is lost, the device records it, and
    bytes of outputs that did not arrive are 0xFF: NaN in float dtypes. `check`, `weft.check()` and
    later calls raise the error.

    As a context manager it closes itself at the end of the block; if the block raises, on this rank
    alone.

    Args:
        communicator: what `weft.init()` returned; its ranks are on one host.
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
        watchdog: poll for errors every 0.1 s on a thread: they are logged (logger `weft.cuda`), and
            poison the group at every rank at once. `check` raises them as well.

    Raises:
        SizeError, AllocationError: if the memory exceeds a limit.
        ConfigurationError: if an argument is out of range, or launches do not fit on the GPU.
        ConfigurationMismatchError: if `num_sms`, `skew_timeout` or `concurrent` differ between
            ranks.
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
        )
        self.communicator = communicator
        ranks = communicator.rank, communicator.world_size
        self._begin(native, place, ranks, watchdog=watchdog)
        # Closed with the communicator, as its all-to-alls are.
        communicator._all_to_alls.add(self)  # type: ignore[arg-type]


def local_collectives(
    world_size: int,
    devices: Sequence[object] | None = None,
    *,
    num_sms: int | None = None,
    memory: Literal["fd", "ipc"] = "fd",
    skew_timeout: float = 30.0,
    concurrent: bool = False,
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
    )
    group = []
    for rank, (native, place) in enumerate(zip(natives, places, strict=True)):
        member = object.__new__(Collectives)
        member._begin(native, place, (rank, world_size), watchdog=watchdog)
        member._place = places[:rank].count(place)
        group.append(member)
    return group
