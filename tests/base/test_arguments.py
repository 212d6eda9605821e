"""Arguments that could be misinterpreted are rejected: byte order, ids, gradients, numbers."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weft
from tests.workers.cuda import device_native
from tests.workers.group.buffers import Tensor
from weft import errors

#: This machine's other byte order.
FOREIGN = np.dtype(np.float32).newbyteorder().str
REMEDY = r"array\.astype\(array\.dtype\.newbyteorder\('='\)\)"


@pytest.fixture
def communicator() -> Iterator[weft.Communicator]:
    with weft.init(rank=0, world_size=1) as made:
        yield made


@pytest.fixture
def all_to_all(communicator: weft.Communicator) -> weft.moe.AllToAll:
    return weft.moe.AllToAll(communicator, experts=4, top_k=2, hidden=4, max_tokens=8)


def test_a_hostile_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOSTILE", "much")
    with pytest.raises(errors.ConfigurationError, match='WEFT_HOSTILE "much": expected a seed'):
        weft.init(rank=0, world_size=1)


TOKENS = np.ones((3, 4), np.float32)
IDS = np.array([[0, 1], [2, 3], [-1, 0]])
WEIGHTS = np.ones((3, 2), np.float32)


def swapped(values: Any) -> Any:
    """The same numbers in the other byte order."""
    return values.astype(values.dtype.newbyteorder())


def test_arrays_in_the_other_byte_order_are_refused(all_to_all: weft.moe.AllToAll) -> None:
    foreign = f"is of dtype {FOREIGN}: native byte order is needed; pass {REMEDY}"
    attempts: list[tuple[str, tuple[Any, ...]]] = [
        (f"^tokens {foreign}", (swapped(TOKENS), IDS)),
        (f"^weights {foreign}", (TOKENS, IDS, swapped(WEIGHTS))),
        (f"^ids is of dtype {swapped(IDS).dtype.str}: ", (TOKENS, swapped(IDS))),
    ]
    for message, arguments in attempts:
        with pytest.raises(errors.ShapeError, match=message):
            all_to_all.dispatch_send(*arguments)
    with all_to_all.dispatch(TOKENS, IDS, WEIGHTS) as received:
        with pytest.raises(errors.ShapeError, match=f"^outputs {foreign}"):
            all_to_all.combine(received, swapped(received.tokens))
        under_way = all_to_all.combine_send(received, received.tokens)
        with pytest.raises(errors.ShapeError, match=f"^out {foreign}"):
            under_way.recv(out=swapped(TOKENS))
        assert under_way.recv().tolist() == [[2] * 4, [2] * 4, [1] * 4]


def test_scales_in_the_other_byte_order_are_refused(communicator: weft.Communicator) -> None:
    codes, scales = weft.float8.quantise(TOKENS, block=2)
    scaled = weft.moe.AllToAll(
        communicator, experts=4, top_k=2, hidden=4, max_tokens=8, dtype=codes.dtype, block=2
    )
    with pytest.raises(errors.ShapeError, match=r"^scales is of dtype .*byte order"):
        scaled.dispatch_send(codes, IDS, scales=swapped(scales))
    with pytest.raises(errors.ShapeError, match=r"^scales is of dtype .*byte order"):
        weft.float8.dequantise(codes, swapped(scales), block=2)


RECORD = np.dtype([("id", np.int32), ("weight", np.float64)])


class Swapped(ctypes.BigEndianStructure if np.little_endian else ctypes.LittleEndianStructure):  # type: ignore[misc]
    """A record in the other byte order, as described by the buffer protocol."""

    _fields_ = [("number", ctypes.c_uint32)]  # noqa: RUF012


@pytest.mark.parametrize(
    "value",
    [
        swapped(np.arange(4, dtype=np.uint32)),
        swapped(np.ones(3, ml_dtypes.bfloat16)),
        np.zeros(2, RECORD.newbyteorder()),
        memoryview(swapped(np.arange(4, dtype=np.uint32))),
        Swapped(1),
    ],
)
def test_memory_in_the_other_byte_order_is_no_region(
    communicator: weft.Communicator, value: Any
) -> None:
    with pytest.raises(errors.ShapeError, match=rf"native byte order is needed; pass {REMEDY}"):
        communicator.register(value)
    communicator.register(np.zeros(2, RECORD))
    communicator.register(np.ones(3, ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    "kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_ids_are_of_any_integer_dtype(all_to_all: weft.moe.AllToAll, kind: Any) -> None:
    ids = np.array([[0, 1], [2, 3], [3, 0]]).astype(kind)
    for given in (ids, np.asfortranarray(ids), ids.tolist()):
        with all_to_all.dispatch(TOKENS, given) as received:
            assert received.expert_load.tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (IDS.astype(np.float64), "float64"),
        (IDS + 0.5, "float64"),
        (np.full((3, 2), np.nan), "float64"),
        (IDS > 0, "bool"),
        (IDS.astype(str), "<U"),
        (IDS.astype(object), "object"),
        (IDS.astype(complex), "complex128"),
        (IDS.astype(ml_dtypes.bfloat16), "bfloat16"),
        ([["0", "1"]] * 3, "<U1"),
        ([[True, False]] * 3, "bool"),
        ([[2**70, 0]] * 3, "object"),
    ],
)
def test_ids_that_are_no_integers_are_refused(
    all_to_all: weft.moe.AllToAll, ids: Any, dtype: str
) -> None:
    with pytest.raises(errors.ShapeError, match=f"^ids is of dtype {dtype}.*an integer dtype"):
        all_to_all.dispatch_send(TOKENS, ids)


def test_ids_that_do_not_fit_are_named(all_to_all: weft.moe.AllToAll) -> None:
    ids = np.array([[0, 1], [2, 2**63], [1, 2**64 - 1]], np.uint64)
    with pytest.raises(errors.ExpertError, match=rf"^ids\[1, 1\] is {2**63}: at most {2**63 - 1}"):
        all_to_all.dispatch_send(TOKENS, ids)
    for number in (4, 2**32, 2**32 + 1, 2**63 - 1):
        with pytest.raises(errors.ExpertError, match=str(number)):
            all_to_all.dispatch_send(TOKENS, np.array([[0, 1], [2, number], [1, 0]]))
    with pytest.raises(errors.ShapeError, match=r"^ids cannot be taken as an array"):
        all_to_all.dispatch_send(TOKENS, [[0, 1], [2], [3]])


@pytest.mark.parametrize("kind", [str, complex, bool, object])
def test_weights_that_are_no_numbers_are_refused(all_to_all: weft.moe.AllToAll, kind: Any) -> None:
    with pytest.raises(errors.ShapeError, match=r"^weights is of dtype"):
        all_to_all.dispatch_send(TOKENS, IDS, WEIGHTS.astype(kind))


class Learning(Tensor):
    """A tensor from a library with gradients."""

    requires_grad = True
    dtype = np.dtype(np.float32)


def test_a_gradient_is_not_dropped_silently(all_to_all: weft.moe.AllToAll) -> None:
    refused = r"requires a gradient, .*gradients=True, pass {0}\.detach\(\), or call under torch"
    with pytest.raises(errors.ConfigurationError, match="^tokens " + refused.format("tokens")):
        all_to_all.dispatch_send(Learning(TOKENS), IDS)
    weights: Any = Learning(WEIGHTS)
    with pytest.raises(errors.ConfigurationError, match="^weights " + refused.format("weights")):
        all_to_all.dispatch_send(TOKENS, IDS, weights)
    with all_to_all.dispatch(TOKENS, IDS) as received:
        with pytest.raises(
            errors.ConfigurationError, match="^outputs " + refused.format("outputs")
        ):
            all_to_all.combine(received, Learning(received.tokens))
        with pytest.raises(errors.ConfigurationError, match=r"^out "):
            all_to_all.combine(received, received.tokens, out=Learning(TOKENS.copy()))
        # The round was not sent yet.
        assert all_to_all.combine(received, received.tokens).shape == TOKENS.shape


#: Numbers outside the unsigned 64-bit range.
MISFITS = [-1, -(2**70), 2**64, 10**6000]

Call = Callable[[weft.Communicator, int], object]


def page(communicator: weft.Communicator, **numbers: Any) -> weft.Page:
    """A region's page to itself, with these numbers in place of valid ones."""
    region = communicator.alloc(8)
    remote = weft.RemoteRegion(0, region._native.key(), 8, communicator._native)
    return weft.Page(region, 0, remote, 0, 8)._replace(**numbers)


