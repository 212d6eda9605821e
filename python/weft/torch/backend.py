"""Registration of the backend `weft`, and the rendezvous of its groups over torch's store."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from torch import distributed

from weft import _native, _tuning
from weft._rendezvous import Outer, meet
from weft.communicator import made_options
from weft.errors import ConfigurationError
from weft.topology import placement
from weft.torch import build, operators
from weft.torch.device import DeviceCalls
from weft.torch.formation import Formation

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options", "abort", "connect", "monitored_barrier", "register"]

NAME = "weft"
#: Most threads that reduce a vector.
MAX_THREADS: Final = 64
#: Networks in the options of the process's groups, which later groups without an option share.
networks: Final[list[Any]] = []


def register() -> None:
    """Make `torch.distributed.init_process_group("weft")` available."""
    if distributed.is_available():
        distributed.Backend.register_backend(
            NAME, create, extended_api=True, devices=["cpu", "cuda"]
        )


@dataclass(frozen=True)
class Options:
    """Options of a process group, for torch's `pg_options`; equal on all ranks but for threads.

    Args:
        reproducible: sums are added in the order of ranks: the same bits on all ranks and in all
            runs. By default as `WEFT_REPRODUCIBLE` requests.
        network: network of the ranks: a short form as `bigraph:switches=8,endpoints=2`, the path of
            a JSON file, or the object that such a file contains. That of rank 0 decides. By default
            that of the process's first group with one, else as `WEFT_NETWORK` names it. All-reduces
            may then run by HDRM, in the order of ranks that the network requires. Groups that are
            split from this one take its network, or none if it has none.
        reduction_threads: threads of a rank that reduce a long vector, at most 64; may differ
            between ranks. 0: as many as there are cores for each rank of the host, at most 8. The
            bits of results do not depend on it. By default as `WEFT_REDUCTION_THREADS` requests,
            else 1.
        num_sms: maximum number of multiprocessors of an operation on GPUs, as of
            `weft.cuda.Collectives`; memory is proportional to it. By default 32, or fewer if ranks
            share a GPU; longer operations take the fastest number below. The first operation on
            GPUs raises if it differs between ranks or exceeds those of a GPU.
        copy_engine: copy engines of the GPUs move long all-gathers, all-to-alls, broadcasts and
            scatters into outputs in symmetric memory, as of `weft.cuda.Collectives`.
    """

    reproducible: bool = field(default_factory=lambda: reproducible_by_default())
    network: str | os.PathLike[str] | Mapping[str, Any] | None = None
    reduction_threads: int = field(default_factory=lambda: reduction_threads_by_default())
    num_sms: int | None = None
    copy_engine: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reduction_threads <= MAX_THREADS:
            raise ConfigurationError(
                f"reduction_threads {self.reduction_threads}: expected 0 to {MAX_THREADS}"
            )
        if self.num_sms is not None and (not isinstance(self.num_sms, int) or self.num_sms < 1):
            raise ConfigurationError(f"num_sms {self.num_sms}: expected 1 or more")
        if self.network is not None:
            # An object without a form in JSON is an error on all ranks.
            placement.network_source(self.network)


def reproducible_by_default() -> bool:
    """Value of `WEFT_REPRODUCIBLE`.

    Raises:
        ConfigurationError: if it is neither 0 nor 1.
    """
    value = os.environ.get("WEFT_REPRODUCIBLE", "").strip() or "0"
    if value not in ("0", "1"):
        raise ConfigurationError(f"WEFT_REPRODUCIBLE {value!r}: expected 0 or 1")
    return value == "1"


def reduction_threads_by_default() -> int:
    """Value of `WEFT_REDUCTION_THREADS`.

    Raises:
        ConfigurationError: if it is not a number of threads.
    """
    value = os.environ.get("WEFT_REDUCTION_THREADS", "").strip() or "1"
    if not (value.isascii() and value.isdigit() and int(value) <= MAX_THREADS):
        raise ConfigurationError(
            f"WEFT_REDUCTION_THREADS {value!r}: expected a number from 0 to {MAX_THREADS}"
        )
    return int(value)


def create(description: Any, options: Any) -> Any:
    """Backend of a new process group, from torch's description of it and from `pg_options`."""
    from torch._C._distributed_c10d import Backend

    # torch may pass on the general options of another group.
    if not isinstance(options, (Options, Backend.Options, type(None))):
        raise TypeError(
            f"pg_options {type(options).__name__}: expected weft.torch.Options for backend weft"
        )
    rank, size, timeout = description.group_rank, description.group_size, description.timeout
    own = options if isinstance(options, Options) else Options()
    if own.network is not None:
        networks.append(own.network)
    network = network_of(own) if rank == 0 else None
    return connect(
        description.store,
        rank,
        size,
        timeout,
        Settings(
            own.reproducible,
            None if network is None else placement.network_source(network),
            own.reduction_threads,
            own.num_sms,
            own.copy_engine,
        ),
    )


