"""Choosing between fused kernels and their compositions, by rule and by measurement."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT

pytestmark = pytest.mark.torch

pytest.importorskip("triton")

RESULTS = ROOT / "benchmarks" / "results" / "gpu_fused.jsonl"
#: Least ratio between the other side's time and the chosen one's, for a measured shape.
LEAST = 0.98
#: The same for GEMMs from 600 µs up, which are limited by power and vary by as much.
LEAST_OF_LONG = 0.96


def given(operator: str, rows: int, columns: int, inner: int, dtype: Any = None) -> Any:
    """Operands on a GPU, without their tensors."""
    import torch

    from weft.fused.gemm.gemm import Operands

    x: Any = SimpleNamespace(dtype=dtype or torch.bfloat16, device=torch.device("cuda", 0))
    return Operands(operator, x, x, rows, columns, inner, False, True, x.dtype)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`choose` among two ranks, with a table by key for one class."""
    from weft.fused import tables
    from weft.fused.gemm import choices

    def call(operands: Any, entry: Any = None, fused: Any = None, **options: Any) -> Any:
        shape = tables.Shape(operands.rows, operands.columns, operands.inner)
        operator = operands.operator.replace("gemm", "matmul")
        key = tables.Table.key(operator, shape, operands.x.dtype, 2, "GPU")
        table = tables.Table({} if entry is None else {key: entry})
        monkeypatch.setattr(choices, "table_of", lambda group: table)
        group: Any = SimpleNamespace(world_size=options.pop("ranks", 2))
        return choices.choose(operands, group, fused, options.pop("tiling", None), **options)

    monkeypatch.setattr(tables, "device_name", lambda device: "GPU")
    return call


def test_arguments_go_before_measurements_and_these_before_rules(choose: Any) -> None:
    import torch

    from weft.errors import ConfigurationError
    from weft.fused import Tiling

    long = given("gemm_reduce_scatter", 4096, 8192, 4096)
    short = given("gemm_reduce_scatter", 128, 8192, 4096)
    tiling: dict[str, Any] = {"rows": 64, "columns": 128}
    assert choose(long) == (True, None)
    assert choose(short) == (False, None)
    assert choose(long, fused=False) == (False, None)
    assert choose(short, fused=True) == (True, None)
    assert choose(short, tiling=Tiling()) == (True, Tiling())
    assert choose(short, num_sms=64, partial_dtype=None) == (True, None)
    composed = {"choice": "composed", "tiling": None}
    assert choose(long, composed) == (False, None)
    assert choose(long, composed, fused=True) == (True, None)
    # Torch's operators are the fastest; among a call's two ways one is faster.
    for default, other in ((100.0, 150.0), (150.0, 100.0)):
        times = {"unfused": 90.0, "default": default, "composed": other}
        entry = {"choice": "unfused", "tiling": None, "microseconds": times}
        assert choose(long, entry) == choose(short, entry) == (default < other, None)
    entry = {"choice": "unfused", "tiling": None, "microseconds": {"unfused": 90.0}}
    assert (choose(long, entry).fused, choose(short, entry).fused) == (True, False)
    assert choose(short, {"choice": "default", "tiling": None}) == (True, None)
    assert choose(short, {"choice": "x", "tiling": tiling}) == (True, Tiling(**tiling))
    assert choose(short, {"choice": "x", "tiling": {"lines": 3}}) == (True, None)
    assert not choose(long, ranks=1).fused
    assert not choose(given("gemm_reduce_scatter", 4096, 8192, 4096, torch.float32)).fused
    assert not choose(given("gemm_reduce_scatter", 4096, 8191, 4096)).fused
    with pytest.raises(ConfigurationError, match="fused=False with tiling: these are options"):
        choose(long, fused=False, tiling=Tiling(), num_sms=None)