def write(name: str) -> Call:
    """A page write with a number in place of `name`."""
    return lambda it, number: it.write(0, it.counter(), [page(it, **{name: number})])


def all_to_all_with(name: str) -> Call:
    """An all-to-all with a number in place of the argument `name`."""
    sound = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 8}
    return lambda it, number: weft.moe.AllToAll(it, **(sound | {name: number}))  # type: ignore[arg-type]


NUMBERS: list[tuple[str, Call]] = [
    *((name, write(name)) for name in ("source_offset", "destination_offset", "length", "count")),
    *((name, write(name)) for name in ("source_stride", "destination_stride")),
    ("round", lambda it, number: it.write(0, it.counter(), number, [])),
    ("round", lambda it, number: it.scatter({}, it.counter(), number)),
    ("round", lambda it, number: it.counter().wait({}, round=number)),
    ("round", lambda it, number: it.counter().count(0, number)),
    ("round", lambda it, number: it.counter().wait_for_credit(0, number)),
    ("expected", lambda it, number: it.counter().wait({0: number})),
    ("length", lambda it, number: it.counter().wait({0: [number]})),
    ("length", lambda it, number: it.parts(0, [number])),
    ("length", lambda it, number: it.alloc(number)),
    ("window", lambda it, number: it.counter(window=number)),
    ("trace_limit", lambda _, number: weft.init(rank=0, world_size=1, trace_limit=number)),
    ("rank", lambda _, number: weft.init(rank=number, world_size=1)),
    ("world_size", lambda _, number: weft.init(rank=0, world_size=number)),
    *((name, all_to_all_with(name)) for name in ("experts", "top_k", "hidden", "max_tokens")),
    *((name, all_to_all_with(name)) for name in ("pad_to", "private_rows", "max_receive_rows")),
    *((name, all_to_all_with(name)) for name in ("channels", "max_bytes")),
]


