"""Compiled `weft.fused.embedding` kernels: PTX lint, registers, store widths."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.triton import triton_code

pytestmark = [
    *(pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(420)),
    pytest.mark.usefixtures("triton_cache"),
]

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

from weft.fused.embedding.tables import Tiling, default_tiling  # noqa: E402
from weft.fused.kernels import embedding as kernels  # noqa: E402
from weft.fused.kernels import embedding_gradient as sums  # noqa: E402
from weft.triton import lint  # noqa: E402

#: Types for parameters that are not int32 or constants.
TYPES = {
    **dict.fromkeys(("words", "state", "errors", "bags"), "*i32"),
    **dict.fromkeys(("context", "table", "firsts", "keys", "limits", "rows"), "*i64"),
    "agreement": "*i64",
    "digest": "i32",
    "tables": "i32",
    **dict.fromkeys(("sample_weights", "factors", "heads", "tails"), "*fp32"),
    "missing": "i64",
}
#: Constant groups by kernel.
MODES: dict[str, Any] = {
    "pool": kernels.Modes,
    "return_gradients": kernels.GradientModes,
    "segment_sums": sums.SegmentModes,
    "entries": sums.EntryModes,
    "factor_gradients": sums.FactorModes,
}
#: Tensors with the tables' dtype.
OF_TABLES = ("outputs", "inbox", "gradients", "values")


def compiled(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    num_warps: int,
    registers: int | None = None,
    kind: str = "*i64",
    traced: bool = False,
) -> Any:
    """A kernel for sm_90a, as the operator launches it; `kind`: index and offset kind."""
    types = TYPES | dict.fromkeys(OF_TABLES, f"*{dtype}")
    types |= dict.fromkeys(("indices", "offsets"), kind)
    types |= {"trace": "*i64"} if traced else {}
    options: dict[str, Any] = {"num_warps": num_warps}
    if registers is not None:
        options["maxnreg"] = registers
    groups = {"modes": MODES[kernel.__name__]} if kernel.__name__ in MODES else None
    return triton_code.compiled(kernel, types, constants, groups=groups, **options)


def pool(
    dtype: str, tiling: Tiling, kind: str = "*i64", traced: bool = False, **constants: Any
) -> Any:
    options: dict[str, Any] = {"ranks": 8, "align": 16, "weighted": False, "fused": True}
    options |= {"bags": tiling.bags, "columns": tiling.columns, "unroll": tiling.unroll}
    element = getattr(
        triton.language, {"fp32": "float32", "fp16": "float16"}.get(dtype, "bfloat16")
    )
    options |= {"element": element} | constants
    return compiled(kernels.pool, dtype, options, tiling.num_warps, tiling.registers, kind, traced)


def stack(made: Any, folder: Path) -> int:
    """A thread's stack bytes: registers that did not fit."""
    return triton_code.usage(made, folder, "STACK")


def wide(made: Any, operation: str) -> int:
    """Count of 16-byte loads or stores."""
    return len(re.findall(rf"\b{operation}\.global\.v4\.b32", made.asm["ptx"]))


@pytest.mark.parametrize(
    ("dtype", "columns", "average", "constants"),
    [
        ("fp32", 64, 32.0, {}),
        ("fp16", 128, 20.0, {}),
        ("bf16", 128, 20.0, {"weighted": True}),
        ("fp16", 1024, 3.0, {"fused": False}),
        ("fp32", 128, 1.0, {}),
        ("fp16", 64, 4.0, {"align": 8, "ranks": 2}),
        ("fp16", 32, 1.0, {}),
    ],
)
def test_pooling_has_wide_stores_to_peers_and_no_spills(
    tmp_path: Path, dtype: str, columns: int, average: float, constants: dict[str, Any]
) -> None:
    itemsize = 4 if dtype == "fp32" else 2
    tiling = default_tiling(columns, itemsize, average)
    made = pool(dtype, tiling, **constants)
    assert lint.check(made.asm["ptx"]) == []
    assert stack(made, tmp_path) == 0
    # Row loads: each thread has 8 in a loop turn, unless rows are narrow.
    assert wide(made, "ld") >= (8 if columns >= 64 else 2)
    assert wide(made, "st") >= 1


@pytest.mark.parametrize(
    ("columns", "average", "constants"),
    [
        (16, 1.0, {}),
        (16, 4.0, {"weighted": True}),
        (32, 2.0, {}),
        (64, 1.0, {"fused": False}),
        (128, 20.0, {}),
    ],
)
def test_pooling_compiles_for_indices_of_32_bits(
    columns: int, average: float, constants: dict[str, Any]
) -> None:
    tiling = default_tiling(columns, 2, average)
    tiling.check()
    assert lint.check(pool("fp16", tiling, "*i32", **constants).asm["ptx"]) == []


def test_a_trace_compiles() -> None:
    tiling = default_tiling(128, 2, 20.0)
    made, plain = (pool("fp16", tiling, traced=each).asm["ptx"] for each in (True, False))
    assert lint.check(made) == []
    # Waits read the clock too.
    assert made.count("%globaltimer") > plain.count("%globaltimer")


def test_one_rank_compiles() -> None:
    tiling = default_tiling(64, 2, 8.0)
    assert lint.check(pool("fp16", tiling, ranks=1).asm["ptx"]) == []


def test_parameters_that_are_one_are_constants() -> None:
    tiling = default_tiling(16, 2, 8.0)
    assert lint.check(pool("fp16", tiling, strides=1).asm["ptx"]) == []


def test_narrow_columns_have_narrow_stores() -> None:
    made = pool("fp16", default_tiling(64, 2, 8.0), align=4)
    assert lint.check(made.asm["ptx"]) == []
    assert wide(made, "ld") == 0
    assert re.search(r"\bst\.global\.v2\.b32", made.asm["ptx"])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_return_of_gradients_has_wide_stores(tmp_path: Path, dtype: str) -> None:
    tiling = default_tiling(64, 2, 8.0)
    constants = {"ranks": 4, "align": 16, "rows": tiling.gradient_rows}
    constants["columns"] = tiling.gradient_columns
    made = compiled(kernels.return_gradients, dtype, constants, tiling.num_warps)
    assert lint.check(made.asm["ptx"]) == []
    assert stack(made, tmp_path) == 0
    assert wide(made, "st") >= 1


def test_gradients_of_sample_weights_have_wide_loads(tmp_path: Path) -> None:
    constants = {"align": 16, "positions": 32, "columns": 64, "element": triton.language.float16}
    made = compiled(sums.factor_gradients, "fp16", constants, 4)
    assert stack(made, tmp_path) == 0
    assert wide(made, "ld") >= 2


@pytest.mark.parametrize("columns", [64, 1024])
def test_entries_of_sparse_gradients_have_wide_stores(tmp_path: Path, columns: int) -> None:
    constants = {"align": 16, "positions": 4096 // columns, "columns": columns}
    made = compiled(sums.entries, "bf16", constants | {"weighted": False}, 4)
    assert stack(made, tmp_path) == 0
    assert wide(made, "ld") >= 2
    assert wide(made, "st") >= 2


@pytest.mark.parametrize("columns", [64, 1024])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_gradients_have_no_spills(tmp_path: Path, columns: int, weighted: bool) -> None:
    constants = {"align": 16, "chunk": 32, "columns": columns}
    made = compiled(sums.segment_sums, "fp16", constants | {"weighted": weighted}, 1)
    assert stack(made, tmp_path) == 0
    made = compiled(sums.join_segments, "fp16", constants, 1)
    assert stack(made, tmp_path) == 0