def test_fewer_rows_gain_by_long_gemms() -> None:
    import torch

    from weft.fused import gains
    from weft.fused.tables import Shape, Table

    def doubt(rows: int, columns: int) -> str | None:
        device, table = torch.device("cuda", 0), Table()
        shape = Shape(rows, columns, 8192)
        return gains.doubt("all_gather_matmul", shape, torch.bfloat16, 4, device, table)

    assert doubt(1024, 1024) is None
    assert doubt(512, 8192) is None
    assert doubt(511, 16384) == "no gain: 511 rows; expected 1024 or more"
    assert doubt(512, 1024) == (
        "no gain: 512 rows of 1.7e+10 multiply-adds; expected 1024 or more, or more work"
    )


def records() -> dict[str, dict[str, Any]]:
    """The last GEMM records on two GPUs, by case."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {
        record["case"]: record
        for record in map(json.loads, lines)
        if record["kind"] in ("gemm", "gemv_norm") and record["status"] == "ok"
        if record["origin"]["ranks"] == 2 and record["origin"]["device"] == "cuda"
    }


def median(record: dict[str, Any], name: str) -> float:
    """A side's time in microseconds."""
    return float(record["result"]["sides"][name]["time"]["slowest_p50_us"])


def test_no_measured_gemm_is_slower_by_the_choice_than_by_the_other(choose: Any) -> None:
    measured = [record for record in records().values() if record["kind"] == "gemm"]
    if not measured:
        pytest.skip(f"{RESULTS.name} has no GEMMs on two GPUs")
    chosen = []
    for record in measured:
        shape, operator = record["workload"]["shape"], record["workload"]["operator"]
        rows, columns, inner = shape["rows"], shape["columns"], shape["inner"]
        if operator == "all_gather_gemm":
            rows, columns = rows // 2, columns // 2
        elif operator.endswith(("reduce", "scatter")):
            inner //= 2
        fused = choose(given(operator, rows, columns, inner)).fused
        composed = median(record, "torch gemm + weft")
        sides = record["result"]["sides"]
        kernel = min(median(record, name) for name in ("fused", "fused symmetric") if name in sides)
        ratio = composed / kernel if fused else median(record, "fused") / composed
        least = LEAST if composed < 600 else LEAST_OF_LONG
        assert round(ratio, 2) >= least, record["case"]
        chosen.append(fused)
    assert set(chosen) == {True, False}


def test_norms_of_more_tokens_have_a_kernel_of_their_own() -> None:
    import torch

    from weft.fused.gemm.gemv import _Call

    x: Any = SimpleNamespace(device=torch.device("cuda", 0))

    def is_fused(tokens: int, hidden: int = 4096, is_normed: bool = True) -> bool:
        call: Any = SimpleNamespace(tokens=tokens, hidden=hidden, x=x)
        return _Call.is_fused(call, None, is_normed)

    assert [is_fused(tokens) for tokens in (1, 8, 9, 32)] == [True, True, False, False]
    assert is_fused(16, hidden=32776)
    assert is_fused(16, is_normed=False)
    losses = {
        record["workload"]["shape"]["tokens"]
        for record in records().values()
        if record["kind"] == "gemv_norm" and record["result"]["speedup"] < LEAST
    }
    assert not any(is_fused(tokens) for tokens in losses)


def test_tiles_of_short_gemms_are_sent_at_a_pace() -> None:
    from weft.fused import Tiling
    from weft.fused.gemm.send import sending
    from weft.fused.kernels.gemm.send import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

    paced, bulk = (
        Tiling(paced_stores=True),
        Tiling(stages=3, slice_bytes=64 << 10, bulk_stores=True),
    )
    for operation, last in ((ALL_TO_ALL, bulk), (REDUCE_SCATTER, Tiling()), (ALL_REDUCE, Tiling())):
        assert sending(Tiling(), operation, 512, 112, 2) == paced
        assert sending(Tiling(), operation, 3584, 32, 2) == last
        assert sending(Tiling(), operation, 3584, 32, 4) == Tiling()
        assert sending(Tiling(), operation, 896, 32, 4) == paced
        assert sending(Tiling(), operation, 512, 112, 1) == Tiling()
    short = Tiling(columns=128, warps=4, stages=3, programs=2)
    assert sending(short, ALL_TO_ALL, 512, 112, 2) == short
