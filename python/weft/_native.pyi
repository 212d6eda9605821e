"""The native module. `weft` re-exports the public part and documents it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, final

from weft._options import Native
from weft.qdl.device import Lane

#: A contiguous array that the Python layer has checked: address, bytes, and its owner.
_Array: TypeAlias = tuple[int, int, object]
#: Source region, its offset, the peer's region, its offset, length; how many of these slices, and
#: the distance from one to the next in the source and in the destination. Bytes but for the count.
_Page: TypeAlias = tuple[int, int, int, int, int, int, int, int]

@final
class BuildInfo:
    """Version, commit, target and profile of the native module."""

    @property
    def version(self) -> str:
        """The version of Weft."""

    @property
    def commit(self) -> str:
        """The commit it was built from, or "unknown" outside a git checkout."""

    @property
    def target(self) -> str:
        """The target triple it was built for."""

    @property
    def profile(self) -> str:
        """The optimisation it was built with: "debug" or "release"."""

@final
class View:
    """Byte range of a region's memory, as a buffer; it stays while any array on it lives."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface, of bytes, if this is memory of a device."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Region:
    """A region of this rank."""

    def key(self) -> int:
        """Its number in its communicator, unless it was released."""

    @property
    def writable(self) -> bool:
        """True if its memory may be written to."""

    def __len__(self) -> int: ...
    def address(self) -> int:
        """Address of its first byte: of the CPU, or of its device."""

    def view(self) -> View:
        """Its bytes, as a buffer; as CUDA's array interface if it is memory of a device."""

    def release(self) -> None:
        """Release the region; requests in flight keep it until they complete."""

@final
class Request:
    """A request in flight."""

    def done(self) -> bool:
        """True if it has ended."""

    def wait(self, timeout: float) -> None:
        """Wait until it has ended."""

@final
class PeerGroup:
    """Peers that are written to together: a counter, a source and a region of each."""

    def scatter(
        self,
        writes: Sequence[tuple[int, int, int, int]],
        round: int | None,
        done: Callable[[Exception | None], object] | None,
    ) -> Request:
        """Write slices of the source to members as one request."""

