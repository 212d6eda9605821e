"""The native module. `weft` re-exports the public part and documents it.

A default of `...` is computed in Rust, so that `make stubs` cannot compare it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypedDict, Unpack, final, type_check_only

from weft.base.errors import InternalError
from weft.moe.options import Native

#: A contiguous array that the Python layer has checked: address, bytes, and owner.
_Array: TypeAlias = tuple[int, int, object]
#: Source region, source offset, peer region, peer offset, slice length, slice count, then the
#: stride between slices in the source and in the destination. All are bytes except the count.
_Page: TypeAlias = tuple[int, int, int, int, int, int, int, int]

class PanicException(InternalError):  # noqa: N818
    """Panic in the native module; PyO3 makes the class."""

@final
class BuildInfo:
    """Version, commit, target and profile of the native module."""

    @property
    def version(self) -> str:
        """Weft version."""

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
        """CUDA array interface over the bytes, for device memory.

        See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
        """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Region:
    """Region on this rank."""

    def key(self) -> int:
        """Region number in the communicator, unless the region was released."""

    @property
    def writable(self) -> bool:
        """True if the memory may be written to."""

    @property
    def is_released(self) -> bool:
        """True once it was released."""

    def __len__(self) -> int: ...
    def address(self) -> int:
        """Address of the first byte, on the CPU or the device."""

    def view(self) -> View:
        """The bytes as a buffer; device memory has CUDA's array interface instead."""

    def release(self) -> None:
        """Release the region; requests in flight keep it until they complete."""

@final
class Request:
    """A request in flight."""

    def done(self) -> bool:
        """True if it has ended."""

    def start_await(self, awaits: Awaits, number: int) -> Await | None:
        """Start an await with this number; `None` if the request has ended."""

    def wait(self, timeout: float) -> None:
        """Wait until it has ended."""

@final
class Awaits:
    """Ended awaits of one asyncio loop, over all communicators."""

    def __new__(cls) -> Awaits: ...
    def fileno(self) -> int:
        """A descriptor that is readable while awaits have ended that were not taken."""

    def take(self) -> list[tuple[int, Exception | None]]:
        """Take the awaits that have ended: number, and the error or `None`."""

@final
class Await:
    """Await in progress."""

    def give_up(self) -> Exception | None:
        """Give it up, so that it reports nothing.

        Returns the timeout error, or `None` if it has ended before.
        """

@final
class Word:
    """A u32 that the host and a GPU share: see `weft.Word`."""

    def __new__(cls, device: int | None, home: str) -> Word:
        """Make a zeroed word for a GPU, or without a number in ordinary memory."""

    @property
    def address(self) -> int:
        """Address for kernels and streams."""

    @property
    def host_address(self) -> int | None:
        """Address for the host; `None` in GPU memory."""

    @property
    def home(self) -> str:
        """Home: "gdrcopy" or "pinned"."""

    def get(self) -> int: ...
    def set(self, value: int) -> None: ...
    def check(self) -> None:
        """Raise the last error that ended a watch before its count, once."""

    def watch(self, value: int | None, callback: Callable[[int, int], object]) -> WordWatch:
        """Call back at each change, or once the word has reached `value`."""

@final
class WordWatch:
    """A watched word."""

    def close(self) -> None:
        """End it; a callback that runs on another thread has returned then."""

    @property
    def is_open(self) -> bool:
        """True until the callback was called for the last time, or it was closed."""

@final
class PeerGroup:
    """Peers that are written to together: a counter, a source, and one region per peer."""

    def scatter(
        self,
        writes: Sequence[tuple[int, int, int, int]],
        round: int | None,
        done: Callable[[Exception | None], object] | None,
    ) -> Request:
        """Write slices of the source to members as one request."""

