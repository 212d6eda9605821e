"""Communicator: a group of ranks that can write to each other, and the objects made on it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from weft import _native
from weft._arguments import expect, expect_names
from weft._array import buffer
from weft._environment import check_variables
from weft._group import Group
from weft._rendezvous import Outer, meet, over_torch
from weft._sharing import check_alike, check_shared, described
from weft._timeout import seconds
from weft.counter import Counter
from weft.errors import (
    ConfigurationError,
    WaitTimeoutError,
    WeftError,
)
from weft.peer_group import PeerGroup
from weft.region import Page, Region, RemoteRegion, check_group, rows
from weft.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.request import Done

__all__ = ["Communicator", "init"]

Progress = Literal["caller", "thread", "epoll"]


class Communicator(Group):
    """A group of ranks; `init`, `from_group` or `split` makes it.

    Closing it frees everything that was made on it.

    As a context manager it closes itself at the end of the block. If the block raises, the group is
    poisoned with the exception's class and text first: the other ranks raise `GroupPoisonedError`,
    which names this rank and the exception. `SystemExit` with status 0 is no failure.

    Every `timeout` is a finite number of seconds from 0 on. NaN, infinity and negative numbers are
    refused with `ConfigurationError` (a `ValueError`): no wait is unbounded. So are offsets,
    lengths, counts and rounds that are negative or beyond 64 bits; a negative rank is an
    `UnknownError`.
    """

    def __init__(
        self, native: _native.Communicator, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(native)
        #: Arguments of `init` that groups made from this one inherit.
        self._options = dict(options or {})
        #: Arguments of a share whose first half is done: a repeated call continues with the second.
        self._agreed: list[object] | None = None

    def alloc(
        self,
        length: int,
        *,
        device: object = None,
        numa_node: int | None = None,
        huge_pages: bool = False,
    ) -> Region:
        """`length` zeroed bytes that peers can be granted.

        Args:
            length: in bytes.
            device: owner of the memory: "cuda" (the current device), "cuda:1" or a torch.device;
                `None` for the CPU. Peers write to it by copy engines, so they must be reached over
                copy (WEFT_PROVIDERS).
            numa_node: the NUMA node of all pages of CPU memory, strictly (`MPOL_BIND`); `None`
                leaves it to the kernel. `weft topo` shows which node is next to which GPU and NIC.
            huge_pages: CPU memory in huge pages of 2 MiB that the system has reserved
                (`sysctl -w vm.nr_hugepages=...`), all allocated at once. It takes up whole pages;
                the region has the requested length.

        Raises:
            ProviderError: if no provider has memory of that device.
            ConfigurationError: if it is not the name of a device, there is no such NUMA node (the
                message lists those there are), or a device's memory is to be placed.
            AllocationError: if the memory, or the huge pages, cannot be allocated.
        """
        if device is None or str(device) == "cpu":
            if numa_node is not None and not 0 <= numa_node < 1 << 32:
                raise ConfigurationError(f"numa_node={numa_node}: expected a node; pass 0 or more")
            return Region(self._native.alloc(length, None, numa_node, huge_pages), self._native)
        if numa_node is not None or huge_pages:
            raise ConfigurationError(
                f"device={str(device)!r} with numa_node or huge_pages: these place CPU memory "
                "alone; leave them out"
            )
        kind, number = device_number(device)
        return Region(self._native.alloc(length, number), self._native, f"{kind}:{number}")

    def register(self, value: Any) -> Region:
        """Memory of the caller as a region, without a copy; it is kept alive until released.

        Args:
            value: of any dtype, C-contiguous and in native byte order: a numpy array, or an object
                with DLPack (torch, JAX, CuPy), CUDA's array interface or the buffer protocol
                (`bytes`, `bytearray`, `mmap`). To Weft it is bytes. A source may be read-only. CPU
                memory may be a destination too over tcp; over shm only memory of `alloc` can be
                one. A tensor on a GPU is a source, toward peers that are reached over copy
                (WEFT_PROVIDERS); a destination there is memory of `alloc(device=...)`. Over verbs
                it may be both, where NICs can register it (docs/verbs.md).

        Kernels that write to a tensor on a GPU must have ended before each `write` from it:
        synchronise first (`torch.cuda.synchronize()`, or an event). Registering orders the
        tensor's stream before the device's legacy default stream; Weft copies on streams of its
        own.

        Raises:
            ShapeError: if it is not contiguous or not in native byte order, or has no bytes.
            RegionError: if no provider can use memory of that device; the message has the remedy.
            ProviderError: if only CUDA's array interface describes it, and there is no CUDA driver.
        """
        given = buffer(value, "the array")
        device = None if given.device is None else f"cuda:{given.device}"
        return Region(self._native.register(*given), self._native, device)

    def counter(
        self, *, window: int = 1, peers: Sequence[int] | None = None, bulk: bool = False
    ) -> Counter:
        """A counter. It counts once it was shared (`share`).

        It takes an even number of lanes of each peer, at least `window + 1`; a group has 65,536.
        As a context manager it is released at the end of the block.

        Args:
            window: rounds that may be open at a time, 1 to 65,536, the same on all ranks: round r
                may start once r - window + 1 credits have come. A ring of slots is one counter.
            peers: the ranks that it connects, both ways; `None` for all. Every rank makes and
                shares a counter at each position, with no peers if it has no part in it.
            bulk: writes may wait behind those of other counters: for large transfers beside small
                urgent ones.

        Raises:
            LimitError: if the window is too wide, or the lanes are used up: release counters.
            UnknownError: if one of `peers` is no other rank of this group.
        """
        if window < 1:
            raise ConfigurationError(f"window={window}: expected at least 1 round; pass 1 or more")
        chosen = None if peers is None else list(peers)
        number = self._native.counter(window, chosen, bulk)
        return Counter(self, number, window, chosen)

    def share(
        self,
        regions: Sequence[Region] = (),
        counters: Sequence[Counter] = (),
        *,
        timeout: float = 30.0,
    ) -> list[list[RemoteRegion]]:
        """Grant regions to every peer and link counters; every rank passes as many of both.

        Lengths may differ: each region is granted with its own.

        Returns:
            By rank, the regions that it granted; none for this rank itself.

        Raises:
            ConfigurationMismatchError: on every rank, before anything is granted, if the ranks pass
                different numbers of regions or counters, counters of different windows or of peers
                that do not match, or an argument is refused on another rank; names the ranks with
                what each passed.
            AlreadySharedError: if a counter was shared before. It goes on as it was.
            UnknownError: if a region or counter was released.
            RegionError: if a region cannot be a destination: it is read-only, or it was registered
                and a peer is reached over shm.
            WrongGroupError: if a region or counter belongs to another communicator, or to the group
                before `reform`.
        """
        timeout = seconds(timeout)
        until = time.monotonic() + timeout
        group, refused = self._native, None
        try:
            check_shared(regions, counters, group)
            passed = described(regions, counters, group)
        except WeftError as error:
            refused = error
            passed = f"arguments that it refused ({type(error).__name__})".encode()
        call = [group, *regions, *counters]
        if self._agreed != call:
            gathered = group.all_gather(passed, timeout, for_share=True)
            if refused is not None:
                raise refused
            check_alike(gathered, group.rank)
        self._agreed = None
        try:
            shared = group.share(
                [region._native for region in regions],
                [counter.number for counter in counters],
                max(until - time.monotonic(), 0.0),
            )
        except WaitTimeoutError:
            self._agreed = call
            raise
        return [
            [RemoteRegion(peer, key, length, group) for key, length in granted]
            for peer, granted in enumerate(shared)
        ]

    @overload
    def write(
        self,
        peer: int,
        counter: Counter,
        pages: Sequence[Page],
        /,
        *,
        round: int | None = None,
        done: Done | None = None,
    ) -> Request: ...

    @overload
    def write(
        self,
        peer: int,
        counter: Counter,
        round: int,
        pages: Sequence[Page],
        /,
        *,
        done: Done | None = None,
    ) -> Request: ...

    def write(
        self,
        peer: int,
        counter: Counter,
        *what: Any,
        round: int | None = None,
        done: Done | None = None,
    ) -> Request:
        """Write pages to a peer and raise its counter: one page, several, or none (a signal).

        Returns before the bytes have arrived. `Request.done`, `Request.wait` or a callback reports
        that the source may be reused; only the peer's response confirms arrival.

        Args:
            peer: destination rank.
            counter: the peer's counter of equal position is raised, by `parts` of these pages.
            what: the pages, or the round and the pages.
            round: by default the next one toward this peer, so each call is a round of its own. A
                further write of a round that has begun names it. Rounds are numbered from 0; round
                r needs r - window + 1 credits of the peer.
            done: called once when the sources may be reused, with `None`, or with the error if the
                write failed; perhaps before this returns. It runs on the thread that makes
                progress, after that thread's call on the communicator has ended (a call that waits
                makes it wait too), and may make calls itself. What it raises goes to
                `sys.unraisablehook`.

        Raises:
            CreditError: if the peer has not given the credit that the round needs, or has given one
                for the round itself, which is over. As with every error that is raised here, no
                byte was written and `done` is not called.
            NotSharedError: if the counter was not shared yet.
            WrongGroupError: if a region or the counter belongs to another communicator, or to the
                group before `reform`.
            RegionError: if a page's destination is memory of another rank than `peer`.
        """
        if len(what) == 2 and round is None:
            round, pages = what
        elif len(what) == 1:
            (pages,) = what
        else:
            raise TypeError(
                "write takes peer, counter, pages and round=, or peer, counter, round, pages"
            )
        return self.scatter({peer: pages}, counter, round, done=done)

    def signal(
        self,
        peer: int,
        counter: Counter,
        round: int | None = None,
        *,
        done: Done | None = None,
    ) -> Request:
        """Raise a peer's counter by one: a write of no bytes."""
        return self.write(peer, counter, [], round=round, done=done)

    def scatter(
        self,
        writes: Mapping[int, Sequence[Page]],
        counter: Counter,
        round: int | None = None,
        *,
        done: Done | None = None,
    ) -> Request:
        """Writes to several peers as one request, which ends when all of them have.

        Args:
            writes: pages by peer; those without pages are signalled.
            counter: as in `write`, at every peer.
            round: the same toward every peer; by default the next one toward each.
            done: as in `write`, called once for all.
        """
        group = self._native
        if type(writes) is not dict:
            expect(writes, Mapping, "writes")
        if type(counter) is not Counter:
            expect(counter, Counter, "counter")
        if counter._native is not group:
            check_group(counter._native, group, "the counter")
        numbers = [(peer, rows(pages, peer, group)) for peer, pages in writes.items()]
        return Request(self._native.scatter(numbers, counter.number, round, done))

    def peer_group(
        self, counter: Counter, source: Region, destinations: Sequence[RemoteRegion]
    ) -> PeerGroup:
        """Resolve peers that are written to together, again and again: see `PeerGroup`.

        Args:
            counter: raised at every member.
            source: the region that is read.
            destinations: one for each member, as `share` returned it; a peer may have several.

        Raises:
            NotSharedError: if the counter was not shared with a member yet.
            UnknownError: if the counter or a region was released.
            WrongGroupError: if one belongs to another communicator.
            RegionError: if a member cannot be sent memory of the source's device.
        """
        return PeerGroup(counter, source, destinations, self._native)

    def reform(self, *, timeout: float = 30.0) -> Communicator:
        """After a loss: a new communicator of the survivors, with new ranks in the old order.

        This one's memory is not used again; make regions, counters and all-to-alls anew. If no rank
        was lost, because a link between two ranks has failed, the call pauses before it connects:
        0.25 s, twice as long after each further such call, at most 8 s and half of the rest of
        `timeout`.
        """
        return Communicator(self._native.reform(seconds(timeout)), self._options)

    @classmethod
    def from_group(
        cls,
        group: Any = None,
        *,
        address: str | None = None,
        host_id: str | None = None,
        providers: Sequence[str] | None = None,
        progress: Progress = "caller",
        spin: float | None = None,
        timeout: float = 60.0,
        silence_timeout: float | None = None,
        trace_limit: int = 0,
    ) -> Communicator:
        """A communicator of the ranks of a torch.distributed process group, with its rank numbers.

        Every member calls it. Where rank 0 listens and a new secret travel over the group, by
        all-gathers of bytes, so neither a launcher nor environment variables are needed, and the
        secret is as private as the group's own connections. Afterwards the two are independent of
        each other: either may be closed or destroyed first.

        Args:
            group: a process group of gloo, NCCL or another backend with `all_gather`, as
                `torch.distributed.new_group` or `DeviceMesh.get_group` returned it; `None` for the
                default one. Groups of NCCL use the current device.
            address: `host` or `host:port` of rank 0 of the group, as the others reach it; its own
                alone counts. By default loopback within a host, else the first address of rank 0's
                host that all others reach, and a free port.
            host_id: ranks of the same host identity share memory; by default the machine's.
            providers: as of `init`.
            progress: as of `init`.
            spin: as of `init`.
            timeout: seconds to wait for all ranks, finite. Calls of the group have its own timeout.
            silence_timeout: as of `init`.
            trace_limit: as of `init`.

        Raises:
            ConfigurationError: torch is not installed or has no process group, or this process is
                no member of `group`.
            RendezvousError: a rank cannot join, with its error; or no address of rank 0 is reached
                by all others.
            ListenError: rank 0 cannot listen at `address`.
        """
        options = made_options(providers, progress, spin, silence_timeout, trace_limit)
        outer = over_torch(group, host_id)
        native = meet(outer, range(outer.world_size), options, address=address, timeout=timeout)
        assert native is not None, "every rank is in the list"
        return cls(native, options)

    def split(
        self, ranks: Sequence[int], *, address: str | None = None, timeout: float = 60.0
    ) -> Communicator | None:
        """A communicator of some of the ranks; every rank of this one calls it.

        New ranks are positions in `ranks`. One call may form several groups: each rank passes the
        list of its own, and lists of different groups have no rank in common. A rank that passes a
        list without itself is in none::

            half = communicator.split([0, 1] if communicator.rank < 2 else [2, 3])
            pair = communicator.split([0, 2])  # None on ranks 1 and 3

        The new group is independent of this one, with options as this one has: it is closed by
        itself, has memory, counters and all-to-alls of its own, and the loss of a rank that is in
        one of the two alone does no harm to the other. Its errors name ranks of the new group. It
        takes a control thread and a connection to each other member.

        Args:
            ranks: distinct ranks of this communicator, the same list on every member.
            address: as of `from_group`, of rank 0 of the new group.
            timeout: seconds to wait for all ranks, finite.

        Raises:
            ConfigurationMismatchError: on every rank alike, if members of a group passed different
                lists.
            ConfigurationError: if `ranks` is empty or names a rank twice, or this is a pair.
            UnknownError: if this communicator has no such rank.
            RendezvousError, ListenError: as of `from_group`.
        """
        timeout = seconds(timeout)
        key = self._native.derive_key("split")
        if key is None:
            raise ConfigurationError("split of a pair: expected a group of weft.init; use it whole")

        def gather(payload: bytes) -> list[bytes]:
            return self._native.all_gather(payload, timeout)

        outer = Outer(gather, self.rank, self.world_size, self.hosts[self.rank], key)
        native = meet(outer, list(ranks), self._options, address=address, timeout=timeout)
        return None if native is None else Communicator(native, self._options)


