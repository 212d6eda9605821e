"""Batches on a device: input buffers, copy streams, model outputs."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from weft.base.arguments import shown
from weft.base.errors import ConfigurationError
from weft.qdl.tensors import Tensor, UpTo, check_number, check_queries, check_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["DeviceModel", "Lane", "device_named"]

#: Batches under way: one computes while others are copied.
LANES: Final = 2

#: For each output: true on the device, address and bytes for each query's part.
Parts = list[tuple[bool, list[int], list[int]]]


def device_named(device: str | torch.device) -> torch.device:
    """A torch device, with index.

    Raises:
        ConfigurationError: there is no PyTorch, or it does not find that device.
    """
    # A torch device is shown by name.
    given = f"device={shown(str(device) if hasattr(device, 'type') else device)}"
    try:
        import torch
    except ImportError:
        raise ConfigurationError(
            f"{given}: PyTorch is not installed; pip install weft[torch], or leave device out"
        ) from None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigurationError(f"{given}: expected cpu or a CUDA device: {first}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ConfigurationError(f"{given}: expected cpu or a CUDA device, such as cuda:0")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"{given}: torch finds no CUDA device; `weft doctor` describes those of this machine,"
            " and device='cpu' needs none"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"{given}: torch finds {torch.cuda.device_count()} CUDA devices; pass one of them, or"
            " check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", index)


class Lane:
    """Buffers for one batch at a time, and the stream for copies between them and slots.

    The native node reads `ordinal`, `stream_handle` and `addresses`, and keeps the lane alive.
    """

    def __init__(self, inputs: Sequence[Tensor], device: torch.device, max_batch: int) -> None:
        import torch

        self._tensors = tuple(inputs)
        #: For each input, `[max_batch, most bytes]`, uint8.
        self._buffers = [
            torch.empty((max(max_batch, 0), most_bytes(tensor)), dtype=torch.uint8, device=device)
            for tensor in inputs
        ]
        #: Copy stream; `None` on the CPU.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            # The buffers may be memory that earlier work still uses.
            self.stream.wait_stream(torch.cuda.current_stream(device))
        #: Orders the model's stream and the lane's; `None` on the CPU.
        self.event = torch.cuda.Event() if self.stream is not None else None
        #: CUDA device ordinal; `None` on the CPU.
        self.ordinal: int | None = device.index if self.stream is not None else None
        self.stream_handle: int = 0 if self.stream is None else self.stream.cuda_stream
        self.addresses = [buffer.data_ptr() for buffer in self._buffers]

    def inputs(self, count: int, lengths: Sequence[Sequence[int]]) -> list[Any]:
        """Batch inputs: one tensor, or a list if a dimension varies."""
        import torch

        found: list[Any] = []
        for tensor, buffer, each in zip(self._tensors, self._buffers, lengths, strict=True):
            dtype = getattr(torch, tensor.dtype)
            if not tensor.is_variable():
                found.append(buffer[:count].view(dtype).view(count, *tensor.shape))
                continue
            rows = [buffer[query, :length].view(dtype) for query, length in enumerate(each)]
            found.append([row.view(shape_of(tensor, row.numel())) for row in rows])
        return found


class DeviceModel:
    """A model on torch tensors on a device, as the native node calls it.

    Args:
        model: function that takes a batch.
        inputs: query tensors.
        outputs: answer tensors.
        device: cpu or a CUDA device.
        max_batch: most queries per batch.

    Raises:
        ConfigurationError: same as `device_named`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        device: str | torch.device,
        max_batch: int,
    ) -> None:
        self.device = device_named(device)
        import torch

        self._model, self._outputs = model, tuple(outputs)
        self.lanes = [Lane(inputs, self.device, max_batch) for _ in range(LANES)]
        #: Model stream; `None` on the CPU.
        self.compute = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self.compute is not None:
            # Weights may be under way.
            self.compute.wait_stream(torch.cuda.current_stream(self.device))

    def __call__(
        self, lane: Lane, count: int, lengths: list[list[int]]
    ) -> tuple[Parts, list[torch.Tensor]]:
        """Run the model on the batch in a lane.

        The lane's stream follows the model's work, also if the model raises: a wait for it is one
        for all that uses the lane's buffers. Outputs are copied on the model's stream before the
        call returns, since the next one may write a model's own tensors, such as a graph's tensors.

        Returns:
            Parts for each output, and tensors that keep the memory alive.
        """
        with self._after_copies(lane):
            returned = self._model(*lane.inputs(count, lengths))
            outputs = [returned] if len(self._outputs) == 1 else list(returned)
            check_number(self._outputs, outputs)
            if self.compute is not None and not all(map(is_on_gpu, outputs)):
                # A tensor on the CPU, or an array in its memory, may be the target while a copy
                # runs.
                self.compute.synchronize()
            parts: Parts = []
            kept: list[torch.Tensor] = []
            for tensor, output in zip(self._outputs, outputs, strict=True):
                parts.append(self._parts_of(tensor, count, output, kept))
            return parts, kept

    @contextlib.contextmanager
    def _after_copies(self, lane: Lane) -> Any:
        """Order the model's stream behind the input copies, and output copies behind it."""
        import torch

        if self.compute is None or lane.stream is None or lane.event is None:
            yield
            return
        lane.event.record(lane.stream)
        self.compute.wait_event(lane.event)
        # The thread belongs to the node: the stream stays current, which costs less than to set it
        # back. Models may have set another.
        torch.cuda.set_stream(self.compute)
        try:
            yield
        finally:
            lane.event.record(self.compute)
            lane.stream.wait_event(lane.event)

    def _parts_of(
        self, tensor: Tensor, count: int, output: Any, kept: list[torch.Tensor]
    ) -> tuple[bool, list[int], list[int]]:
        """Parts that an output copy has; the copy is one tensor, which `kept` gets."""
        import torch

        check_queries(tensor, count, output)
        dtype = getattr(torch, tensor.dtype)
        if isinstance(output, torch.Tensor | np.ndarray):
            given = self._checked(tensor, output)
            check_shape(tensor, given.shape[1:])
            whole = given.to(dtype, copy=True, memory_format=torch.contiguous_format)
            kept.append(whole)
            length = math.prod(whole.shape[1:]) * whole.element_size()
            begin = whole.data_ptr()
            places = [begin + query * length for query in range(count)]
            return whole.is_cuda, places, [length] * count
        parts = [self._checked(tensor, part) for part in output]
        for part in parts:
            check_shape(tensor, part.shape)
        if len({part.device for part in parts}) > 1:
            # CPU parts go where the others are.
            parts = [part.to(self.device) for part in parts]
        joined = torch.cat([part.to(dtype).reshape(-1) for part in parts])
        kept.append(joined)
        lengths = [part.numel() * joined.element_size() for part in parts]
        begins = itertools.accumulate(lengths[:-1], initial=joined.data_ptr())
        return joined.is_cuda, list(begins), lengths

    def _checked(self, tensor: Tensor, output: Any) -> torch.Tensor:
        """An output as a tensor on the device or on the CPU."""
        import torch

        if not isinstance(output, torch.Tensor):
            output = torch.from_numpy(np.array(output))
        if output.device != self.device and output.device.type != "cpu":
            raise ConfigurationError(
                f"output {tensor.name!r} is on {output.device}: expected {self.device} or the CPU"
            )
        return output.detach()


def is_on_gpu(output: Any) -> bool:
    """True if an output, or each tensor in a list, is on a GPU."""
    import torch

    parts = [output] if isinstance(output, torch.Tensor | np.ndarray) else output
    return all(isinstance(part, torch.Tensor) and part.is_cuda for part in parts)


def most_bytes(tensor: Tensor) -> int:
    """Bytes in a tensor whose variable dimension is at the bound."""
    import torch

    tensor.check_dtype()
    sizes = [size.bound if isinstance(size, UpTo) else size for size in tensor.shape]
    item: int = getattr(torch, tensor.dtype).itemsize
    return math.prod(sizes) * item


def shape_of(tensor: Tensor, elements: int) -> tuple[int, ...]:
    """Shape for a query's input, given the element count."""
    fixed = math.prod(size for size in tensor.shape if isinstance(size, int))
    varies = elements // fixed if fixed else 0
    return tuple(varies if isinstance(size, UpTo) else size for size in tensor.shape)