@final
class Communicator:
    """Group in which any rank can write to any other."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""

    @property
    def generation(self) -> int:
        """Re-formation count."""

    @property
    def hosts(self) -> list[str]:
        """Host identity by rank."""

    def routes(self) -> list[str | None]:
        """Provider by rank, for example "shm"; `None` for this rank."""

    def provider_details(self) -> dict[str, dict[str, str]]:
        """Details by provider, such as a library's version; providers without any are left out."""

    def route(self, peer: int) -> tuple[str, int | None, int | None]:
        """Provider, then maximum bytes and maximum pages per part; `None` means no limit."""

    def parts(self, peer: int, lengths: list[int]) -> int:
        """Lane raises by a write with these page lengths, to or from a peer."""

    def clock_offsets(self) -> list[tuple[int, int]]:
        """Clock offset from rank 0 by rank, in nanoseconds, with the error bound."""

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
        """Memory to grant to peers: host memory, placed as requested, or device memory."""

    def register(
        self,
        address: int,
        length: int,
        owner: object,
        writable: bool,
        device: int | None = None,
        reader: str = "all",
    ) -> Region:
        """User memory as a source; also a target if it is writable and the provider supports it.

        `device` is a CUDA ordinal; `None` for CPU memory. `reader` is "all" or "owner".
        """

    def counter(self, window: int = ..., peers: list[int] | None = None, bulk: bool = False) -> int:
        """Create a counter toward these peers (`None`: all) and return the number."""

    def release_counter(self, counter: int, timeout: float) -> None:
        """Wait until all writes toward a counter have arrived, and release it."""

    def is_shared(self, counter: int) -> bool:
        """True if a counter was shared with any peer."""

    def next_round(self, counter: int, peer: int) -> int:
        """The first round toward a peer without a write."""

    def open_round(self, counter: int, peer: int) -> int:
        """The peer's oldest round without a credit."""

    def grant_region(self, region: Region, peer: int, timeout: float) -> bytes:
        """Grant for one peer, encoded."""

    def import_region(self, peer: int, grant: bytes, timeout: float) -> tuple[int, int]:
        """Key and length of the region that a peer's grant has."""

    def share(
        self, regions: list[Region], counters: list[int], timeout: float
    ) -> list[list[tuple[int, int]]]:
        """Grant regions and link counters; returns (key, length) of each region, by rank."""

    def scatter(
        self,
        writes: list[tuple[int, list[_Page]]],
        counter: int,
        round: int | None,
        done: Callable[[Exception | None], object] | None,
    ) -> Request:
        """Write pages to peers and raise their counters, in `round` or in each peer's next round.

        `done` is called when the request ends.
        """

    def peer_group(
        self, counter: int, source: Region, destinations: Sequence[tuple[int, int, int]]
    ) -> PeerGroup:
        """Resolve a counter, a source and regions (peer, key, length) for scatters to them."""

    def wait(
        self, counter: int, round: int | None, expected: list[tuple[int, int]], timeout: float
    ) -> None:
        """Wait until each peer has raised a counter as often as expected.

        Without `round`, this waits for each peer's oldest round.
        """

    def watch(
        self,
        counter: int,
        round: int | None,
        expected: list[tuple[int, int]],
        callback: Callable[[Exception | None], object],
    ) -> None:
        """Call `callback` once peers have raised a counter as `wait` expects."""

    def watch_word(
        self,
        counter: int,
        round: int | None,
        expected: list[tuple[int, int]],
        word: Word,
        value: int,
        failure: int | None,
    ) -> None:
        """Set a word once peers have raised a counter as `wait` expects.

        `failure` is set if they never will.
        """

    def start_await(
        self,
        counter: int,
        round: int | None,
        expected: list[tuple[int, int]],
        awaits: Awaits,
        number: int,
    ) -> Await | None:
        """Start an await with this number for the same as `wait`; `None` if it holds."""

    def start_await_for_credit(
        self, peer: int, counter: int, round: int | None, awaits: Awaits, number: int
    ) -> Await | None:
        """Start an await with this number for the same as `wait_for_credit`."""

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
        """Give a peer credit for a round."""

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
        """A new communicator with the survivors."""

    def end_waits(self) -> None:
        """End all threads' waits with `ClosedError`."""

    def close(self) -> None:
        """Leave the group and free all resources; no effect in a forked child."""

