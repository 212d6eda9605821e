"""Communicator: ranks that can write to each other, and the objects made on it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from weft import _native
from weft.base.arguments import (
    expect,
    expect_bytes,
    expect_flag,
    expect_list,
    expect_number,
    expect_text,
    shown,
)
from weft.base.array import buffer
from weft.base.errors import (
    ConfigurationError,
    WaitTimeoutError,
    WeftError,
)
from weft.base.timeout import seconds
from weft.group import descriptors
from weft.group.counter import Counter
from weft.group.devices import device_number, device_text
from weft.group.group import Group
from weft.group.options import Progress, made_options
from weft.group.peer_group import PeerGroup
from weft.group.region import Page, Region, RemoteRegion, check_group, rows
from weft.group.rendezvous import Outer, meet, over_torch
from weft.group.request import Request
from weft.group.sharing import check_alike, check_shared, described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.group.request import Done

__all__ = ["Communicator", "init"]


class Communicator(Group):
    """Group of ranks, made by `init`, `from_group` or `split`.

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
        #: Arguments for a share whose first half is done: a repeated call continues with the
        #: second.
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
            device: the memory's owner: "cuda" (the current device), "cuda:1" or a torch.device;
                `None` for the CPU. Peers write to it over copy (WEFT_PROVIDERS) and tcp, over NICs
                that reach GPUs (verbs, ofi with FI_HMEM), or over any provider with WEFT_STAGED=1
                on all ranks.
            numa_node: NUMA node for all pages in CPU memory, strictly (`MPOL_BIND`); `None` leaves
                it to the kernel. `weft topo` shows which node is next to which GPU and NIC.
            huge_pages: place CPU memory in 2 MiB huge pages that the system has reserved (for
                example with `sysctl -w vm.nr_hugepages=512`), all allocated at once. It takes up
                whole pages; the region has the requested length.

        Raises:
            ProviderError: if no provider has memory on that device.
            ConfigurationError: if `device` is no device name, there is no such NUMA node (the
                message lists the existing ones), or `numa_node` or `huge_pages` is given for a
                device.
            AllocationError: if the memory or the huge pages cannot be allocated.
        """
        huge_pages = expect_flag(huge_pages, "huge_pages")
        if numa_node is not None:
            numa_node = expect_number(numa_node, "numa_node")
        if device is None or device_text(device) == "cpu":
            if numa_node is not None and not 0 <= numa_node < 1 << 32:
                raise ConfigurationError(
                    f"numa_node={shown(numa_node)}: expected a node; pass 0 or more"
                )
            return Region(self._native.alloc(length, None, numa_node, huge_pages), self._native)
        if numa_node is not None or huge_pages:
            raise ConfigurationError(
                f"device={str(device)!r} with numa_node or huge_pages: these place CPU memory "
                "alone; leave them out"
            )
        kind, number = device_number(device)
        return Region(self._native.alloc(length, number), self._native, f"{kind}:{number}")

    def register(self, value: Any, *, reader: Literal["all", "owner"] = "all") -> Region:
        """Register the caller's memory as a region, without a copy; kept alive until released.

        Args:
            value: a C-contiguous array in native byte order, with any dtype: a numpy array, or an
                object with [DLPack](https://dmlc.github.io/dlpack/latest/) (torch, JAX, CuPy),
                CUDA's array interface or the buffer protocol (`bytes`, `bytearray`, `mmap`). To
                Weft it is bytes. A source may be read-only. CPU memory may also be a destination
                over tcp; over shm only memory from `alloc` can be one. A GPU tensor is a source,
                toward peers reached over copy (WEFT_PROVIDERS); a destination there comes from
                `alloc(device=...)`. It may be both over tcp, and where NICs can register it, over
                verbs and ofi (docs/verbs.md, docs/efa.md). For symmetric tensors see
                `weft.symmetric_region`.
            reader: who reads what peers write into a GPU tensor, once a counter was raised: "all",
                or "owner" for only work on its own GPU, such as kernels. "owner" saves flushes
                over verbs and ofi on platforms that order NIC writes for that GPU; other GPUs and
                the CPU may then read old bytes. CPU memory and copy know no difference.

        Kernels that write to a GPU tensor must have ended before each `write` from it: synchronise
        first (`torch.cuda.synchronize()`, or an event). Registration orders the tensor's stream
        before the device's legacy default stream; Weft copies on separate streams.

        Raises:
            ShapeError: if it is not contiguous or not in native byte order, or has no bytes.
            RegionError: if no provider can use memory on that device; the message has the remedy.
            ConfigurationError: if `reader` is another name.
            ProviderError: if only CUDA's array interface describes it, and there is no CUDA driver.
        """
        chosen = expect_text(reader, "reader")
        given = buffer(value, "the array")
        device = None if given.device is None else f"cuda:{given.device}"
        return Region(self._native.register(*given, chosen), self._native, device)

    def counter(
        self, *, window: int = 1, peers: Sequence[int] | None = None, bulk: bool = False
    ) -> Counter:
        """A counter. It counts once it was shared (`share`).

        It takes an even number of lanes per peer, at least `window + 1`; a group has 65,536. As a
        context manager it is released at the end of the block.

        Args:
            window: rounds that may be open at a time, 1 to 65,536, the same on all ranks: round r
                may start once r - window + 1 credits have come. For example, a ring with 8 slots is
                one counter with window 8.
            peers: ranks that it connects, both ways; `None` for all. Every rank makes and shares a
                counter at each position, with no peers if it takes no part.
            bulk: writes may wait behind writes on other counters: for large transfers beside small
                urgent ones.

        Raises:
            LimitError: if the window is too wide, or the lanes are used up: release counters.
            UnknownError: if `peers` names a rank outside this group, or this rank.
        """
        window, bulk = expect_number(window, "window"), expect_flag(bulk, "bulk")
        if window < 1:
            raise ConfigurationError(f"window={window}: expected at least 1 round; pass 1 or more")
        chosen = None if peers is None else expect_list(peers, "peers")
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

        Lengths may differ: each region is granted at full length.

        Returns:
            By rank, the regions that it granted; none for this rank itself.

        Raises:
            ConfigurationMismatchError: on every rank, before anything is granted, if the ranks pass
                different numbers of regions or counters, counters with different windows or with
                peers that do not match, or if another rank refuses an argument; names the ranks
                with what each passed.
            AlreadySharedError: if a counter was shared before. It goes on as it was.
            UnknownError: if a region or counter was released.
            RegionError: if a region cannot be a destination: it is read-only, or it was registered
                and a peer is reached over shm.
            WrongGroupError: if a region or counter belongs to another communicator, or to the group
                before `reform`.
        """
        timeout = seconds(timeout)
        regions, counters = expect_list(regions, "regions"), expect_list(counters, "counters")
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

    def remote_region(self, descriptor: bytes, *, timeout: float = 30.0) -> RemoteRegion:
        """The peer's region that a descriptor grants, as a destination for writes.

        Only this rank calls it; `share` is for regions that all ranks exchange at once. A counter
        still has to be shared. For example::

            descriptor = region.descriptor([1])               # rank 0, sent over any channel
            target = communicator.remote_region(descriptor)   # rank 1
            communicator.write(0, counter, [weft.Page(source, 0, target, 0, length)])

        Args:
            descriptor: bytes of `Region.descriptor`.
            timeout: seconds to wait for the owner's link.

        Raises:
            MalformedError: if the bytes are damaged, or from another group.
            UnknownError: if they grant nothing to this rank.
            ConnectError, ProviderError: if the memory cannot be mapped in time.
        """
        owner, grant = descriptors.decode(self._native, expect_bytes(descriptor, "descriptor"))
        key, length = self._native.import_region(owner, grant, seconds(timeout))
        return RemoteRegion(owner, key, length, self._native)

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
        """Write pages to a peer and raise a counter there: one page, several, or none (a signal).

        Returns before the bytes have arrived. `Request.done`, `Request.wait` or a callback reports
        that the source may be reused; only the peer's response confirms arrival.

        Args:
            peer: destination rank.
            counter: the peer's counter at the same position is raised, by `parts` for these pages.
            what: the pages, or the round and the pages.
            round: by default the next one toward this peer, so each call is a separate round. A
                further write in a round that has begun names it. Rounds are numbered from 0; round
                r needs r - window + 1 credits from the peer.
            done: called once when the sources may be reused, with `None`, or with the error if the
                write failed; perhaps before this returns. It runs on a thread that makes a call on
                the communicator, after that call or while it waits, and may make calls itself, also
                ones that wait. Callbacks begin in the order in which requests end; while one waits,
                the next runs inside that wait, at most 16 deep, and on another thread once one has
                taken 0.1 s. An exception from it goes to `sys.unraisablehook`.

        Raises:
            CreditError: if the peer has not given the credit that the round needs, or has credited
                the round itself, which is over. As with every error raised here, no byte was
                written and `done` is not called.
            NotSharedError: if the counter was not shared yet.
            WrongGroupError: if a region or the counter belongs to another communicator, or to the
                group before `reform`.
            RegionError: if a page's destination is memory on another rank than `peer`.
        """
        if len(what) == 2 and round is None:
            round, pages = what
        elif len(what) == 1:
            (pages,) = what
        else:
            raise TypeError(
                "write takes peer, counter, pages and round=, or peer, counter, round, pages"
            )
        try:
            writes = {peer: pages}
        except TypeError:
            # No rank is unhashable.
            writes = {expect_number(peer, "peer"): pages}
        return self.scatter(writes, counter, round, done=done)

    def signal(
        self,
        peer: int,
        counter: Counter,
        round: int | None = None,
        *,
        done: Done | None = None,
    ) -> Request:
        """Raise a peer's counter by one, without writing any bytes."""
        return self.write(peer, counter, [], round=round, done=done)

    def scatter(
        self,
        writes: Mapping[int, Sequence[Page]],
        counter: Counter,
        round: int | None = None,
        *,
        done: Done | None = None,
    ) -> Request:
        """Write to several peers as one request, which ends when all writes have.

        Args:
            writes: pages by peer; peers without pages are signalled.
            counter: as in `write`, at every peer.
            round: the same toward every peer; by default each peer's next one.
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
        """Resolve peers for repeated writes to all of them: see `PeerGroup`.

        Args:
            counter: counter raised at every member.
            source: the region that is read.
            destinations: one for each member, as `share` returned it; a peer may have several.

        Raises:
            NotSharedError: if the counter was not shared with a member yet.
            UnknownError: if the counter or a region was released.
            WrongGroupError: if one belongs to another communicator.
            RegionError: if a member cannot receive memory from the source's device.
        """
        return PeerGroup(counter, source, destinations, self._native)

    def reform(self, *, timeout: float = 30.0) -> Communicator:
        """After a loss: a new communicator for the survivors, with new ranks in the old order.

        The old communicator's memory is not used again; make regions, counters and all-to-alls
        anew. If no rank was lost, because only a link between two ranks has failed, the call pauses
        before it connects: 0.25 s, twice as long after each further such call, at most 8 s and half
        the remaining `timeout`.
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
        """A communicator over a torch.distributed process group, with the same rank numbers.

        Every member calls it. Rank 0's address and a new secret travel over the group by byte
        all-gathers, so neither a launcher nor environment variables are needed, and the secret is
        as private as the group's own connections. Afterwards the two are independent: either may be
        closed or destroyed first. For example, `Communicator.from_group(mesh.get_group("ep"))`.

        Args:
            group: a process group on gloo, NCCL or another backend with `all_gather`, from
                `torch.distributed.new_group` or `DeviceMesh.get_group`, for example; `None` for
                the default one. NCCL groups use the current device. See
                https://docs.pytorch.org/docs/stable/distributed.html.
            address: the group's rank 0 as `host` or `host:port`, as the others reach it; only the
                value on rank 0 counts. By default loopback within a host, otherwise the first
                address on rank 0's host that all others reach, and a free port.
            host_id: ranks with the same host identity share memory; by default the machine's.
            providers: as in `init`.
            progress: as in `init`.
            spin: as in `init`.
            timeout: seconds to wait for all ranks, finite. `group` keeps its own timeout.
            silence_timeout: as in `init`.
            trace_limit: as in `init`.

        Raises:
            ConfigurationError: torch is not installed or has no process group, or this process is
                not in `group`.
            RendezvousError: a rank cannot join, with the error there; or rank 0 has no address that
                all others reach.
            ListenError: rank 0 cannot listen at `address`.
        """
        options = made_options(providers, progress, spin, silence_timeout, trace_limit)
        for name, text in (("address", address), ("host_id", host_id)):
            if text is not None:
                expect_text(text, name)
        outer = over_torch(group, host_id)
        native = meet(outer, range(outer.world_size), options, address=address, timeout=timeout)
        assert native is not None, "every rank is in the list"
        return cls(native, options)

    def split(
        self, ranks: Sequence[int], *, address: str | None = None, timeout: float = 60.0
    ) -> Communicator | None:
        """A communicator over some ranks; every rank in this one calls it.

        New ranks are positions in `ranks`. One call may form several disjoint groups: each rank
        passes the list for one group. A rank that passes a list without itself is in none::

            half = communicator.split([0, 1] if communicator.rank < 2 else [2, 3])
            pair = communicator.split([0, 2])  # None on ranks 1 and 3

        The new group is independent and inherits this one's options: it is closed by itself and has
        its own memory, counters and all-to-alls. Losing a rank in only one group does no harm to
        the other. Errors name ranks in the new group. It takes a control thread and a connection to
        each other member.

        Args:
            ranks: distinct ranks in this communicator, the same list on every member.
            address: as in `from_group`, for rank 0 in the new group.
            timeout: seconds to wait for all ranks, finite.

        Raises:
            ConfigurationMismatchError: on every rank alike, if a group's members passed different
                lists.
            ConfigurationError: if `ranks` is empty or names a rank twice, or this is a pair.
            UnknownError: if this communicator has no such rank.
            RendezvousError, ListenError: as in `from_group`.
        """
        timeout = seconds(timeout)
        key = self._native.derive_key("split")
        if key is None:
            raise ConfigurationError("split of a pair: expected a group of weft.init; use it whole")
        members = [expect_number(each, "ranks") for each in expect_list(ranks, "ranks")]
        if address is not None:
            expect_text(address, "address")

        def gather(payload: bytes) -> list[bytes]:
            return self._native.all_gather(payload, timeout)

        outer = Outer(gather, self.rank, self.world_size, self.hosts[self.rank], key)
        native = meet(outer, members, self._options, address=address, timeout=timeout)
        return None if native is None else Communicator(native, self._options)


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
    """Join the group that the launcher has started.

    Anything not given comes from the environment: `weft run`, torchrun, Open MPI and Slurm set it;
    without any launcher this is a group with one rank.

    Args:
        rank: this rank; goes with `world_size`.
        world_size: number of ranks.
        address: where rank 0 listens, `host:port`; by default WEFT_ADDR and WEFT_PORT.
        secret: shared by all ranks; by default WEFT_SECRET or WEFT_SECRET_FILE. Several hosts need
            one.
        host_id: ranks with the same host identity share memory; by default the machine's.
        providers: provider names, as `weft doctor` lists them; by default WEFT_PROVIDERS (with
            commas), else shm and tcp.
            ofi is libfabric, for example for EFA networks (docs/efa.md).
            copy is shm extended to GPU memory (`Communicator.alloc`), by copy engines;
            copy-twin is copy with host memory in place of GPUs, for tests.
        progress: who makes progress on connections: "caller", in each call; "thread"; "epoll", the
            caller's event loop (`Communicator.fileno`).
        spin: seconds that a wait spins before it parks; by default 50 us if every rank on this host
            can have its own core, else 200 us, in which it yields its core to the others.
        timeout: seconds to wait for all ranks to come, finite; by default 60.
        silence_timeout: seconds without a sign of life after which a rank counts as lost; by
            default 15.
        trace_limit: records to keep for a trace, for each kind; 0 keeps none.

    Raises:
        RendezvousError: names the ranks that did not come.
        ConfigurationError: or a subclass; the message names the variable or argument.
        ProviderError: a provider does not work on this machine; raised before waiting for ranks.
    """
    options = made_options(providers, progress, spin, silence_timeout, trace_limit)
    for name, text in (("address", address), ("host_id", host_id)):
        if text is not None:
            expect_text(text, name)
    if secret is not None:
        expect_bytes(secret, "secret")
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