@final
class Communicator:
    """A group of ranks that can write to each other."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""

    @property
    def generation(self) -> int:
        """Number of times that the group was formed anew."""

    @property
    def hosts(self) -> list[str]:
        """Host identity of each rank."""

    def routes(self) -> list[str | None]:
        """The provider of the route to each rank; `None` for this one."""

    def provider_details(self) -> dict[str, dict[str, str]]:
        """Details by provider, such as a library's version; providers without any are left out."""

    def route(self, peer: int) -> tuple[str, int | None, int | None]:
        """Provider, most bytes and most pages of a part; `None`: no limit."""

    def parts(self, peer: int, lengths: list[int]) -> int:
        """Raises of a lane by a write of pages of these lengths, to or from a peer."""

    def clock_offsets(self) -> list[tuple[int, int]]:
        """Offset of each rank's clock from rank 0's in nanoseconds, and its error."""

    def all_gather(self, payload: bytes, timeout: float, for_share: bool = False) -> list[bytes]:
        """Each rank's bytes, in rank order."""

    def derive_key(self, purpose: str) -> bytes | None:
        """Key shared by the members; `None` for a pair."""

    def barrier(self, timeout: float) -> None:
        """Every rank has entered before any leaves."""

    def alloc(
        self,
        length: int,
        device: int | None = None,
        numa_node: int | None = None,
        huge_pages: bool = False,
    ) -> Region:
        """Memory that peers can be granted: of the host, placed as requested, or of a device."""

    def register(
        self, address: int, length: int, owner: object, writable: bool, device: int | None = None
    ) -> Region:
        """The user's memory: a source, and where the provider can and it is writable a target.

        It is the CPU's, or that of the CUDA device of this ordinal.
        """

    def counter(self, window: int = 1, peers: list[int] | None = None, bulk: bool = False) -> int:
        """The number of a new counter with this window, toward these peers (`None`: all)."""

    def release_counter(self, counter: int, timeout: float) -> None:
        """Wait until all writes toward a counter have arrived, and release it."""

    def is_shared(self, counter: int) -> bool:
        """True if a counter was shared with any peer."""

    def next_round(self, counter: int, peer: int) -> int:
        """The first round toward a peer without a write."""

    def open_round(self, counter: int, peer: int) -> int:
        """The oldest round of a peer without a credit."""

    def share(
        self, regions: list[Region], counters: list[int], timeout: float
    ) -> list[list[tuple[int, int]]]:
        """Grant regions and link counters; by rank, (key, length) of the regions it granted."""

    def scatter(
        self,
        writes: list[tuple[int, list[_Page]]],
        counter: int,
        round: int | None,
        done: Callable[[Exception | None], object] | None,
    ) -> Request:
        """Write pages to peers and raise their counters, in a round or in the next of each peer.

        `done` is called at the request's end.
        """

    def peer_group(
        self, counter: int, source: Region, destinations: Sequence[tuple[int, int, int]]
    ) -> PeerGroup:
        """Resolve a counter, a source and regions (peer, key, length) for scatters to them."""

    def wait(
        self, counter: int, round: int | None, expected: list[tuple[int, int]], timeout: float
    ) -> None:
        """Wait until peers have raised a counter by as much as is expected of each.

        In an open round, or in the oldest of each peer.
        """

    def wait_for_credit(self, peer: int, counter: int, round: int | None, timeout: float) -> None:
        """Wait until a peer has given the credit that a round, or the next one, needs."""

    def count(self, counter: int, peer: int, round: int | None = None) -> int:
        """Raises by a peer in an open round; in the oldest if none is named."""

    def raised(self) -> list[tuple[int, int, int]]:
        """Lanes that rose since the last call: counter, peer, raises since the last credit."""

    def fileno(self) -> int:
        """Descriptor that becomes readable, once armed, when there is work."""

    def arm(self) -> bool:
        """Arm the descriptor; true if there is no work, so that the caller may sleep on it."""

    def disarm(self) -> None:
        """Disarm the descriptor."""

    def credits(self, counter: int, peer: int) -> int:
        """Credits that a peer has given on a counter."""

    def credit(self, peer: int, counter: int) -> Request:
        """Give a peer credit for its round."""

    def statistics(self) -> list[tuple[int, str, int, int, int, int]]:
        """By peer: rank, provider, payload bytes, parts, arrivals, errors."""

    def take_trace(
        self,
    ) -> tuple[
        list[tuple[int, int, int, int, int]],
        list[tuple[int, int, int, int]],
        list[tuple[str, int, int]],
        int,
    ]:
        """Take away what was recorded; times in nanoseconds.

        Returns:
            Writes (time, peer, lane, value, bytes), arrivals (time, peer, lane, value), phases
            (name, begin, end), and how many records found no room.
        """

    def check(self) -> None:
        """Raise the error that ended the group, if there is one."""

    def poison(self, detail: str) -> None:
        """Poison the group at every rank."""

    def reform(self, timeout: float) -> Communicator:
        """A new communicator of the survivors."""

    def end_waits(self) -> None:
        """End the waits of all threads with `ClosedError`."""

    def close(self) -> None:
        """Leave the group and free its resources; no effect in a forked child."""

@final
class Received:
    """Tokens that were received: see `weft.moe.Received`."""

    @property
    def rows(self) -> View:
        """The memory they lie in."""

    @property
    def row_count(self) -> int:
        """Rows of that memory."""

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""

    @property
    def scales(self) -> View | None:
        """The memory that the rows' scales lie in, if they have any."""

    @property
    def scale_stride(self) -> int:
        """Bytes from the first scale of one row to that of the next."""

    @property
    def expert_counts(self) -> list[int]:
        """Tokens of each local expert."""

    @property
    def expert_offsets(self) -> list[int]:
        """First position of each local expert, and the end of the last one's."""

    @property
    def slots(self) -> list[int]:
        """The row that each position came from; 2**32 - 1 for padding."""

    @property
    def weights(self) -> list[float]:
        """The router's weight for each position."""

    @property
    def expert_load(self) -> list[int]:
        """Tokens of every expert of the group."""

