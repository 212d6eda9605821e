"""Accelerator node: serves queries of front ends with a Python callable on batches."""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from weft import _native
from weft._environment import check_variables
from weft.errors import ConfigurationError, ShapeError
from weft.qdl.test import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["Accelerator", "Tensor", "UpTo"]


@dataclass(frozen=True)
class UpTo:
    """A dimension that varies from query to query, from 0 to `bound`. At most one of a tensor."""

    bound: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of a query or of an answer.

    Args:
        name: its name, of up to 255 bytes.
        dtype: numpy's name of its element type: uint8, int8, int32, int64, float16, float32 or
            float64.
        shape: its dimensions, without one for the batch.
    """

    name: str
    dtype: str
    shape: tuple[int | UpTo, ...]

    def to_json(self) -> dict[str, Any]:
        """As the native module takes it."""
        shape = [{"up_to": size.bound} if isinstance(size, UpTo) else size for size in self.shape]
        return {"name": self.name, "dtype": self.dtype, "shape": shape}

    def is_variable(self) -> bool:
        """True if a dimension varies."""
        return any(isinstance(size, UpTo) for size in self.shape)


Buffers = list[tuple[bytes, list[int]]]


class Accelerator:
    """An accelerator node. It serves in a thread of its own, from `start` to `stop`.

    `model` is called with one argument for each input, once a batch: an array `[batch, *shape]`, or
    a list of one array for each query if a dimension of the input varies. Arrays are read-only. It
    returns the same for each output, alone if there is one. The queries of a batch whose call
    raises fail at their front end; the exception goes to `sys.unraisablehook`.

    Args:
        model: function of a batch.
        inputs: tensors of a query.
        outputs: tensors of an answer.
        address: `host:port` to listen at; port 0 is any free port. An address that other hosts
            reach needs a secret (`WEFT_SECRET`).
        name: name of the node, unique among those of a front end; by default its address.
        provider: shm, verbs, ofi or tcp; by default the better of shm and tcp that reaches a
            front end.
        slots: most queries in flight of a front end.
        max_batch: most queries of a batch.
        window: seconds for which a batch waits for more queries.
        front_ends: most front ends at a time.
        spin: seconds without work in which the node polls without a pause.
        checksum: verify every payload by a checksum.

    Raises:
        ConfigurationError: an argument cannot be used.
        SecretError: the address can be reached from other hosts, and there is no secret.
        ListenError: the address is not of this host, or its port is in use.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        address: str = "127.0.0.1:0",
        name: str = "",
        provider: Literal["shm", "verbs", "ofi", "tcp"] | None = None,
        slots: int = 1024,
        max_batch: int = 64,
        window: float = 0.0,
        front_ends: int = 8,
        spin: float = 0.0,
        checksum: bool = False,
    ) -> None:
        check_variables()
        if not callable(model):
            raise ConfigurationError(f"model {model!r}: expected a callable")
        self._model = model
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        for tensor in (*self._inputs, *self._outputs):
            if tensor.dtype == "bfloat16":
                raise ConfigurationError(
                    f"tensor {tensor.name!r}: numpy has no bfloat16; use uint8 and view it"
                )
        spec = {
            "address": address,
            "name": name,
            "inputs": [tensor.to_json() for tensor in self._inputs],
            "outputs": [tensor.to_json() for tensor in self._outputs],
            "provider": provider,
            "slots": slots,
            "checksum": checksum,
            "front_ends": front_ends,
            "max_batch": max_batch,
            "window_us": round(window * 1e6),
            "spin_us": round(spin * 1e6),
        }
        # The native node would keep this object alive, and this object the node.
        run = weakref.WeakMethod(self._run)

        def run_if_alive(count: int, inputs: Buffers) -> Buffers:
            method = run()
            assert method is not None, "the thread that serves refers to the node"
            return method(count, inputs)

        self._node = _native.QdlNode(json.dumps(spec), run_if_alive)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """`host:port` at which it listens."""
        return self._node.address

    @property
    def name(self) -> str:
        """Name that front ends get."""
        return self._node.name

    def counts(self) -> Counts:
        """Queries that have arrived, and front ends, now."""
        return Counts(*self._node.counts())

    def start(self) -> None:
        """Serve, in a thread. Once."""
        self._thread = threading.Thread(target=self._serve, name="weft-node", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._node.serve()

    def stop(self) -> None:
        """End the thread and the listening. Front ends lose the node. Idempotent."""
        self._node.stop()
        if self._thread is None:
            self._node.close()
        else:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self, count: int, inputs: Buffers) -> Buffers:
        """Call the model with arrays in place of bytes."""
        arrays = [
            arrays_of(tensor, count, data, lengths)
            for tensor, (data, lengths) in zip(self._inputs, inputs, strict=True)
        ]
        returned = self._model(*arrays)
        outputs = [returned] if len(self._outputs) == 1 else list(returned)
        if len(outputs) != len(self._outputs):
            raise ShapeError(f"{len(outputs)} outputs of the model: expected {len(self._outputs)}")
        return [
            bytes_of(tensor, count, output)
            for tensor, output in zip(self._outputs, outputs, strict=True)
        ]


def arrays_of(
    tensor: Tensor, count: int, data: bytes, lengths: list[int]
) -> NDArray[Any] | list[NDArray[Any]]:
    """The input of a batch: one array, or one for each query."""
    elements = np.frombuffer(data, tensor.dtype)
    if not tensor.is_variable():
        return elements.reshape(count, *(size for size in tensor.shape if isinstance(size, int)))
    shape = tuple(-1 if isinstance(size, UpTo) else size for size in tensor.shape)
    # With a dimension of 0, the variable one cannot be computed from the number of elements.
    empty = tuple(0 if isinstance(size, UpTo) else size for size in tensor.shape)
    ends = np.cumsum(lengths) // elements.itemsize
    parts = np.split(elements, ends[:-1])
    return [part.reshape(shape if part.size else empty) for part in parts]


def bytes_of(tensor: Tensor, count: int, output: Any) -> tuple[bytes, list[int]]:
    """An output of a batch as bytes, and the bytes of each query."""
    if len(output) != count:
        raise ShapeError(f"output {tensor.name!r} of {len(output)} queries: expected {count}")
    parts = [np.ascontiguousarray(part, tensor.dtype) for part in output]
    for part in parts:
        if len(part.shape) != len(tensor.shape) or not all(map(fits, part.shape, tensor.shape)):
            shape = ", ".join(
                f"<={size.bound}" if isinstance(size, UpTo) else str(size) for size in tensor.shape
            )
            raise ShapeError(f"output {tensor.name!r} of shape {part.shape}: expected ({shape})")
    return b"".join(part.tobytes() for part in parts), [part.nbytes for part in parts]


def fits(size: int, expected: int | UpTo) -> bool:
    """True if a dimension is the expected one."""
    return size <= expected.bound if isinstance(expected, UpTo) else size == expected
