"""ONNX Runtime as an accelerator node's model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from weft.base.errors import ConfigurationError
from weft.qdl.tensors import Tensor, UpTo

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

__all__ = ["OnnxModel"]

#: numpy names for the ONNX Runtime element types that a query can have.
DTYPES: Final = {
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
}


class OnnxModel:
    """A model that ONNX Runtime (`pip install onnxruntime`) runs, once a batch.

        model = OnnxModel("model.onnx")
        node = Accelerator(model, inputs=model.inputs, outputs=model.outputs)

    The first dimension is the batch in every input and output. Another dimension without a size in
    the file varies up to its bound; a batch is padded to its longest query, with zeros.

    Args:
        model: file path, or the bytes.
        bounds: bound for each dimension without a size, by the name in the file.
        threads: threads per operator; 0: ONNX Runtime's choice.
        providers: ONNX Runtime execution providers, in preference order, for example
        `["CPUExecutionProvider"]`.

    Attributes:
        inputs: query tensors.
        outputs: answer tensors.

    Raises:
        ConfigurationError: there is no ONNX Runtime, it cannot load the model, or a model tensor is
        not valid in a query.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *,
        bounds: Mapping[str, int] | None = None,
        threads: int = 0,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        try:
            runtime = importlib.import_module("onnxruntime")
        except ImportError as error:
            raise ConfigurationError(
                f"ONNX Runtime cannot be imported ({error}); pip install onnxruntime"
            ) from error
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = runtime.InferenceSession(source, options, providers=list(providers))
        # ONNX Runtime's exceptions have no common base but this one.
        except Exception as error:
            raise ConfigurationError(f"model of ONNX Runtime: {error}") from error
        known = dict(bounds or {})
        self.inputs = tuple(_tensor(item, known) for item in self._session.get_inputs())
        self.outputs = tuple(_tensor(item, known) for item in self._session.get_outputs())

    def __call__(self, *inputs: NDArray[Any] | list[NDArray[Any]]) -> Any:
        """Batch outputs: an array for each, without a list if there is only one."""
        feed = {
            tensor.name: padded(batch) if isinstance(batch, list) else batch
            for tensor, batch in zip(self.inputs, inputs, strict=True)
        }
        outputs = self._session.run([tensor.name for tensor in self.outputs], feed)
        return outputs[0] if len(outputs) == 1 else outputs


def _tensor(item: Any, bounds: Mapping[str, int]) -> Tensor:
    """Query tensor for a session's input or output."""
    if item.type not in DTYPES:
        known = ", ".join(DTYPES)
        raise ConfigurationError(f"tensor {item.name!r} of type {item.type}: expected {known}")
    if not item.shape or isinstance(item.shape[0], int):
        raise ConfigurationError(
            f"tensor {item.name!r} of shape {item.shape}: expected a first dimension without a"
            " size, the batch; export the model with a dynamic batch"
        )
    shape: list[int | UpTo] = []
    for size in item.shape[1:]:
        if isinstance(size, int):
            shape.append(size)
        elif size in bounds:
            shape.append(UpTo(bounds[size]))
        else:
            raise ConfigurationError(
                f"dimension {size!r} of tensor {item.name!r} has no size; give its bound (bounds=)"
            )
    return Tensor(item.name, DTYPES[item.type], tuple(shape))


def padded(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Arrays with equal rank as one, padded with zeros behind each."""
    shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
    rows = np.zeros((len(parts), *shape), parts[0].dtype)
    for row, part in zip(rows, parts, strict=True):
        row[tuple(slice(size) for size in part.shape)] = part
    return rows
