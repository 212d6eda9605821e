"""Accelerator node: serves front-end queries with a Python callable on batches."""

from __future__ import annotations

import json
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from weft import _native
from weft.base import threads
from weft.base.arguments import (
    expect,
    expect_flag,
    expect_list,
    expect_range,
    expect_text,
    shown,
)
from weft.base.environment import check_variables
from weft.base.errors import ConfigurationError
from weft.base.timeout import seconds
from weft.qdl.device import DeviceModel, Lane
from weft.qdl.placement import Placement, bus_id, here, place, try_cores
from weft.qdl.tensors import Tensor, UpTo, check_number, check_queries, check_shape
from weft.qdl.test import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import torch
    from numpy.typing import NDArray

__all__ = ["Accelerator", "Tensor", "UpTo"]


#: Largest number that the native module takes; it has lower limits.
MOST = 2**32 - 1

Buffers = list[tuple[bytes, list[int]]]


class Accelerator:
    """An accelerator node. It serves in a separate thread, from `start` to `stop`.

    `model` is called with one argument for each input, once a batch: an array `[batch, *shape]`, or
    a list with one array for each query if an input dimension varies. Arrays are read-only. It
    returns the same for each output, without a list if there is only one. If the call raises, the
    queries in the batch fail at the front end; the exception goes to `sys.unraisablehook`.

    With `device`, arguments are torch tensors there, valid until the batch is answered: a model
    that keeps any must copy it. Outputs are torch tensors there or on the CPU, or arrays; they are
    copied in the `outputs` dtypes, so that a model may write its own tensors again. Two node
    threads call the model in turn, one call at a time. On a GPU calls run on a stream from torch's
    pool, which waits for the stream that was current when the node was made; a model that uses
    other streams orders them. CUDA graphs are captured before `start`. Batches are copied on two
    further streams between slots, which are page-locked, and buffers for two largest batches: the
    next batch's inputs and the last one's outputs are copied while a batch computes.

    Args:
        model: function that takes a batch.
        inputs: query tensors.
        outputs: answer tensors.
        address: `host:port` to listen at; port 0 is any free port. An address that other hosts
            reach needs a secret (`WEFT_SECRET`).
        name: node name, unique among a front end's nodes; by default the address.
        provider: shm, verbs, ofi or tcp; by default the better of shm and tcp that reaches a
            front end.
        slots: most queries in flight per front end.
        max_batch: most queries per batch.
        window: seconds for which a batch waits for more queries.
        front_ends: most front ends at a time.
        spin: seconds without work in which the node polls without a pause.
        checksum: verify every payload by checksum.
        device: device for the model's tensors, as torch names it, such as `cuda:0` or `cpu`; by
        default arguments are numpy arrays. Tensors may be bfloat16 then.
        placement: NUMA node for threads and slots; "auto": near the device, or near the NIC with
        `address`, on machines with several, where a model on the CPU keeps its cores; `None`:
        anywhere.

    Raises:
        ConfigurationError: an argument cannot be used; `device` without PyTorch, or is no device
            that it finds.
        SecretError: the address can be reached from other hosts, and there is no secret.
        ListenError: the address is not on this host, or its port is in use.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        address: str = "localhost:0",
        name: str = "",
        provider: Literal["shm", "verbs", "ofi", "tcp"] | None = None,
        slots: int = 1024,
        max_batch: int = 64,
        window: float = 0.0,
        front_ends: int = 8,
        spin: float = 0.0,
        checksum: bool = False,
        device: str | torch.device | None = None,
        placement: Placement = "auto",
    ) -> None:
        check_variables()
        if not callable(model):
            raise ConfigurationError(f"model {shown(model)}: expected a callable")
        self._model = model
        self._inputs = tuple(expect_list(inputs, "inputs"))
        self._outputs = tuple(expect_list(outputs, "outputs"))
        expect_text(address, "address")
        expect_text(name, "name")
        if provider is not None:
            expect_text(provider, "provider")
        slots = expect_range(slots, "slots", 0, MOST)
        front_ends = expect_range(front_ends, "front_ends", 0, MOST)
        max_batch = expect_range(max_batch, "max_batch", 0, MOST)
        checksum = expect_flag(checksum, "checksum")
        window, spin = seconds(window, "window"), seconds(spin, "spin")
        for which, tensors in (("inputs", self._inputs), ("outputs", self._outputs)):
            for tensor in tensors:
                expect(tensor, Tensor, which)
                tensor.check()
        for tensor in (*self._inputs, *self._outputs):
            if tensor.dtype == "bfloat16" and device is None:
                raise ConfigurationError(
                    f"tensor {tensor.name!r}: numpy has no bfloat16; use uint8 and view it, or"
                    " pass a device"
                )
        spec: dict[str, Any] = {
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
        self._device_model: DeviceModel | None = None
        gpu = None
        if device is not None:
            self._device_model = DeviceModel(
                model, self._inputs, self._outputs, device=device, max_batch=max_batch
            )
            gpu = bus_id(self._device_model.device)
        self._placement = place(placement, addresses=[address], gpu=gpu)
        if self._placement is not None:
            spec["numa_node"] = self._placement.numa_node
        # A model on the CPU may use cores on every node.
        self._cores = os.sched_getaffinity(0) if placement == "auto" and gpu is None else None
        #: Native ids: native threads have no lasting Python state.
        self._free_threads: set[int] = set()
        with here(self._placement):
            if self._device_model is None:
                self._node = _native.QdlNode(json.dumps(spec), if_alive(self._run))
            else:
                lanes = self._device_model.lanes
                self._node = _native.QdlNode(json.dumps(spec), if_alive(self._run_lane), lanes)
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
        threads.start(self._thread)

    def _serve(self) -> None:
        with here(self._placement):
            self._node.serve()

    def _free_thread(self) -> None:
        """Let the calling model thread run on the cores that a model may use. Once."""
        if self._placement is None or self._cores is None:
            return
        thread = threading.get_native_id()
        if thread not in self._free_threads:
            self._free_threads.add(thread)
            try_cores(self._cores)

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

    def _run_lane(self, lane: Lane, count: int, lengths: list[list[int]]) -> Any:
        assert self._device_model is not None
        self._free_thread()
        return self._device_model(lane, count, lengths)

    def _run(self, count: int, inputs: Buffers) -> Buffers:
        """Call the model with arrays in place of bytes."""
        self._free_thread()
        arrays = [
            arrays_of(tensor, count, data, lengths)
            for tensor, (data, lengths) in zip(self._inputs, inputs, strict=True)
        ]
        returned = self._model(*arrays)
        outputs = [returned] if len(self._outputs) == 1 else list(returned)
        check_number(self._outputs, outputs)
        return [
            bytes_of(tensor, count, output)
            for tensor, output in zip(self._outputs, outputs, strict=True)
        ]


def if_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Method call that does not keep its object alive; it returns `None` without one.

    The native node would keep the `Accelerator` alive, and the `Accelerator` the node. A batch that
    began before the node stopped may call after the `Accelerator` is gone.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call


def arrays_of(
    tensor: Tensor, count: int, data: bytes, lengths: list[int]
) -> NDArray[Any] | list[NDArray[Any]]:
    """Batch input: one array, or one for each query."""
    elements = np.frombuffer(data, tensor.dtype)
    if not tensor.is_variable():
        return elements.reshape(count, *(size for size in tensor.shape if isinstance(size, int)))
    shape = tuple(-1 if isinstance(size, UpTo) else size for size in tensor.shape)
    # With a dimension 0, the variable one cannot be computed from the element count.
    empty = tuple(0 if isinstance(size, UpTo) else size for size in tensor.shape)
    ends = np.cumsum(lengths) // elements.itemsize
    parts = np.split(elements, ends[:-1])
    return [part.reshape(shape if part.size else empty) for part in parts]


def bytes_of(tensor: Tensor, count: int, output: Any) -> tuple[bytes, list[int]]:
    """Batch output as bytes, and the byte count for each query."""
    check_queries(tensor, count, output)
    parts = [np.ascontiguousarray(part, tensor.dtype) for part in output]
    for part in parts:
        check_shape(tensor, part.shape)
    return b"".join(part.tobytes() for part in parts), [part.nbytes for part in parts]
