"""ONNX Runtime as the model on an accelerator node."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from weft.errors import ConfigurationError
from weft.qdl import Tensor, UpTo
from weft.qdl.onnx import OnnxModel, padded


def affine(length: int | str = 3, dtype: str = "FLOAT") -> bytes:
    """A model: `2 x + 1` summed over x's last dimension."""
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs {package} (pip install onnx onnxruntime)")
    onnx: Any = importlib.import_module("onnx")
    helper, kind = onnx.helper, getattr(onnx.TensorProto, dtype)
    constants = [
        helper.make_tensor("two", kind, [], [2]),
        helper.make_tensor("one", kind, [], [1]),
        helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [-1]),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["twice"]),
        helper.make_node("Add", ["twice", "one"], ["affine"]),
        helper.make_node("ReduceSum", ["affine", "axes"], ["sum"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "affine",
        [helper.make_tensor_value_info("x", kind, ["batch", length])],
        [helper.make_tensor_value_info("sum", kind, ["batch", 1])],
        constants,
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return bytes(model.SerializeToString())


def test_the_tensors_are_those_of_the_model_and_a_batch_is_one_call() -> None:
    model = OnnxModel(affine(), threads=1)
    assert model.inputs == (Tensor("x", "float32", (3,)),)
    assert model.outputs == (Tensor("sum", "float32", (1,)),)
    batch = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert model(batch).tolist() == [[9.0], [27.0]]


def test_a_batch_of_varying_lengths_is_padded_to_the_longest() -> None:
    model = OnnxModel(affine("length"), bounds={"length": 5})
    assert model.inputs == (Tensor("x", "float32", (UpTo(5),)),)
    parts = [np.array([1, 2, 3], np.float32), np.array([4], np.float32)]
    # Each column adds 1.
    assert model(parts).tolist() == [[15.0], [11.0]]


def test_padding_keeps_the_elements_and_adds_zeros() -> None:
    rows = padded([np.ones((2, 1), np.int32), np.full((1, 1), 7, np.int32)])
    assert rows.tolist() == [[[1], [1]], [[7], [0]]]


def test_models_that_are_no_queries_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="'length' of tensor 'x'"):
        OnnxModel(affine("length"))
    with pytest.raises(ConfigurationError, match="model of ONNX Runtime"):
        OnnxModel(b"no model")


def test_without_onnx_runtime_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match="pip install onnxruntime"):
        OnnxModel(b"")
