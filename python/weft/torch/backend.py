"""Registration for the backend `weft`, and group rendezvous over torch's store.

For example, `init_process_group("weft", pg_options=weft.torch.Options(reproducible=True))`.
"""

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

from weft import _native
from weft.base.environment import flag, invalid, text
from weft.base.errors import ConfigurationError
from weft.collectives import tuning as _tuning
from weft.group.options import made_options
from weft.group.rendezvous import Outer, meet
from weft.topology import placement
from weft.torch import build, operators
from weft.torch.device import DeviceCalls
from weft.torch.formation import Formation

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options", "abort", "connect", "monitored_barrier", "register"]

NAME = "weft"
#: Maximum threads that reduce a vector.
MAX_THREADS: Final = 64
#: Networks from the options of this process's groups, which later groups without an option share.
networks: Final[list[Any]] = []


def register() -> None:
    """Make `torch.distributed.init_process_group("weft")` available."""
    if distributed.is_available():
        distributed.Backend.register_backend(
            NAME, create, extended_api=True, devices=["cpu", "cuda"]
        )


@dataclass(frozen=True)
class Options:
    """Process group options, for torch's `pg_options`; equal on all ranks except for threads.

    Args:
        reproducible: sums are added in rank order: the same bits on all ranks and in all runs. By
            default as `WEFT_REPRODUCIBLE` requests.
        network: the network between the ranks: a short form such as
            `bigraph:switches=8,endpoints=2`, a path to a JSON file, or the object that such a file
            contains. Rank 0's value decides. The default is the value from the process's first
            group with one, else what `WEFT_NETWORK` names. All-reduces may then run by HDRM, in the
            rank order that the network requires. Groups that are split from this one take its
            network, or none if it has none.
        reduction_threads: threads on a rank that reduce a long vector, at most 64; may differ
            between ranks. 0: as many as there are cores for each rank on the host, at most 8.
            Result bits do not depend on it. By default as `WEFT_REDUCTION_THREADS` requests, else
            1.
        num_sms: maximum number of SMs for an operation on GPUs, as in `weft.cuda.Collectives`;
            memory is proportional to it. By default 32, or fewer if ranks share a GPU; longer
            operations take the fastest number below. The first operation on GPUs raises if it
            differs between ranks or exceeds a GPU's SM count.
        copy_engine: GPU copy engines move long all-gathers, all-to-alls, broadcasts and scatters
            into outputs in symmetric memory, as in `weft.cuda.Collectives`.
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
            # An object without a JSON form is an error on all ranks.
            placement.network_source(self.network)


def reproducible_by_default() -> bool:
    """The value in `WEFT_REPRODUCIBLE`.

    Raises:
        ConfigurationError: if it is neither 0 nor 1.
    """
    return flag("WEFT_REPRODUCIBLE", default=False)


def reduction_threads_by_default() -> int:
    """The value in `WEFT_REDUCTION_THREADS`.

    Raises:
        ConfigurationError: if it is not a number of threads.
    """
    value = text("WEFT_REDUCTION_THREADS") or "1"
    # The text is short, since Python refuses to convert one with thousands of digits.
    is_number = value.isascii() and value.isdigit() and len(value) < 20
    if not (is_number and int(value) <= MAX_THREADS):
        raise invalid("WEFT_REDUCTION_THREADS", value, f"a number from 0 to {MAX_THREADS}")
    return int(value)


def create(description: Any, options: Any) -> Any:
    """Backend for a new process group, from torch's description and from `pg_options`."""
    from torch._C._distributed_c10d import Backend

    # torch may pass on general options from another group.
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
    """Group options after defaults; groups that are split from it have the same.

    Args:
        reproducible: as in `Options`.
        network: network name and description, rank 0's value on all ranks in a new group; `None`
            for none.
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
        """Settings from JSON."""
        values = json.loads(text)
        network = values.pop("network")
        return Settings(network=None if network is None else tuple(network), **values)


def network_of(own: Options) -> str | Mapping[str, Any] | None:
    """Network for a group with these options."""
    named = text(placement.VARIABLE)
    for one in (own.network, *networks[:1], named or None):
        if one is not None:
            return os.fspath(one) if isinstance(one, (str, os.PathLike)) else one
    return None


def split(store: Any, rank: int, size: int, timeout: timedelta, settings: str) -> Any:
    """Backend for a group that torch splits from another one, with the other one's settings."""
    return connect(store, rank, size, timeout, Settings.decode(settings))


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    settings: Settings,
) -> Any:
    """Backend for a group whose ranks meet at a torch store.

    Args:
        store: reaches all ranks in the group; the keys belong to this group.
        rank: this rank.
        size: ranks in the group.
        timeout: for this call, and for operations without a separate timeout.
        settings: group settings; rank 0's network decides.

    Raises:
        ConfigurationError: if the C++ library cannot be built, or rank 0's network is not valid.
        RendezvousError: names the ranks that did not come.
    """
    shim = loaded()
    formation = Formation(store, rank, size, timeout, shim.aborts)
    with contextlib.ExitStack() as stack:
        try:
            key = _native.environment_key("rendezvous") or b""
            host_id = _native.host_id()
            outer = Outer(formation.gather, rank, size, host_id, key, takes_address=False)
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
    """The C++ library; groups that are open when the program ends are closed without errors."""
    shim = build.load()
    operators.register_fakes()
    atexit.register(shim.close_all)
    return shim


def abort() -> None:
    """End all process groups in this process over `weft`, also groups that it is forming.

    Calls and waits on all threads raise, and so do the other ranks' calls and waits, which get this
    rank's number. The groups still need to be destroyed.
    """
    loaded().abort_all()


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, *, wait_all_ranks: bool = False
) -> None:
    """`torch.distributed.monitored_barrier`, which itself rejects all backends but gloo.

    Args:
        group: a process group with backend `weft` or gloo; `None` for the default one.
        timeout: until all ranks have arrived; by default the group's.
        wait_all_ranks: name all ranks that did not come, not only the first.

    Raises:
        DistBackendError: names ranks that did not come. The group has ended then.
    """
    if distributed.get_rank(group) >= 0:
        unset = timedelta(milliseconds=-1)
        group = group or distributed.group.WORLD
        group.monitored_barrier(unset if timeout is None else timeout, wait_all_ranks)
