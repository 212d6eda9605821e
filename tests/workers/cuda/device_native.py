"""Native all-to-all ranks on the CPU twin, over numpy's arrays."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import weft
from weft import _native

#: Native class default arguments.
OPTIONS: dict[str, Any] = {
    "experts": 8,
    "top_k": 2,
    "hidden": 16,
    "max_tokens": 32,
    "token_dtype": "float32",
    "wire_dtype": "float32",
    "scales": None,
    "combine_dtype": "float32",
    "reply_dtype": "float32",
    "output_dtype": "float32",
    "ids_dtype": "int64",
    "layout": "contiguous",
    "pad_to": 1,
    "expert_capacity": None,
    "max_positions": None,
    "weighting": "combine",
    "channels": 2,
    "num_sms": None,
    "path": None,
    "memory": "fd",
    "skew_timeout": 20.0,
    "max_bytes": None,
    "timeout": 20.0,
}


class Batch(NamedTuple):
    """A rank's batch: float32 tokens, int64 ids, float32 weights."""

    tokens: NDArray[np.float32]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


class Rank:
    """One rank's native object, and its call arrays."""

    def __init__(self, native: _native.DeviceAllToAll, options: Mapping[str, Any]) -> None:
        self.native, self.options = native, options
        self.experts, self.top_k = options["experts"], options["top_k"]
        self.hidden, self.max_tokens = options["hidden"], options["max_tokens"]
        self.local_experts = range(*native.local_experts)
        positions, experts = native.positions, len(self.local_experts)
        self.tokens = np.zeros((positions, self.hidden), np.float32)
        self.counts = np.zeros(max(experts, 1), np.int32)
        self.offsets = np.zeros(experts + 1, np.int32)
        self.rows = np.zeros(positions, np.int32)
        self.weights = np.zeros(positions, np.float32)
        self.outputs = np.full((positions, self.hidden), np.nan, np.float32)
        self.combined = np.zeros((self.max_tokens, self.hidden), np.float32)

    def batch(self, random: np.random.Generator, count: int | None = None) -> Batch:
        """Small integer tokens, so that sums are exact in any order."""
        given = int(random.integers(0, self.max_tokens + 1)) if count is None else count
        tokens = random.integers(-99, 100, (given, self.hidden)).astype(np.float32)
        chosen = [random.permutation(self.experts)[: self.top_k] for _ in range(given)]
        ids = np.array(chosen, np.int64).reshape(given, self.top_k)
        ids[random.random(ids.shape) < 0.2] = -1
        weights = random.integers(0, 4, ids.shape).astype(np.float32)
        return Batch(tokens, ids, weights)

    def inputs(self, sent: Batch) -> tuple[int, int, int, int, int, int]:
        """Arguments to the send half."""
        ids, weights = address(sent.ids), address(sent.weights)
        return address(sent.tokens), 0, ids, weights, 0, len(sent.tokens)

    def received(self) -> tuple[int, int, int, int, int, int]:
        """Arguments to the receive half."""
        indexed = self.options["layout"] == "indexed"
        tokens = None if indexed else self.tokens
        return (
            address(tokens),
            0,
            address(self.counts),
            address(self.offsets),
            address(self.rows),
            address(self.weights),
        )

    def run_experts(self, channel: int) -> None:
        """Expert e multiplies by e + 1."""
        tokens = self.tokens
        if self.options["layout"] == "indexed":
            base, stride, rows = self.native.received(channel)
            tokens = landed(base, stride, rows, self.hidden)
        for local, expert in enumerate(self.local_experts):
            begin = int(self.offsets[local])
            group = slice(begin, begin + int(self.counts[local]))
            named = tokens[self.rows[group]] if tokens is not self.tokens else tokens[group]
            self.outputs[group] = named * np.float32(expert + 1)

    def expected(self, sent: Batch) -> NDArray[np.float32]:
        """A batch's result in one process."""
        factors = np.where(sent.ids < 0, 0, sent.ids + 1) * sent.weights
        sums: NDArray[np.float32] = factors.sum(axis=1, dtype=np.float32)
        return np.multiply(sent.tokens, sums[:, np.newaxis])

    def round(self, channel: int, sent: Batch, *, fused: bool) -> str | None:
        """Dispatch, experts, combine; result differences."""
        native, given = self.native, len(sent.tokens)
        combined = address(self.combined)
        self.combined[:] = np.nan
        if fused:
            native.dispatch(0, channel, *self.inputs(sent), *self.received())
        else:
            native.dispatch_send(0, channel, *self.inputs(sent))
            native.dispatch_recv(0, channel, *self.received())
        self.run_experts(channel)
        outputs = address(self.outputs)
        if fused:
            native.combine(0, channel, outputs, combined, 0, given, False)
        else:
            native.combine_send(0, channel, outputs, False)
            native.combine_recv(0, channel, combined, 0, given, False)
        native.check()
        if not (self.combined[:given] == self.expected(sent)).all():
            return f"channel {channel}, {given} tokens, fused {fused}: {self.combined[:given]}"
        return None