@final
class Received:
    """Tokens that were received: see `weft.moe.Received`."""

    @property
    def rows(self) -> View:
        """The memory they lie in."""

    @property
    def row_count(self) -> int:
        """Row count in that memory."""

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""

    @property
    def scales(self) -> View | None:
        """The memory that the rows' scales lie in, if they have any."""

    @property
    def scale_stride(self) -> int:
        """Bytes between the first scales in adjacent rows."""

    @property
    def expert_counts(self) -> list[int]:
        """Token count for each local expert."""

    @property
    def expert_offsets(self) -> list[int]:
        """First position for each local expert, then the end position."""

    @property
    def slots(self) -> list[int]:
        """The row that each position came from; 2**32 - 1 for padding."""

    @property
    def weights(self) -> list[float]:
        """The router's weight for each position."""

    @property
    def expert_load(self) -> list[int]:
        """Token count for every expert in the group."""

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
        """Bytes on the wire for a token with scales, and for a reply."""

    @property
    def local_experts(self) -> tuple[int, int]:
        """This rank's first expert, and one past the last."""

    def sizes(self) -> tuple[str, int]:
        """Memory: a table by area, and the total in bytes."""

    def dispatch_send(
        self, tokens: _Array, ids: _Array, weights: _Array | None, scales: _Array | None
    ) -> int:
        """Start a round and return the number."""

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
        """Close on this rank only; the communicator keeps memory that peers may write to."""

@final
class SymmetricMemory:
    """Block in the symmetric heap; freed with this object."""

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

    def region(self, communicator: Communicator) -> Region:
        """Region of the block's segment, a new one on each call."""

    @property
    def table(self) -> int:
        """Domain table address."""

    def prepare_waits(self, limit: float) -> None:
        """Prepare the domain for user kernels that wait at most `limit` seconds."""

    def check(self) -> None:
        """Raise the error that the device recorded."""

    def usage(self) -> tuple[int, int]:
        """Bytes in the domain's blocks, and in the heap."""

@final
class DeviceProxy:
    """A rank's running proxy, which puts for kernels: see `weft.triton.Proxy`."""

    def __new__(
        cls,
        group: Communicator,
        memory: SymmetricMemory,
        outer: Communicator,
        *,
        counters: list[int],
        hold: list[bool],
        rounds: int,
        windows: list[tuple[Region | None, list[tuple[int, int] | None]]],
        templates: list[list[tuple[int, int, int]]],
        list_lengths: int,
        max_put_bytes: int,
        max_outstanding: int,
        slots: int,
        idle: str,
        core: int | None,
        core_claims: list[bytes],
        place: int,
        words_home: str,
    ) -> DeviceProxy:
        """Start the thread.

        `windows`: this rank's region, and the peers' regions (key, length) by rank. `templates`:
        peer, source offset and destination offset for each member. `core`: the thread's core;
        otherwise the one that the host's claims leave for the rank at `place`.
        """

    @staticmethod
    def core_claim(memory: SymmetricMemory, core: int | None, near: bool) -> bytes:
        """Return this rank's claim on a core, for the host's ranks.

        A number, a core near the GPU that has `memory`, or none.
        """

    def word_home(self) -> str:
        """Home of the words: "gdrcopy", "pinned" or "gpu"."""

    def check(self) -> None:
        """Raise the error that ended the proxy, or that a kernel recorded."""

    def drain(self, timeout: float) -> None:
        """Wait until all commands are complete; kernels have ended."""

    def stop(self) -> None:
        """End the thread, and take its addresses back from kernels."""

@final
class RegisteredMemory:
    """User memory that all ranks map until it is closed."""

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
        """Close; every rank calls this. A twin's mappings end with this object."""

    def abandon(self) -> None:
        """End this rank's mappings to GPU memory."""

def device_options() -> list[str]:
    """Option names for a device all-to-all."""

#: The logical experts that each rank holds.
_RankExperts: TypeAlias = list[list[int]]

