"""Arrays that would be taken for others are refused: byte order, ids that are no ids, gradients."""

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weft
from weft import errors
from workers.buffers import Tensor

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
    """A record in the other byte order, which the buffer protocol describes."""

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
    """A tensor of a library with gradients."""

    requires_grad = True
    dtype = np.dtype(np.float32)


def test_a_gradient_is_not_dropped_silently(all_to_all: weft.moe.AllToAll) -> None:
    refused = r"requires a gradient, .*: pass {0}\.detach\(\), or call under torch\.no_grad\(\)"
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