@dataclass(frozen=True)
class Settings:
    """Options of a group after their defaults; groups that are split from it have the same.

    Args:
        reproducible: as in `Options`.
        network: name and description of the network, that of rank 0 on all ranks of a group that is
            made; `None` for none.
        reduction_threads: as in `Options`.
        num_sms: as in `Options`.
        copy_engine: as in `Options`.
    """

    reproducible: bool
    network: tuple[str, str] | None
    reduction_threads: int
    num_sms: int | None = None
    copy_engine: bool = False

    def encode(self) -> str:
        """JSON, for the C++ library to keep."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Settings:
        """Settings from their JSON."""
        values = json.loads(text)
        network = values.pop("network")
        return Settings(network=None if network is None else tuple(network), **values)


def network_of(own: Options) -> str | Mapping[str, Any] | None:
    """Network of a group with these options."""
    named = os.environ.get(placement.VARIABLE, "").strip()
    for one in (own.network, *networks[:1], named or None):
        if one is not None:
            return os.fspath(one) if isinstance(one, (str, os.PathLike)) else one
    return None


def split(store: Any, rank: int, size: int, timeout: timedelta, settings: str) -> Any:
    """Backend of a group that torch splits from another one, with the settings of that one."""
    return connect(store, rank, size, timeout, Settings.decode(settings))


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    settings: Settings,
) -> Any:
    """Backend of a group whose ranks meet at a store of torch.

    Args:
        store: reaches all ranks of the group; its keys belong to this group.
        rank: this rank.
        size: ranks in the group.
        timeout: of this call, and of operations that have none of their own.
        settings: settings of the group; the network of rank 0 decides.

    Raises:
        ConfigurationError: if the C++ library cannot be built, or rank 0's network is not valid.
        RendezvousError: names the ranks that did not come.
    """
    shim = loaded()
    formation = Formation(store, rank, size, timeout, shim.aborts)
    with contextlib.ExitStack() as stack:
        try:
            outer = Outer(formation.gather, rank, size, _native.host_id())
            options = made_options(None, "caller", None, None, 0) | {"interrupt": formation.check}
            communicator = meet(outer, range(size), options, timeout=formation.left())
            assert communicator is not None, "every rank is in the list"
            stack.callback(communicator.close)
            tuning = _tuning.source() if rank == 0 else None
            host = placement.host_name()
            table, context, network = _native.collectives_table(
                communicator,
                formation.left(),
                (settings.reproducible, settings.reduction_threads),
                tuning,
                settings.network if rank == 0 else None,
                host,
            )
        except BaseException as error:
            formation.fail(error)
            raise
        formation.end()
        stack.pop_all()
    settings = replace(settings, network=network)
    seconds = timeout.total_seconds()
    calls = DeviceCalls(communicator, seconds, settings.num_sms, settings.copy_engine)
    return shim.create(table, context, timeout, settings.encode(), calls)


@cache
def loaded() -> Any:
    """The C++ library; groups that are open when the program ends leave in peace."""
    shim = build.load()
    operators.register_fakes()
    atexit.register(shim.close_all)
    return shim


def abort() -> None:
    """End all process groups of this process over `weft`, also those that it is forming.

    Calls and waits of all threads raise, and so do those of the other ranks, which get this rank's
    number. The groups stay to be destroyed.
    """
    loaded().abort_all()


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, *, wait_all_ranks: bool = False
) -> None:
    """`torch.distributed.monitored_barrier`, which itself rejects all backends but gloo.

    Args:
        group: a process group of backend `weft` or gloo; `None` for the default one.
        timeout: for the arrival of all ranks; by default the group's.
        wait_all_ranks: name all ranks that did not come, not the first alone.

    Raises:
        DistBackendError: names ranks that did not come. The group has ended then.
    """
    if distributed.get_rank(group) >= 0:
        unset = timedelta(milliseconds=-1)
        group = group or distributed.group.WORLD
        group.monitored_barrier(unset if timeout is None else timeout, wait_all_ranks)