@final
class AllToAll:
    """Dispatch and combine: see `weft.moe.AllToAll`."""

    def __new__(
        cls,
        communicator: Communicator,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        token_dtype: str,
        scales: tuple[str, int] | None,
        combine_dtype: str,
        reply_dtype: str,
        output_dtype: str,
        layout: str,
        pad_to: int,
        combine: str,
        weighting: str,
        private_rows: int | None,
        max_receive_rows: int | None,
        channels: int,
        max_bytes: int | None,
        timeout: float,
    ) -> AllToAll: ...
    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token with its scales, and of a reply, on the wire."""

    @property
    def local_experts(self) -> tuple[int, int]:
        """The first and one past the last expert of this rank."""

    def sizes(self) -> tuple[str, int]:
        """Memory: a table by area, and the total in bytes."""

    def dispatch_send(
        self, tokens: _Array, ids: _Array, weights: _Array | None, scales: _Array | None
    ) -> int:
        """Start a round; its number."""

    def dispatch_recv(self, round: int, timeout: float) -> Received:
        """Wait until every token for this rank's experts is here."""

    def combine_send(self, round: int, outputs: _Array) -> None:
        """Send the experts' outputs back."""

    def combine_recv(self, round: int, out: _Array, timeout: float) -> None:
        """Wait for all replies and sum them into `out`."""

    def release(self, round: int) -> None:
        """End a round."""

    def tokens(self, round: int) -> int:
        """Tokens that this rank sent in a round."""

    def copies_sent(self, round: int) -> tuple[int, int]:
        """Rows sent in a round, and rows that a copy per expert would have sent."""

    def close(self, timeout: float) -> None:
        """Give all memory back; every rank calls this."""

    def abandon(self) -> None:
        """End it on this rank alone; the communicator keeps memory that peers may write to."""

@final
class SymmetricMemory:
    """Memory of the symmetric heap; freed when this is gone."""

    def __new__(
        cls, communicator: Communicator, *, device: str, memory: str, bytes: int, timeout: float
    ) -> SymmetricMemory: ...
    @property
    def addresses(self) -> list[int]:
        """Address at which each rank's part is mapped here."""

    @property
    def bytes(self) -> int:
        """Bytes, rounded up."""

    @property
    def place(self) -> tuple[int, int]:
        """Segment and offset, the same on every rank."""

    @property
    def table(self) -> int:
        """The address of the domain's table."""

    def prepare_waits(self, limit: float) -> None:
        """Prepare the domain for waits of the user's kernels of at most `limit` seconds."""

    def check(self) -> None:
        """Raise the error that the device recorded."""

    def usage(self) -> tuple[int, int]:
        """Bytes in blocks of the domain, and bytes of its heap."""

@final
class RegisteredMemory:
    """Memory of the user's, mapped by all ranks until it is closed."""

    def __new__(
        cls,
        communicator: Communicator,
        *,
        device: str,
        address: int,
        bytes: int,
        file: tuple[int, int] | None,
        timeout: float,
    ) -> RegisteredMemory: ...
    @property
    def addresses(self) -> list[int]:
        """Address at which each rank's memory is mapped here."""

    def withdraw(self) -> None:
        """Hide it from later collectives."""

    def close(self, timeout: float) -> None:
        """End it; every rank calls this. Mappings of a twin end with this object."""

    def abandon(self) -> None:
        """End this rank's mappings of a GPU's memory."""

def device_options() -> list[str]:
    """Names of the options of a device all-to-all."""

#: The logical experts that each rank holds.
RankExperts: TypeAlias = list[list[int]]