@final
class DeviceAllToAll:
    """Dispatch and combine on a device: see `weft.cuda.AllToAll`.

    Tensors are passed as device addresses, with 0 for an absent one; streams as CUDA handles, with
    0 for a twin. Calls return at once, except that a twin's call first does its work.
    """

    def __new__(
        cls,
        communicator: Communicator,
        *,
        device: str,
        placement: list[_RankExperts] | None = None,
        **options: Unpack[Native],
    ) -> DeviceAllToAll: ...
    @staticmethod
    def local_group(
        world_size: int,
        devices: list[str],
        *,
        placement: list[_RankExperts] | None = None,
        **options: Unpack[Native],
    ) -> list[DeviceAllToAll]:
        """All ranks in this process, in rank order."""

    @property
    def positions(self) -> int:
        """Maximum positions on a rank in one round."""

    @property
    def plan_bytes(self) -> int:
        """Plan size for a round, in bytes."""

    @property
    def path(self) -> str:
        """Token transfer path: "packets", "latency" or "bandwidth"."""

    @property
    def num_sms(self) -> int:
        """SMs that a kernel takes."""

    @property
    def local_experts(self) -> tuple[int, int]:
        """This rank's first expert, and one past the last."""

    @property
    def most_local_experts(self) -> int:
        """Maximum experts on any rank; dispatch outputs have room for that many."""

    def set_placement(self, changes: list[tuple[int, _RankExperts]], timeout: float) -> None:
        """Change which experts ranks hold, by layer, on every rank."""

    @property
    def build(self) -> dict[str, Any]:
        """Kernel build: seconds, and true for a cache hit."""

    def sizes(self) -> tuple[str, int]:
        """Memory: a table by area, and the total in bytes."""

    def received(self, channel: int) -> tuple[int, int, int]:
        """Landing area for received rows: address, stride in bytes, rows."""

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
        """Launch the dispatch send half, with at most `given` tokens."""

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
        """Launch the dispatch receive half."""

    def counts(
        self, stream: int, channel: int, timeout: float, *, plan: int = 0
    ) -> tuple[list[int], list[int], int]:
        """Wait for the counts in a round whose dispatch is in flight.

        Returns tokens by expert, then group start positions followed by the end, then the positions
        needed if `positions` was too small.
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
        """Launch both dispatch halves as one kernel."""

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
        """Launch the combine send half, or the release in place of it."""

    def combine_recv(
        self,
        stream: int,
        channel: int,
        combined: int,
        count: int,
        given: int,
        release: bool,
        *,
        added: tuple[int, int, int] = ...,
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch the combine receive half."""

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
        added: tuple[int, int, int] = ...,
        num_sms: int | None = None,
        plan: int = 0,
        kept: bool = False,
        positions: int | None = None,
    ) -> None:
        """Launch both combine halves as one kernel."""

    def check(self) -> None:
        """Raise the error that the device recorded, and clear it unless it ended the group."""

    def close(self, timeout: float) -> None:
        """Give all memory back; every rank calls this."""

    def abandon(self) -> None:
        """Close on this rank only."""

@final
class DeviceCollectives:
    """Collectives between devices: see `weft.cuda.Collectives`.

    Tensors are passed as device addresses, streams as CUDA handles, with 0 for a twin. Calls return
    at once, except that a twin's call first does its work.
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
        """Symmetric memory for all ranks in this process, in rank order."""

    @property
    def blocks(self) -> int:
        """Maximum blocks per launch."""

    @property
    def nbytes(self) -> int:
        """Memory on this rank, in bytes."""

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
            stream: launch stream.
            operation: "all_reduce", "reduce_scatter", "reduce", "all_gather", "all_to_all",
                "broadcast", "gather", "scatter" or "barrier".
            input: tensor that is sent.
            output: tensor that is written.
            element: reduction dtype; without a reduction, the unsigned type with equal width.
            count: elements in the vector (all-reduce, reduce, broadcast), in the output
                (reduce-scatter, scatter), in a rank's input (all-gather, gather), or in one rank's
                share (all-to-all).
            root: source or result rank.
            reduction: "sum", "product", "min", "max", "and", "or" or "xor".
            average: divide the sum by the rank count.
            algorithm: "one_shot", "two_shot" or "direct".
            num_sms: maximum blocks.
            sent: elements for each rank, in an uneven all-to-all.
            received: elements from each rank.
            copy_engine: True: by copy engines, without `algorithm`; None: the constructor's choice.
        """

    def prepare(self, reduction: str, element: str) -> None:
        """Compile and load the kernels for a reduction, for example "sum" with "bfloat16"."""

    def run_transfers(self, stream: int, batch: list[tuple[int, bool, int, int]]) -> None:
        """Launch sends and receives, all at the same time.

        Args:
            stream: launch stream.
            batch: for each transfer: peer, true for a receive, address, bytes.
        """

    def check(self) -> None:
        """Raise the error that the device recorded."""

    def close(self, timeout: float) -> None:
        """Free the memory; every rank makes this call."""

    def abandon(self) -> None:
        """Free the memory on this rank only."""