def made_options(
    providers: Sequence[str] | None,
    progress: Progress,
    spin: float | None,
    silence_timeout: float | None,
    trace_limit: int,
) -> dict[str, Any]:
    """Arguments of the native `init` apart from those that name the group."""
    check_variables()
    if providers is None and (named := os.environ.get("WEFT_PROVIDERS")):
        providers = [name.strip() for name in named.split(",")]
    if providers is not None:
        expect_names(providers, "providers")
    return {
        "providers": None if providers is None else list(providers),
        "progress": progress,
        "spin": None if spin is None else seconds(spin, "spin"),
        "silence_timeout": None
        if silence_timeout is None
        else seconds(silence_timeout, "silence_timeout"),
        "trace_limit": trace_limit,
    }


def device_number(device: object) -> tuple[str, int]:
    """The kind and ordinal of a device given as "cuda", "cuda:1" or a torch.device."""
    kind, _, number = str(device).partition(":")
    if kind not in ("cuda", "twin") or not (number.isdecimal() or not number):
        raise ConfigurationError(f'device {device!r}: expected "cuda" or "cuda:1"')
    if number:
        return kind, int(number)
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        return kind, torch.cuda.current_device()
    return kind, 0


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    secret: bytes | None = None,
    host_id: str | None = None,
    providers: Sequence[str] | None = None,
    progress: Progress = "caller",
    spin: float | None = None,
    timeout: float | None = None,
    silence_timeout: float | None = None,
    trace_limit: int = 0,
) -> Communicator:
    """Join the group of ranks that the launcher has started.

    What is not given is taken from the environment: `weft run`, torchrun, Open MPI and Slurm set
    it; without any of them this is a group of one.

    Args:
        rank: this rank; goes with `world_size`.
        world_size: how many ranks there are.
        address: where rank 0 listens, `host:port`; by default WEFT_ADDR and WEFT_PORT.
        secret: shared by all ranks; by default WEFT_SECRET or WEFT_SECRET_FILE. Several hosts need
            one.
        host_id: ranks of the same host identity share memory; by default the machine's.
        providers: names of those to use, as `weft doctor` lists them; by default WEFT_PROVIDERS
            (with commas), else shm and tcp.
            ofi is libfabric, EFA among its networks (docs/efa.md).
            copy is shm extended to memory of GPUs (`Communicator.alloc`), by copy engines;
            copy-twin is copy with host memory in place of GPUs, for tests.
        progress: who makes progress on connections: "caller", in each call; "thread"; "epoll", the
            caller's event loop (`Communicator.fileno`).
        spin: seconds that a wait spins before it parks; by default 50 us if every rank of this host
            can have a core of its own, else 200 us, in which it yields its core to them.
        timeout: seconds to wait for all ranks to come, finite; by default 60.
        silence_timeout: seconds without a sign of life after which a rank counts as lost; by
            default 15.
        trace_limit: records of each sort to keep for a trace; 0 keeps none.

    Raises:
        RendezvousError: names the ranks that did not come.
        ConfigurationError: and its kinds; the message names the variable or argument.
        ProviderError: a provider cannot be used on this machine; raised before ranks are waited
            for.
    """
    options = made_options(providers, progress, spin, silence_timeout, trace_limit)
    for name, value, kind in (
        ("address", address, str),
        ("secret", secret, (bytes, bytearray)),
        ("host_id", host_id, str),
        ("progress", progress, str),
    ):
        if value is not None:
            expect(value, kind, name)
    native = _native.init(
        rank=rank,
        world_size=world_size,
        address=address,
        secret=secret,
        host_id=host_id,
        timeout=None if timeout is None else seconds(timeout),
        **options,
    )
    return Communicator(native, options)