@final
class DeviceAllToAll:
    """Dispatch and combine on a device: see `weft.cuda.AllToAll`.

    Tensors are given as addresses on the device, 0 for one that is not given; streams as CUDA's
    handle, 0 for a twin. Calls return at once, those of a twin once they have done their work.
    """

    def __new__(
        cls,
        communicator: Communicator,
        *,
        device: str,
        placement: list[RankExperts] | None = None,
        **options: Unpack[Native],
    ) -> DeviceAllToAll: ...
    @staticmethod
    def local_group(
        world_size: int,
        devices: list[str],
        *,
        placement: list[RankExperts] | None = None,
        **options: Unpack[Native],
    ) -> list[DeviceAllToAll]:
        """All ranks in this process, in rank order."""

    @property
    def positions(self) -> int:
        """The most positions of a rank in one round."""

    @property
    def plan_bytes(self) -> int:
        """Bytes of the plan of a round."""

    @property
    def path(self) -> str:
        """Transfer path of tokens: "packets", "latency" or "bandwidth"."""

    @property
    def num_sms(self) -> int:
        """Multiprocessors that a kernel takes."""

    @property
    def local_experts(self) -> tuple[int, int]:
        """The first and one past the last expert of this rank."""

    @property
    def most_local_experts(self) -> int:
        """The most experts of any rank, for which outputs of dispatch have room."""

    def set_placement(self, changes: list[tuple[int, RankExperts]], timeout: float) -> None:
        """Change which experts ranks hold, by layer, on every rank."""

    @property
    def build(self) -> dict[str, Any]:
        """Build of its kernels: seconds, and true if they were cached."""

    def sizes(self) -> tuple[str, int]:
        """Memory: a table by area, and the total in bytes."""

    def received(self, channel: int) -> tuple[int, int, int]:
        """Landing area of received rows: address, stride in bytes, rows."""

    def dispatch_send(
        self,
        stream: int,
        channel: int,
        tokens: int,
        scales: int,
        ids: int,
        weights: int,
        count: int,
        given: int,
        *,
        num_sms: int | None = None,
        layer: int = 0,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch the send half of dispatch, of at most `given` tokens."""

    def dispatch_recv(
        self,
        stream: int,
        channel: int,
        tokens: int,
        scales: int,
        counts: int,
        offsets: int,
        rows: int,
        weights: int,
        *,
        experts: int = 0,
        load: int = 0,
        load_bytes: int = 4,
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch the receive half of dispatch."""

    def counts(
        self, stream: int, channel: int, timeout: float, *, plan: int = 0
    ) -> tuple[list[int], list[int], int]:
        """Wait for the counts of a round whose dispatch is in flight.

        Returns tokens of each expert, the first position of each group with the end of the last,
        and the positions needed if there are fewer.
        """

    def dispatch(
        self,
        stream: int,
        channel: int,
        tokens: int,
        scales: int,
        ids: int,
        weights: int,
        count: int,
        given: int,
        out_tokens: int,
        out_scales: int,
        out_counts: int,
        out_offsets: int,
        out_rows: int,
        out_weights: int,
        /,
        *,
        out_experts: int = 0,
        load: int = 0,
        load_bytes: int = 4,
        num_sms: int | None = None,
        layer: int = 0,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch both halves of dispatch as one kernel."""

    def combine_send(
        self,
        stream: int,
        channel: int,
        outputs: int,
        release: bool,
        *,
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch the send half of combine, or of the release that takes its place."""

    def combine_recv(
        self,
        stream: int,
        channel: int,
        combined: int,
        count: int,
        given: int,
        release: bool,
        *,
        added: tuple[int, int, int] = (0, 0, 0),
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch the receive half of combine."""

    def combine(
        self,
        stream: int,
        channel: int,
        outputs: int,
        combined: int,
        count: int,
        given: int,
        release: bool,
        *,
        added: tuple[int, int, int] = (0, 0, 0),
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch both halves of combine as one kernel."""

    def check(self) -> None:
        """Raise the error that the device recorded, and clear it unless it ended the group."""

    def close(self, timeout: float) -> None:
        """Give all memory back; every rank calls this."""

    def abandon(self) -> None:
        """End it on this rank alone."""

@final
class DeviceCollectives:
    """Collectives between devices: see `weft.cuda.Collectives`.

    Tensors are given as addresses on the device, streams as CUDA's handle, 0 for a twin. Calls
    return at once, those of a twin once they have done their work.
    """

    def __new__(
        cls,
        communicator: Communicator,
        *,
        device: str,
        memory: str,
        num_sms: int | None,
        skew_timeout: float,
        timeout: float,
        concurrent: bool,
        copy_engine: bool,
    ) -> DeviceCollectives: ...
    @staticmethod
    def local_group(
        world_size: int,
        devices: list[str],
        *,
        memory: str,
        num_sms: int | None,
        skew_timeout: float,
        concurrent: bool,
        copy_engine: bool,
    ) -> list[DeviceCollectives]:
        """All ranks in this process, in rank order."""

    @staticmethod
    def allocate_local(group: list[DeviceCollectives], bytes: int) -> list[SymmetricMemory]:
        """Symmetric memory of all ranks of a group in this process, in rank order."""

    @property
    def blocks(self) -> int:
        """Maximum number of blocks of a launch."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of this rank."""

    def run(
        self,
        stream: int,
        operation: str,
        *,
        input: int,
        output: int,
        element: str,
        count: int,
        root: int = 0,
        reduction: str | None = None,
        average: bool = False,
        algorithm: str | None = None,
        num_sms: int | None = None,
        sent: list[int] | None = None,
        received: list[int] | None = None,
        copy_engine: bool | None = None,
    ) -> None:
        """Launch a call.

        Args:
            stream: the stream of the launch.
            operation: "all_reduce", "reduce_scatter", "reduce", "all_gather", "all_to_all",
                "broadcast", "gather", "scatter" or "barrier".
            input: tensor that is sent.
            output: tensor that is written.
            element: dtype of a reduction; otherwise the unsigned type of equal width.
            count: elements of the vector (all-reduce, reduce, broadcast), of the output
                (reduce-scatter, scatter), of a rank's input (all-gather, gather), or of a part
                (all-to-all).
            root: rank of the source or of the result.
            reduction: "sum", "product", "min", "max", "and", "or" or "xor".
            average: divide the sum by the number of ranks.
            algorithm: "one_shot", "two_shot" or "direct".
            num_sms: maximum number of blocks.
            sent: of an uneven all-to-all, elements for each rank.
            received: elements from each rank.
            copy_engine: True: by copy engines, without `algorithm`; None: as of the construction.
        """

    def prepare(self, reduction: str, element: str) -> None:
        """Compile and load the kernels of a reduction."""

    def run_transfers(self, stream: int, batch: list[tuple[int, bool, int, int]]) -> None:
        """Launch sends and receives, all at the same time.

        Args:
            stream: the stream of the launch.
            batch: of each the peer, true for a receive, the address and the bytes.
        """

    def check(self) -> None:
        """Raise the error that the device recorded."""

    def close(self, timeout: float) -> None:
        """Free the memory; every rank makes this call."""

    def abandon(self) -> None:
        """Free the memory on this rank alone."""

@final
class DeviceCalls:
    """Calls of a `DeviceAllToAll` with tensors, which are checked and launched in one crossing.

    A call returns `None` or `False`, without a launch, if a tensor does not fit or if the channel's
    last call was on another stream: the caller then checks step by step.
    """

    @staticmethod
    def of(
        all_to_all: DeviceAllToAll,
        tensors: type,
        device: int | None,
        places: dict[str, int | None],
    ) -> DeviceCalls | None:
        """Calls with tensors of a class on a device; `None` if such tensors cannot be read.

        Args:
            all_to_all: what launches.
            tensors: a class with DLPack's C functions.
            device: a CUDA device; the CPU if not given.
            places: see `weft.cuda.outputs.OutputLayout.places`.
        """

    def follows(self, channel: int, stream: int) -> bool:
        """True if the last call on a channel, of the same kind (eager or captured), was there."""

    def follow(self, channel: int, stream: int, captured: bool) -> None:
        """Note the stream of a channel's last call."""

    def dispatch_send(
        self,
        stream: int,
        channel: int,
        tokens: object,
        scales: object | None,
        ids: object,
        weights: object | None,
        count: object | None,
        layer: int,
        num_sms: int | None,
    ) -> int | None:
        """Launch the send half of dispatch; returns the number of tokens."""

    def dispatch_recv(self, stream: int, channel: int, buffer: object, num_sms: int | None) -> bool:
        """Launch the receive half of dispatch."""

    def dispatch(
        self,
        stream: int,
        channel: int,
        tokens: object,
        scales: object | None,
        ids: object,
        weights: object | None,
        count: object | None,
        layer: int,
        buffer: object,
        num_sms: int | None,
    ) -> int | None:
        """Launch both halves of dispatch as one kernel; returns the number of tokens."""

    def combine_send(self, stream: int, channel: int, outputs: object, num_sms: int | None) -> bool:
        """Launch the send half of combine."""

    def combine_recv(
        self,
        stream: int,
        channel: int,
        combined: object,
        count: object | None,
        given: int,
        num_sms: int | None,
    ) -> bool:
        """Launch the receive half of combine."""

    def combine(
        self,
        stream: int,
        channel: int,
        outputs: object,
        combined: object,
        count: object | None,
        given: int,
        num_sms: int | None,
    ) -> bool:
        """Launch both halves of combine as one kernel."""

def add_nvrtc_directory(directory: str) -> None:
    """Add a directory to the search for NVRTC, which compiles kernels; before its first use."""

def device_defines(ranks: int, **options: Any) -> list[tuple[str, str]]:
    """Names and values of the macros of a shape; options as those of `DeviceAllToAll`."""

def table_fields() -> list[tuple[str, int, int, int]]:
    """Fields of a domain's table: name, offset, bytes of an element, elements."""

def device_collectives_source(
    ranks: int,
    blocks: int,
    arch: str,
    reduction: str | None = None,
    element: str | None = None,
    *,
    transfers: bool = False,
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Kernels of collectives: name of the program, its sources, and arguments of the compiler.

    `transfers`: the kernel of sends and receives.
    """

def compile_collectives(
    ranks: int, blocks: int | None, arch: str, pairs: list[tuple[str, str]]
) -> tuple[int, int]:
    """Compile kernels of collectives into the cache; see `weft.cuda.compile_collectives`.

    Returns:
        Numbers of programs that were compiled, and that were in the cache.
    """

def device_source(arch: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The kernels' program: its name, path and text of each file, options but for macros."""

def build_info() -> BuildInfo:
    """Version, commit, target and profile of the native module."""

def providers() -> list[tuple[str, str, str, bool, list[str]]]:
    """All providers, in the order in which a route prefers them.

    Returns:
        For each: name, the peers that it reaches, how bytes travel, whether it is used by default,
        and the names under which `init` takes it (none for groups of one process).
    """

def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    secret: bytes | None = None,
    host_id: str | None = None,
    providers: list[str] | None = None,
    progress: str = "caller",
    spin: float | None = None,
    timeout: float | None = None,
    silence_timeout: float | None = None,
    trace_limit: int = 0,
    listener: int | None = None,
    interrupt: Callable[[], object] | None = None,
) -> Communicator:
    """Join the group that the launcher or the arguments name.

    `listener`: a descriptor at which rank 0 listens; it is closed here. `interrupt`: called several
    times a second while the control plane waits, now or later; an exception of it ends the wait.
    """

def collectives_table(
    communicator: Communicator,
    timeout: float,
    sums: tuple[bool, int] = (False, 1),
    tuning: tuple[str, str, str] | None = None,
    network: tuple[str, str] | None = None,
    host: str | None = None,
) -> tuple[int, int, tuple[str, str] | None]:
    """Connect collectives over a communicator; every rank calls this.

    Args:
        communicator: the group.
        timeout: seconds to wait for the other ranks.
        sums: whether they are added in the order of ranks, equal on all ranks; and threads that
            reduce a long vector, at most 64, or 0 for as many as there are cores for each rank of
            this host, at most 8.
        tuning: name and text of a file of measurements, and the name of this machine. That of rank
            0 decides.
        network: name and description of the network, a short form or JSON. That of rank 0 decides.
        host: name of this rank's host in the network; by default its host identity.

    Returns:
        The addresses of a table of C functions (`weft/torch/shim/weft.h`) and of their context,
        both of which the table's last function frees; and rank 0's network.
    """

class CollectiveTimer:
    """Timer of collectives of a communicator. Every rank makes the same calls."""

    def __init__(
        self, communicator: Communicator, timeout: float, tuning: tuple[str, str, str] | None = None
    ) -> None: ...
    def time(
        self,
        collective: str,
        algorithm: str,
        chunks: int,
        bytes: int,
        calls: int,
        timeout: float,
    ) -> tuple[int, float]:
        """Bytes of the vector (those given, rounded up to equal shares), and seconds of a call.

        The mean of `calls` calls, one after another, on float32.
        """

    def selected(self, collective: str, bytes: int) -> tuple[str, int]:
        """Algorithm selected for a vector of this length, and its number of chunks."""

    def close(self, timeout: float) -> None:
        """Release the memory; every rank calls this."""

    @staticmethod
    def candidates(collective: str) -> list[tuple[str, int]]:
        """Algorithms that are measured, with their numbers of chunks."""

    @staticmethod
    def memory_rates() -> tuple[float, float]:
        """Seconds to copy a byte, and to add one to another, in this process's memory."""

def host_id() -> str:
    """The identity of this host: ranks with the same one can share memory."""

class Listener:
    """A port that pairs connect to."""

    @property
    def address(self) -> str:
        """`host:port` that it listens on."""

    def accept(self, timeout: float) -> Communicator:
        """The next pair."""

    def try_accept(self) -> Communicator | None:
        """The next pair, if what has come forms one."""

    def fileno(self) -> int:
        """Readable when `try_accept` has something to do."""

    def close(self) -> None:
        """Stop listening."""

class QdlCounts:
    """Counts of a test, for any thread."""

    def __init__(self) -> None: ...
    def snapshot(self) -> tuple[int, int, int, int]:
        """Queries issued, answered and failed, and nodes."""

    def departures(self) -> list[tuple[str, str, bool]]:
        """Name and cause of each node that left or was lost, and whether it was lost."""

def qdl_test(spec: str, counts: QdlCounts) -> str:
    """Run a test of LoadGen, JSON in and JSON out."""

def qdl_ask(
    addresses: list[str],
    queries: list[list[bytes]],
    provider: str | None,
    slots: int,
    checksum: bool,
    milliseconds: int,
    seconds: float,
) -> tuple[list[list[bytes] | str], int, int, float]:
    """Answers, or causes of failures; answers and failures of all submissions; seconds."""

class QdlNode:
    """Accelerator node."""

    def __init__(
        self,
        spec: str,
        callable: Callable[..., Any] | None,
        lanes: list[Lane] = ...,
    ) -> None:
        """Listen.

        `callable` takes the number of queries of a batch, and for each input the bytes of all
        queries and the bytes of each; it returns the same for each output. With `lanes` it is a
        `weft.qdl.device.DeviceModel`.
        """
    @property
    def address(self) -> str:
        """`host:port` at which it listens."""

    @property
    def name(self) -> str:
        """Name that front ends get."""

    def serve(self) -> None:
        """Serve until `stop`, in this thread."""

    def close(self) -> None:
        """Close a node that does not serve."""

    def departures(self) -> list[tuple[str, str, bool]]:
        """Cause of each front end that was lost."""

    def stop(self) -> None:
        """End `serve`."""

    def counts(self) -> tuple[int, int, int, int]:
        """Queries that have arrived, were answered and have failed, and front ends."""

def check_providers(names: list[str]) -> None:
    """Raise unless all of these exist and can be used on this machine; opens no device."""

def listen(
    address: str, *, secret: bytes | None = None, providers: list[str] | None = None
) -> Listener:
    """Listen for pairs."""

def connect(
    address: str,
    *,
    timeout: float,
    source: str | None = None,
    secret: bytes | None = None,
    providers: list[str] | None = None,
) -> Communicator:
    """Connect to a listener."""

def error_classes() -> list[str]:
    """The names of the classes of `weft.errors` that this module raises."""

class CudaDevice(TypedDict):
    """A device that this process sees, for typing only."""

    ordinal: int
    name: str
    #: As `nvidia-smi -L` writes it.
    uuid: str
    bus_id: str
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    #: True for a slice of a GPU (MIG).
    mig_slice: bool
    #: True if the GPU is partitioned (MIG); `None` if NVML does not report it.
    mig_mode: bool | None
    #: True if its memory can be shared by file descriptor.
    file_descriptors: bool
    #: The other devices whose memory it reaches.
    reaches: list[int]
    #: Devices that it reaches over NVLink; `None` if NVML does not report them.
    nvlink: list[int] | None

class CudaReport(TypedDict):
    """Report on CUDA, for typing only; `None` for missing parts."""

    #: The newest CUDA that the driver offers.
    driver: tuple[int, int] | None
    devices: list[CudaDevice]
    #: The version of NVIDIA's driver, by NVML.
    nvml: str | None
    #: The version of NVRTC, and its file.
    nvrtc: tuple[tuple[int, int], str] | None
    #: By the keys above: why there is none, in a few words.
    errors: dict[str, str]

def cuda_report(nvrtc_folders: Sequence[str] = ()) -> CudaReport:
    """Report on CUDA on this machine; NVRTC is also searched for in these folders."""

class OfiOffer(TypedDict):
    """A NIC as a provider of libfabric reaches it, for typing only."""

    domain: str
    fabric: str
    #: The most bytes and ranges of one part.
    max_part_bytes: int
    max_ranges: int
    #: Sources must be registered.
    registers_sources: bool
    #: Each arrival consumes a posted receive.
    consumes_receives: bool
    #: Writes go on without calls into the library.
    progresses_by_itself: bool
    #: Memory of CUDA devices can be registered.
    reaches_devices: bool

class OfiProvider(TypedDict):
    """A provider of libfabric, for typing only."""

    offers: list[OfiOffer]
    #: Reason that it has no domain.
    error: str | None

class OfiReport(TypedDict):
    """Report on libfabric, for typing only."""

    #: Its file and version, or why there is none.
    library: str | None
    version: tuple[int, int] | None
    error: str | None
    #: Names of all of its providers, with or without NICs of theirs.
    built_in: list[str]
    providers: dict[str, OfiProvider]

def ofi_report(providers: list[str]) -> OfiReport:
    """Report on libfabric, for each of these providers. Loads the library; opens no NIC."""

class VerbsPort(TypedDict):
    """A port of an RDMA device, for typing only."""

    #: Device and port: `mlx5_0:1`.
    name: str
    device: str
    #: Reason that the provider verbs cannot use it. GID and MTU are empty then; if the device
    #: cannot be opened, all fields below are.
    unusable: str | None
    #: By the InfiniBand specification: `ACTIVE`.
    state: str
    #: `InfiniBand` or `Ethernet`.
    link_layer: str
    #: Data rate of the link in Gb/s.
    gigabits: float | None
    #: Entry of the GID table in use, and its index.
    gid: tuple[str, int] | None
    #: Entries of the GID table that are not empty.
    gid_entries: int
    #: Longest packet in bytes, without headers.
    mtu: int
    #: Longest message in bytes.
    max_message: int
    #: Version.
    firmware: str
    #: Limits of a completion queue, a send queue and a shared receive queue.
    max_completions: int
    max_requests: int
    max_receives: int
    on_demand_paging: bool

class VerbsReport(TypedDict):
    """Report on libibverbs, for typing only."""

    #: Its file.
    library: str | None
    #: Reason that there is no library, or that its devices cannot be listed.
    error: str | None
    #: True if it registers memory of GPUs by dma-buf.
    dma_buf: bool
    ports: list[VerbsPort]

def verbs_report() -> VerbsReport:
    """Report on libibverbs and the ports of its devices. Loads the library; opens each device."""

def simulate(spec: str, progress: Callable[[float, str], object] | None = None) -> str:
    """Run a scenario, JSON in and JSON out; `progress` may stop it by giving False."""

def schedule(job: str) -> str:
    """The schedule of a collective job with all operations, JSON in and JSON out."""

def topology_host(root: str, xml: str | None = None, nvml: str | None = None) -> str:
    """The server in a copy of `/sys` or in NCCL's XML, with what NVML adds; JSON."""

def topology_bigraph(spec: str, hosts: list[str] | None = None) -> str:
    """A BiGraph's cabling, rank map in all forms, and network; JSON."""

def hdrm_hosts(spec: str, ranks: int | None = None, names: list[str] | None = None) -> list[str]:
    """Host of each rank in HDRM's map."""

def hdrm_positions(spec: str, hosts: list[str], names: list[str] | None = None) -> list[int]:
    """Position in HDRM of each rank, from their hosts."""

def topology_network(spec: str) -> str:
    """Any network: its counts and its JSON; JSON."""

def topology_path(
    spec: str, source: str, target: str, routing: str = "static", seed: int = 0, flow: int = 0
) -> str:
    """The path between two endpoints, by name or number; JSON."""

def quantise(
    values: _Array,
    hidden: int,
    dtype: str,
    scale_dtype: str,
    block: int,
    codes: _Array,
    scales: _Array,
) -> None:
    """Round rows of float32 to codes and scales."""

def dequantise(
    codes: _Array,
    scales: _Array,
    hidden: int,
    dtype: str,
    scale_dtype: str,
    block: int,
    values: _Array,
) -> None:
    """Widen rows of codes and scales to float32."""

def dlpack_tensor(
    capsule: object, what: str, device: int | None = None
) -> tuple[int, list[int], str, int]:
    """Address, shape, dtype and bytes of a contiguous tensor; keep the capsule meanwhile.

    It is in CPU memory, or in that of the CUDA device of this ordinal; `what` names it in errors.
    """

def cuda_device_of(address: int) -> int:
    """The ordinal of the CUDA device that the memory at an address is of."""

def end_logging() -> None:
    """End the thread that hands log records to Python, and hand over the rest."""