@final
class DeviceCalls:
    """`DeviceAllToAll` calls that take tensors, checked and launched in one crossing into Rust.

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
        """Calls for one tensor class and device; `None` if such tensors cannot be read.

        Args:
            all_to_all: what launches.
            tensors: a class with DLPack's C functions.
            device: a CUDA device; the CPU if not given.
            places: see `weft.moe.device.outputs.OutputLayout.places`.
        """

    def follows(self, channel: int, stream: int) -> bool:
        """True if the last call of this kind (eager or captured) on a channel used this stream."""

    def follow(self, channel: int, stream: int, captured: bool) -> None:
        """Note a channel's last stream."""

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
        """Launch the dispatch send half and return the token count."""

    def dispatch_recv(self, stream: int, channel: int, buffer: object, num_sms: int | None) -> bool:
        """Launch the dispatch receive half."""

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
        """Launch both dispatch halves as one kernel and return the token count."""

    def combine_send(self, stream: int, channel: int, outputs: object, num_sms: int | None) -> bool:
        """Launch the combine send half."""

    def combine_recv(
        self,
        stream: int,
        channel: int,
        combined: object,
        count: object | None,
        given: int,
        num_sms: int | None,
    ) -> bool:
        """Launch the combine receive half."""

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
        """Launch both combine halves as one kernel."""

def add_nvrtc_directory(directory: str) -> None:
    """Add a search directory for NVRTC, which compiles kernels; call it before the first use."""

def device_defines(
    ranks: int, *, placement: list[_RankExperts] | None = None, **options: Any
) -> list[tuple[str, str]]:
    """Macro names and values for a shape; options as in `DeviceAllToAll`."""

def describe_arguments(digest: int, text: str) -> None:
    """Keep a fused operator's argument text, for the error when ranks disagree."""

def table_fields() -> list[tuple[str, int, int, int]]:
    """Fields in a domain table: name, offset, element bytes, element count."""