@pytest.mark.parametrize(("name", "call"), NUMBERS)
def test_a_number_that_does_not_fit_is_named(
    communicator: weft.Communicator, name: str, call: Call
) -> None:
    for number in MISFITS:
        shown = str(number) if number < 2**70 else r"\(too many digits\)"
        with pytest.raises(errors.ConfigurationError, match=f"^{name}={shown}: expected "):
            call(communicator, number)


def test_a_number_of_a_peer_group_that_does_not_fit_is_named(
    communicator: weft.Communicator,
) -> None:
    group = communicator.peer_group(communicator.counter(), communicator.alloc(8), [])
    for place, name in enumerate(("source_offset", "destination_offset", "length"), 1):
        for number in (-1, 2**64):
            write = [0, 0, 0, 0]
            write[place] = number
            with pytest.raises(errors.ConfigurationError, match=f"^{name}={number}: expected "):
                group.scatter([tuple(write)])  # type: ignore[list-item]
    with pytest.raises(errors.UnknownError, match=r"^member=-1: "):
        group.scatter([(-1, 0, 0, 0)])


@pytest.mark.parametrize("peer", [-1, 2**32, 2**64])
def test_a_rank_that_cannot_be_is_unknown(communicator: weft.Communicator, peer: int) -> None:
    counter = communicator.counter()
    calls: list[Callable[[], object]] = [
        lambda: communicator.route(peer),
        lambda: communicator.parts(peer),
        lambda: communicator.signal(peer, counter),
        lambda: communicator.counter(peers=[peer]),
        lambda: counter.wait({peer: 1}),
        lambda: counter.count(peer),
        lambda: counter.next_round(peer),
        lambda: counter.open_round(peer),
        lambda: counter.credits(peer),
        lambda: counter.credit(peer),
        lambda: counter.wait_for_credit(peer),
    ]
    for call in calls:
        with pytest.raises(errors.UnknownError, match=f"^peer={peer}: "):
            call()


@pytest.mark.parametrize("name", ["experts", "channels", "num_sms", "max_positions"])
def test_a_number_of_an_all_to_all_on_devices_that_does_not_fit_is_named(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"^{name}=-1: expected "):
        device_native.local_group(2, **{name: -1})


def test_a_block_that_does_not_fit_is_named() -> None:
    with pytest.raises(errors.ConfigurationError, match=f"^block={2**64}: expected "):
        weft.float8.quantise(TOKENS, block=2**64)
