"""Model for the C table in `python/weft/torch/shim/weft.h`: collectives over a torch store.

Slow and simple: each rank puts its input into the store, and a wait computes the output from all.
"""

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

OK, TIMEOUT, LOST, INVALID, CLOSED, FAILED = range(6)
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL = range(5)
ANY_RANK = 0xFFFFFFFF
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
]
REDUCTIONS: list[Callable[[Any, Any], Any]] = [
    torch.add,
    torch.mul,
    torch.minimum,
    torch.maximum,
    torch.bitwise_and,
    torch.bitwise_or,
    torch.bitwise_xor,
]
#: Seconds between two looks at the store.
INTERVAL = 0.0005


class Call(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("scale", ctypes.c_uint32),
        ("factor", ctypes.c_double),
        ("root", ctypes.c_uint32),
        ("elements", ctypes.c_uint64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    ]


class Segment(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


Status, Context, Id, Size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
Ids = ctypes.POINTER(Id)
Segments = ctypes.POINTER(Segment)
FUNCTIONS: list[tuple[str, Any]] = [
    ("start", ctypes.CFUNCTYPE(Status, Context, ctypes.POINTER(Call), Ids)),
    ("run", ctypes.CFUNCTYPE(Status, Context, ctypes.POINTER(Call), Size, Ids)),
    ("exchange", ctypes.CFUNCTYPE(Status, Context, Segments, Segments, Ids)),
    *(
        (name, ctypes.CFUNCTYPE(Status, Context, ctypes.c_uint32, Size, ctypes.c_void_p, Size, Ids))
        for name in ("send", "receive")
    ),
    ("is_done", ctypes.CFUNCTYPE(Status, Context, Id)),
    ("wait", ctypes.CFUNCTYPE(Status, Context, Id, Size, ctypes.POINTER(ctypes.c_uint32))),
    ("last_error", ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)),
    ("poison", ctypes.CFUNCTYPE(None, Context, ctypes.c_char_p)),
    *((name, ctypes.CFUNCTYPE(None, Context)) for name in ("end_waits", "close", "release")),
]


class Table(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        *FUNCTIONS,
    ]


class StoreGroup:
    """One rank's table over a store; `calls` has function names in call order."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.calls: list[str] = []
        self.collectives = 0
        #: Messages to and from each peer with each tag.
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        #: By id: steps that return true once they are done.
        self.pending: dict[int, Callable[[], bool]] = {}
        self.senders: dict[int, int] = {}
        self.ids = 0
        self.closed = False
        self.lock = threading.RLock()
        #: Last error text by native thread: a C++ thread has a Python state, and so
        #: `threading.local`, only during one call.
        self.errors: dict[int, str] = {}
        functions = {name: kind(self.wrapped(name)) for name, kind in FUNCTIONS}
        self.table = Table(abi=2, rank=rank, ranks=ranks, **functions)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.table)

    def wrapped(self, name: str) -> Callable[..., Any]:
        function = getattr(self, name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == "last_error":
                return function(*arguments)
            try:
                return function(*arguments[1:])
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")
                return FAILED

        return call

    def fail(self, text: str) -> None:
        self.errors[threading.get_native_id()] = text

    def add(self, id: Any, step: Callable[[], bool]) -> int:
        with self.lock:
            self.ids += 1
            self.pending[self.ids] = step
            id[0] = self.ids
        return OK

    def start(self, given: Any, id: Any) -> int:
        call = Call.from_buffer_copy(given.contents)
        dtype = DTYPES[call.element]
        self.collectives += 1
        share = call.elements // self.ranks
        size = share if call.kind == ALL_GATHER else call.elements
        keys = [f"c{self.collectives}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], ctypes.string_at(call.input, size * dtype.itemsize))

        def step() -> bool:
            if not self.store.check(keys):
                return False
            inputs = [tensor(self.store.get(key), dtype) for key in keys]
            write(call.output, self.combined(call, inputs, share))
            return True

        return self.add(id, step)

    def run(self, given: Any, nanoseconds: int, id: Any) -> int:
        self.start(given, id)
        status = self.wait(id[0], nanoseconds, [None])
        if status != TIMEOUT:
            id[0] = 0
        return status

    def combined(self, call: Call, inputs: list[Any], share: int) -> Any:
        mine = slice(self.rank * share, (self.rank + 1) * share)
        if call.kind == ALL_GATHER:
            return torch.cat(inputs)
        if call.kind == BROADCAST:
            return inputs[call.root]
        if call.kind == ALL_TO_ALL:
            return torch.cat([each[mine] for each in inputs])
        dtype = inputs[0].dtype
        wide = [each.double() if dtype.is_floating_point else each for each in inputs]
        if call.scale == 2:
            wide = [each * call.factor for each in wide]
        result = functools.reduce(REDUCTIONS[call.reduction], wide)
        if call.scale == 1:
            result = result / self.ranks
        result = result.to(dtype)
        return result[mine] if call.kind == REDUCE_SCATTER else result

    def exchange(self, sends: Any, receives: Any, id: Any) -> int:
        tag = 1 << 40
        steps = []
        for peer in range(self.ranks):
            if sends[peer].bytes:
                self.put(peer, tag, ctypes.string_at(sends[peer].data, sends[peer].bytes))
            if receives[peer].bytes:
                steps.append(self.taker(peer, tag, receives[peer].data, receives[peer].bytes))

        def step() -> bool:
            while steps and steps[0]():
                steps.pop(0)
            return not steps

        return self.add(id, step)

    def send(self, peer: int, tag: int, data: int, size: int, id: Any) -> int:
        self.put(peer, tag, ctypes.string_at(data, size) if size else b"")
        return self.add(id, lambda: True)

    def put(self, peer: int, tag: int, payload: bytes) -> None:
        number = self.sent.get((peer, tag), 0)
        self.sent[peer, tag] = number + 1
        self.store.set(f"m{self.rank}/{peer}/{tag}/{number}", b"." + payload)

    def next_key(self, source: int, tag: int) -> str:
        """Key for the next message from a rank."""
        return f"m{source}/{self.rank}/{tag}/{self.received.get((source, tag), 0)}"

    def taker(self, source: int, tag: int, data: int, size: int) -> Callable[[], bool]:
        key = self.next_key(source, tag)
        self.received[source, tag] = self.received.get((source, tag), 0) + 1

        def step() -> bool:
            if not self.store.check([key]):
                return False
            payload = self.store.get(key)[1:]
            assert len(payload) == size, f"message of {len(payload)} bytes: expected {size}"
            ctypes.memmove(data, payload, size)
            return True

        return step

    def receive(self, peer: int, tag: int, data: int, size: int, id: Any) -> int:
        if peer != ANY_RANK:
            return self.add(id, self.taker(peer, tag, data, size))

        def step() -> bool:
            for source in range(self.ranks):
                if self.store.check([self.next_key(source, tag)]):
                    self.senders[number] = source
                    return self.taker(source, tag, data, size)()
            return False

        with self.lock:
            self.add(id, step)
            number = id[0]
        return OK

    def is_done(self, id: int) -> int:
        return int(id not in self.pending)

    def wait(self, id: int, nanoseconds: int, sender: Any) -> int:
        until = time.monotonic() + nanoseconds / 1e9
        while id in self.pending:
            if self.closed:
                self.fail("the communicator was closed")
                return CLOSED
            if self.store.check(["poison"]):
                self.fail(self.store.get("poison").decode())
                return LOST
            # One thread at a time: a second one would write an output that the program has already.
            with self.lock:
                for number, step in list(self.pending.items()):
                    if step():
                        del self.pending[number]
            if id in self.pending:
                if time.monotonic() >= until:
                    self.fail("rank 1 is missing")
                    return TIMEOUT
                time.sleep(INTERVAL)
        if id in self.senders:
            sender[0] = self.senders[id]
        return OK

    def last_error(self, text: int, capacity: int) -> int:
        payload = self.errors.get(threading.get_native_id(), "").encode()[: capacity - 1] + b"\0"
        ctypes.memmove(text, payload, len(payload))
        return len(payload) - 1

    def poison(self, text: bytes) -> None:
        self.store.set("poison", text)

    def end_waits(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def release(self) -> None:
        pass


def tensor(payload: bytes, dtype: Any) -> Any:
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def write(address: int, value: Any) -> None:
    value = value.contiguous()
    ctypes.memmove(address, value.data_ptr(), value.nbytes)