def device_collectives_source(
    ranks: int,
    blocks: int,
    arch: str,
    reduction: str | None = None,
    element: str | None = None,
    *,
    transfers: bool = False,
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Collective kernels: program name, sources, compiler arguments.

    `transfers`: the send and receive kernel.
    """

def compile_collectives(
    ranks: int, blocks: int | None, arch: str, pairs: list[tuple[str, str]]
) -> tuple[int, int]:
    """Compile collective kernels into the cache; see `weft.cuda.compile_collectives`.

    Returns:
        How many programs were compiled, and how many were in the cache.
    """

def device_source(arch: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """The kernels' program: name, then path and text for each file, then options without macros."""

def build_info() -> BuildInfo:
    """Version, commit, target and profile of the native module."""

def providers() -> list[tuple[str, str, str, bool, list[str]]]:
    """All providers, in the order in which a route prefers them.

    Returns:
        For each: name, the peers that it reaches, how bytes travel, whether it is used by default,
        and the names under which `init` takes it (none for groups within one process).
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
    trace_limit: int = ...,
    listener: int | None = None,
    interrupt: Callable[[], object] | None = None,
) -> Communicator:
    """Join the group that the launcher or the arguments name.

    `listener`: a descriptor on which rank 0 listens; this call closes it. `interrupt`: called
    several times a second while the control plane waits, now or later; an exception from it ends
    the wait.
    """

def collectives_table(
    communicator: Communicator,
    timeout: float,
    sums: tuple[bool, int] = ...,
    tuning: tuple[str, str, str] | None = None,
    network: tuple[str, str] | None = None,
    host: str | None = None,
) -> tuple[int, int, tuple[str, str] | None]:
    """Connect collectives over a communicator; every rank calls this.

    Args:
        communicator: the group.
        timeout: seconds to wait for the other ranks.
        sums: true to add in rank order, so that all ranks get equal results; and the number of
            threads that reduce a long vector, at most 64. 0 means one for each core per rank on
            this host, at most 8.
        tuning: measurement file name and text, and this machine's name. Rank 0's values decide.
        network: network name and description, a short form or JSON. Rank 0's values decide.
        host: this rank's host name in the network (default: host identity).

    Returns:
        Addresses for a C function table (`weft/torch/shim/weft.h`) and a context, both freed by
        the table's last function; and rank 0's network.
    """

@final
class CollectiveTimer:
    """Timer for collectives on a communicator. Every rank makes the same calls."""

    def __new__(
        cls, communicator: Communicator, timeout: float, tuning: tuple[str, str, str] | None = None
    ) -> Self: ...
    def time(
        self,
        collective: str,
        algorithm: str,
        chunks: int,
        bytes: int,
        calls: int,
        timeout: float,
    ) -> tuple[int, float]:
        """Vector length in bytes (`bytes` rounded up to equal shares), and seconds per call.

        This is the mean over `calls` consecutive calls on float32.
        """

    def selected(self, collective: str, bytes: int) -> tuple[str, int]:
        """Algorithm and chunk count selected for a vector with this length."""

    def close(self, timeout: float) -> None:
        """Release the memory; every rank calls this."""

    @staticmethod
    def candidates(collective: str) -> list[tuple[str, int]]:
        """Algorithms to measure, with chunk counts."""

    @staticmethod
    def memory_rates() -> tuple[float, float]:
        """Seconds to copy a byte, and to add one to another, in this process's memory."""

def environment_key(purpose: str) -> bytes | None:
    """Key derived from WEFT_SECRET or WEFT_SECRET_FILE for one purpose; `None` without them."""

def host_id() -> str:
    """This host's identity: ranks that have the same one can share memory."""

@final
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

    def step(self) -> Step:
        """Start a `try_accept` call on a thread."""

    def has_formed(self) -> bool:
        """True if a pair waits to be taken, or the listener was closed."""

    def close(self) -> None:
        """Stop listening."""

@final
class Step:
    """`Listener.try_accept` call on a separate thread."""

    def fileno(self) -> int:
        """Readable once it has ended."""

    def take(self) -> Communicator | None:
        """The pair that formed, if one did."""

@final
class Dial:
    """Dial on a separate thread."""

    def fileno(self) -> int:
        """Readable once it has ended."""

    def take(self) -> Communicator:
        """The pair."""

    def cancel(self) -> None:
        """Give it up; a pair that has formed and was not taken is closed."""

@final
class QdlCounts:
    """Test counts that any thread can read."""

    def __new__(cls) -> Self: ...
    def snapshot(self) -> tuple[int, int, int, int]:
        """Queries issued, answered and failed, and nodes."""

    def departures(self) -> list[tuple[str, str, bool]]:
        """Name and cause for each node that left or was lost, and true if it was lost."""

def qdl_test(spec: str, counts: QdlCounts) -> str:
    """Run a [LoadGen](https://github.com/mlcommons/inference) test, JSON in and JSON out."""

def qdl_ask(
    addresses: list[str],
    queries: list[list[bytes]],
    provider: str | None,
    slots: int,
    checksum: bool,
    milliseconds: int,
    seconds: float,
) -> tuple[list[list[bytes] | str], int, int, float]:
    """Answers or failure causes; answer and failure totals over all submissions; seconds."""

@type_check_only
class _Lane(Protocol):
    """Fields that the node reads in a `weft.qdl.device.Lane`, which it keeps alive."""

    ordinal: int | None
    stream_handle: int
    addresses: list[int]

@final
class QdlNode:
    """Accelerator node."""

    def __new__(
        cls,
        spec: str,
        callable: Callable[..., Any] | None,
        lanes: Sequence[_Lane] = ...,
    ) -> Self:
        """Listen.

        `callable` takes the batch size, and for each input all queries' bytes and the bytes per
        query; it returns the same for each output. With `lanes` it is a
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
        """Cause for each lost front end."""

    def stop(self) -> None:
        """End `serve`."""

    def counts(self) -> tuple[int, int, int, int]:
        """Queries that have arrived, were answered and have failed, and front ends."""

def check_providers(names: list[str]) -> None:
    """Raise unless all these providers exist and work on this machine; opens no device."""

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

def dial(
    address: str,
    *,
    timeout: float,
    source: str | None = None,
    secret: bytes | None = None,
    providers: list[str] | None = None,
) -> Dial:
    """Start to connect to a listener, for event loops."""

def error_classes() -> list[str]:
    """Names in `weft.errors` that this module raises."""

@type_check_only
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
    #: True for a GPU slice (MIG).
    mig_slice: bool
    #: True if the GPU is partitioned (MIG); `None` if NVML does not report it.
    mig_mode: bool | None
    #: True if the memory can be shared by file descriptor.
    file_descriptors: bool
    #: Other devices whose memory it reaches.
    reaches: list[int]
    #: Devices that it reaches over NVLink; `None` if NVML does not report them.
    nvlink: list[int] | None

@type_check_only
class CudaReport(TypedDict):
    """Report on CUDA, for typing only; `None` for missing parts."""

    #: The newest CUDA that the driver offers.
    driver: tuple[int, int] | None
    devices: list[CudaDevice]
    #: NVIDIA driver version, from NVML.
    nvml: str | None
    #: NVRTC version and file.
    nvrtc: tuple[tuple[int, int], str] | None
    #: True if GDRCopy's library and driver are there; no GPU's memory has been mapped.
    gdrcopy: bool
    #: For each missing part above, the reason in a few words.
    errors: dict[str, str]

def cuda_report(nvrtc_folders: Sequence[str] = ...) -> CudaReport:
    """Report on CUDA on this machine; NVRTC is also searched for in these folders."""

@type_check_only
class ProviderNics(TypedDict):
    """A provider's NICs by GPU, for typing only."""

    #: `WEFT_VERBS_DEVICES` or `WEFT_OFI_DOMAINS` with its value, if it is set.
    named: str | None
    #: Reason for which no GPU has NICs of its own.
    error: str | None
    #: For each GPU: label, PCI address, NICs (none: all), reason.
    gpus: list[tuple[str, str, list[str], str]]

@type_check_only
class NicReport(TypedDict):
    """Report on NICs by GPU, for typing only."""

    #: PCI address of this process's GPU, if it is known, and how, or the reason why not.
    rank_gpu: tuple[str | None, str]
    verbs: ProviderNics
    ofi: ProviderNics

def nic_report(copy: tuple[str, list[str], list[str]] | None = ...) -> NicReport:
    """NICs by GPU on this machine. Loads libibverbs, libfabric and the CUDA driver.

    `copy`: a folder with another host's `/sys`, active ports and libfabric domains there.
    """

@type_check_only
class OfiOffer(TypedDict):
    """NIC that a libfabric provider reaches, for typing only."""

    domain: str
    fabric: str
    #: Maximum bytes and ranges per part.
    max_part_bytes: int
    max_ranges: int
    #: Sources must be registered.
    registers_sources: bool
    #: Each arrival consumes a posted receive.
    consumes_receives: bool
    #: Writes go on without calls into the library.
    progresses_by_itself: bool
    #: CUDA device memory can be registered.
    reaches_devices: bool

@type_check_only
class OfiProvider(TypedDict):
    """Libfabric provider, for typing only."""

    offers: list[OfiOffer]
    #: Reason for having no domain.
    error: str | None

@type_check_only
class OfiReport(TypedDict):
    """Report on [libfabric](https://ofiwg.github.io/libfabric/), for typing only."""

    #: Library file and version; if there is none, `error` says why.
    library: str | None
    version: tuple[int, int] | None
    error: str | None
    #: Names of all built-in providers, with or without NICs.
    built_in: list[str]
    providers: dict[str, OfiProvider]

def ofi_report(providers: list[str]) -> OfiReport:
    """Report on libfabric for these providers. Loads the library; opens no NIC."""

@type_check_only
class VerbsPort(TypedDict):
    """RDMA device port, for typing only."""

    #: Device and port, for example `mlx5_0:1`.
    name: str
    device: str
    #: Reason that the provider verbs cannot use it. GID and MTU are empty then; if the device
    #: cannot be opened, all fields below are.
    unusable: str | None
    #: InfiniBand state name, such as `ACTIVE`.
    state: str
    #: `InfiniBand` or `Ethernet`.
    link_layer: str
    #: Link rate in Gb/s.
    gigabits: float | None
    #: Selected GID table entry and index.
    gid: tuple[str, int] | None
    #: Number of non-empty GID table entries.
    gid_entries: int
    #: Longest packet in bytes, without headers.
    mtu: int
    #: Longest message in bytes.
    max_message: int
    #: Version.
    firmware: str
    #: Limits for a completion queue, a send queue and a shared receive queue.
    max_completions: int
    max_requests: int
    max_receives: int
    on_demand_paging: bool

@type_check_only
class VerbsReport(TypedDict):
    """Report on [libibverbs](https://github.com/linux-rdma/rdma-core), for typing only."""

    #: Library file.
    library: str | None
    #: Reason that there is no library, or for failing to list devices.
    error: str | None
    #: True if it registers GPU memory by dma-buf.
    dma_buf: bool
    ports: list[VerbsPort]

def verbs_report() -> VerbsReport:
    """Report on libibverbs and all device ports. Loads the library; opens each device."""

def simulate(spec: str, progress: Callable[[float, str], object] | None = None) -> str:
    """Run a scenario, JSON in and JSON out; `progress` may stop it by returning False."""

def schedule(job: str) -> str:
    """Full schedule for a collective job, JSON in and JSON out."""

def topology_host(root: str, xml: str | None = None, nvml: str | None = None) -> str:
    """The server in a `/sys` copy or in NCCL's XML, with what NVML adds; JSON."""

def topology_bigraph(spec: str, hosts: list[str] | None = None) -> str:
    """A BiGraph's cabling, rank map in all forms, and network; JSON."""

def hdrm_hosts(spec: str, ranks: int | None = None, names: list[str] | None = None) -> list[str]:
    """Host name by rank in HDRM's map."""

def hdrm_positions(spec: str, hosts: list[str], names: list[str] | None = None) -> list[int]:
    """HDRM position by rank, from the ranks' hosts."""

def topology_network(spec: str) -> str:
    """Any network, with counts; JSON."""

def topology_path(
    spec: str, source: str, target: str, routing: str = "static", seed: int = ..., flow: int = ...
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
    """Round float32 rows to codes and scales."""

def dequantise(
    codes: _Array,
    scales: _Array,
    hidden: int,
    dtype: str,
    scale_dtype: str,
    block: int,
    values: _Array,
) -> None:
    """Widen coded rows to float32."""

def dlpack_tensor(
    capsule: object, what: str, device: int | None = None
) -> tuple[int, list[int], str, int]:
    """Address, shape, dtype and bytes for a contiguous tensor; keep the capsule meanwhile.

    The tensor is in CPU memory, or on the CUDA device with this ordinal; errors call it `what`. See
    https://dmlc.github.io/dlpack/latest/python_spec.html.
    """

def cuda_device_of(address: int) -> int:
    """Ordinal of the CUDA device that owns the memory at an address."""

def end_words() -> None:
    """End all callbacks for words, and wait 10 s at most for one that runs."""

def end_logging() -> None:
    """End the thread that hands log records to Python, and hand over the rest."""