def address(array: NDArray[Any] | None) -> int:
    """An array's address; 0 for none."""
    return 0 if array is None else int(array.ctypes.data)


def landed(base: int, stride: int, rows: int, hidden: int) -> NDArray[np.float32]:
    """Received rows in their slots."""

    given: Any = (ctypes.c_uint8 * (rows * stride)).from_address(base)
    values: NDArray[np.float32] = np.frombuffer(given, np.float32).reshape(rows, -1)
    return values[:, :hidden]


def make(communicator: weft.Communicator, **changes: Any) -> Rank:
    """A rank's twin over a communicator."""
    options = OPTIONS | changes
    native = _native.DeviceAllToAll(communicator._native, device="twin", **options)
    return Rank(native, options)


def local_group(world_size: int, **changes: Any) -> list[Rank]:
    """All ranks' twins in this process."""
    options = OPTIONS | changes
    natives = _native.DeviceAllToAll.local_group(world_size, ["twin"] * world_size, **options)
    return [Rank(native, options) for native in natives]


def named(call: Callable[[], object]) -> tuple[str, int | None, str]:
    """A call's error: class, rank, message."""
    try:
        call()
    except weft.WeftError as error:
        return type(error).__name__, error.rank, str(error)
    return "None", None, ""


def rounds(shapes: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    """Every shape's rounds; their differences."""
    wrong: list[str] = []
    with weft.init() as communicator:
        random = np.random.default_rng(communicator.rank)
        for shape in shapes:
            rank = make(communicator, **shape)
            for number in range(rounds):
                problem = rank.round(number % 2, rank.batch(random), fused=number % 3 == 0)
                if problem:
                    wrong.append(f"{shape}: {problem}")
            rank.native.close(20.0)
    return wrong


def constructed(differing: Mapping[str, Any], **same: Any) -> tuple[str, int | None, str]:
    """Errors on rank 0 and on the last rank, the only one with other options."""
    with weft.init() as communicator:
        last = communicator.rank == communicator.world_size - 1
        return named(lambda: make(communicator, **same, **(differing if last else {})))


def late(skew: float) -> dict[str, Any]:
    """Rank 1 never sends: the error on rank 0, then all ranks' errors."""
    with weft.init() as communicator:
        rank = make(communicator, skew_timeout=skew)
        sent = rank.batch(np.random.default_rng(0), 4)
        result: dict[str, Any] = {}
        if communicator.rank == 0:
            rank.native.dispatch_send(0, 0, *rank.inputs(sent))
            began = time.monotonic()
            # As on a device, a call whose wait fails does not raise.
            rank.native.dispatch_recv(0, 0, *rank.received())
            result["waited"] = time.monotonic() - began
            result["poisoned"] = bool((rank.rows == -1).all() and np.isnan(rank.tokens).all())
            calls = [
                lambda: rank.native.dispatch_send(0, 1, *rank.inputs(sent)),
                rank.native.check,
                communicator.barrier,
            ]
        else:
            calls = [lambda: until_raised(rank.native.check), communicator.barrier]
        result["reports"] = [named(call) for call in calls]
        rank.native.close(20.0)
        return result


def until_raised(check: Callable[[], None]) -> None:
    """Poll until there is a result."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        check()
        time.sleep(0.01)


def closing() -> dict[str, Any]:
    """Rank 0 abandons its side: errors from the others' `close`, and from later rounds."""
    with weft.init() as communicator:
        rank, other = make(communicator), make(communicator)
        sent = rank.batch(np.random.default_rng(0), 4)
        wrong = [each.round(0, sent, fused=True) for each in (rank, other)]
        other.native.close(20.0)
        other.native.close(20.0)
        if communicator.rank == 0:
            rank.native.abandon()
            rank.native.abandon()
            reports = "None"
        else:
            reports = named(lambda: rank.native.close(0.5))[0]
        calls = [
            lambda: rank.native.dispatch_send(0, 0, *rank.inputs(sent)),
            rank.native.check,
            lambda: rank.native.received(0),
        ]
        closed = [named(call)[0] for call in calls]
        # Constant properties remain available.
        sizes = rank.native.sizes()[1], rank.native.positions, rank.native.path
        # Until here rank 0 has left the all-to-all, but not the group.
        communicator.barrier()
        return {"wrong": wrong, "reports": reports, "closed": closed, "sizes": sizes}


def fork() -> dict[str, Any]:
    """A child may only close, and its end does not affect its parent."""
    with weft.init() as communicator:
        rank = make(communicator)
        sent = rank.batch(np.random.default_rng(0), 4)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            calls = [
                lambda: rank.native.dispatch_send(0, 0, *rank.inputs(sent)),
                rank.native.check,
                lambda: rank.native.close(1.0),
                rank.native.abandon,
            ]
            os.write(writer, ",".join(named(call)[0] for call in calls).encode())
            del rank
            os._exit(0)
        os.close(writer)
        reports = os.read(reader, 1000).decode().split(",")
        os.waitpid(child, 0)
        wrong = rank.round(0, sent, fused=False)
        rank.native.close(20.0)
        return {"reports": reports, "wrong": wrong}


def survive(pipe: Connection, options: Mapping[str, Any], fused: bool) -> None:
    """Rounds until a rank is lost; reports the detection time and the error."""
    signal.alarm(60)
    with weft.init(**options) as communicator:
        rank = make(communicator, skew_timeout=50.0)
        sent = rank.batch(np.random.default_rng(communicator.rank), 8)
        pipe.send(rank.round(0, sent, fused=fused))
        try:
            while True:
                rank.round(0, sent, fused=fused)
        except weft.WeftError as error:
            found = {"at": time.monotonic(), "error": type(error).__name__, "rank": error.rank}
            pipe.send(found)
        # No rank can join, and `close` does not wait.
        rank.native.close(20.0)


def leave(pipe: Connection, options: Mapping[str, Any], _: object) -> None:
    """Rank 1 leaves after a round: it is not needed until the next."""
    with weft.init(**options) as communicator:
        rank = make(communicator)
        sent = rank.batch(np.random.default_rng(communicator.rank), 8)
        wrong = rank.round(0, sent, fused=False)
        communicator.barrier()
        if communicator.rank == 1:
            rank.native.abandon()
            pipe.send({"wrong": wrong, "error": "None", "rank": None})
            return
        # Too many tokens, so that no round begins before the goodbye has arrived.
        tokens, scales, ids, weights, count, _ = rank.inputs(sent)
        refused = (tokens, scales, ids, weights, count, rank.max_tokens + 1)
        end, error, at = time.monotonic() + 20, "ShapeError", None
        while error == "ShapeError" and time.monotonic() < end:
            rank.native.check()
            error, at, _ = named(lambda: rank.native.dispatch_send(0, 1, *refused))
        pipe.send({"wrong": wrong, "error": error, "rank": at})
        # A rank that leaves now must not be reported as the first.
        pipe.recv()
