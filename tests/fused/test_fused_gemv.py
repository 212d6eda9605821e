"""`gemv_all_reduce`, `all_reduce_rms_norm` under Triton's interpreter; their compiled kernels."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.triton import triton_code

pytestmark = [
    *(pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(320)),
    pytest.mark.usefixtures("triton_cache"),
]

triton = pytest.importorskip("triton")


def run(worker: str, count: int, **arguments: Any) -> list[Any]:
    environment = {"TRITON_INTERPRET": "1"}
    call = f"fused.gemv_calls.{worker}"
    return ranks.run(call, count, environment=environment, timeout=300, **arguments)


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[Any]:
    return run(
        "calls",
        request.param,
        cases=8 if request.param == 2 else 2,
        repeats=16 if request.param == 2 else 5,
        seed=request.param,
    )


def test_sums_residuals_and_norms_are_those_of_torch(results: list[Any]) -> None:
    for result in results:
        assert result["wrong"] == []


def test_all_ranks_have_the_same_bits(results: list[Any]) -> None:
    assert results[0]["digests"]
    for result in results:
        assert result["digests"] == results[0]["digests"]


def test_calls_of_alternating_shapes_repeat_their_bits(results: list[Any]) -> None:
    for result in results:
        assert result["alternating"] == []


def test_the_gemv_without_communication_gives_the_result_of_torch(results: list[Any]) -> None:
    for result in results:
        assert result["local"] == []


#: Class and message start for each invalid call.
ERRORS = {
    "dimensions": ("ShapeError", "gemv_all_reduce: x [16]: expected [tokens, inner]"),
    "tokens": ("ShapeError", "gemv_all_reduce: 33 tokens: expected at most 32"),
    "inner": ("ShapeError", "gemv_all_reduce: inner 12: expected a multiple of 8"),
    "hidden": ("ShapeError", "gemv_all_reduce: hidden 20: expected a multiple of 8"),
    "weight": ("ShapeError", "gemv_all_reduce: weight [24, 8]: expected [hidden, 16]"),
    "dtype": ("ShapeError", "gemv_all_reduce: weight torch.float32: expected torch.float16"),
    "integers": ("ShapeError", "gemv_all_reduce: x torch.int32: expected bfloat16, float16 or"),
    "strides": ("ShapeError", "gemv_all_reduce: weight with strides (1, 24): expected contiguous"),
    "layout": ("ShapeError", "gemv_all_reduce: x with strides (1, 2): expected a contiguous"),
    "scale": ("ShapeError", "gemv_all_reduce: weight_scale torch.float32 [2]: expected float32"),
    "residual": ("ShapeError", "gemv_all_reduce: residual [2, 16]: expected [2, 24]"),
    "out": ("ShapeError", "gemv_all_reduce: out torch.float32: expected torch.float16, as x"),
    "algorithm": ("ConfigurationError", "gemv_all_reduce: algorithm 'ring': expected 'one_shot'"),
    "block": ("ConfigurationError", "gemv_all_reduce: tiling.block_n 24: expected a power of 2"),
    "halves": ("ConfigurationError", "gemv_all_reduce: tiling.halves True with torch.float32"),
    "fused": ("ConfigurationError", "gemv_all_reduce: fused False with hidden 24: expected norm_w"),
    "dot": ("ConfigurationError", "gemv_all_reduce: tiling.dot False with 2 tokens: expected 1"),
    "rows": ("ShapeError", "all_reduce_rms_norm: residual [1, 16]: expected [2, 16]"),
    "norm_weight": ("ShapeError", "all_reduce_rms_norm: norm_weight [8]: expected [16]"),
    "wide": ("ShapeError", "all_reduce_rms_norm: hidden 32776: expected at most 32768"),
    "norm_algorithm": (
        "ConfigurationError",
        "all_reduce_rms_norm: algorithm 'ring': expected 'one_shot' or 'two_shot' or None",
    ),
    "protocol": (
        "ConfigurationError",
        "all_reduce_rms_norm: tiling.protocol 'bytes': expected 'packets' or 'flags'",
    ),
    "flags": ("ConfigurationError", "all_reduce_rms_norm: tiling.block 128: expected at least 256"),
    "power": ("ConfigurationError", "all_reduce_rms_norm: tiling.block 96: expected a power of 2"),
    "programs": ("ConfigurationError", "all_reduce_rms_norm: tiling.programs 0: expected 1 to"),
    "bfloat16": ("ConfigurationError", "all_reduce_rms_norm: x torch.bfloat16 under Triton's"),
}


def test_invalid_arguments_are_rejected_by_name(results: list[Any]) -> None:
    for result in results:
        assert set(result["errors"]) - {"bfloat16"} == set(ERRORS) - {"bfloat16"}
        for name, (kind, message) in result["errors"].items():
            assert (kind, message[: len(ERRORS[name][1])]) == ERRORS[name]


def test_the_program_of_the_page_computes_what_it_says(results: list[Any]) -> None:
    for result in results:
        assert len(result["page"]) >= 2
        assert all(result["page"])


def test_one_rank_computes_alone() -> None:
    (result,) = run("calls", 1, cases=2, repeats=2, seed=1)
    assert result["wrong"] == []


@pytest.mark.parametrize("operator", ["gemv_all_reduce", "flags"])
def test_a_rank_that_does_not_call_is_named(operator: str) -> None:
    check_missing(*run("missing", 2, operator=operator))


def check_missing(waiting: dict[str, Any], other: dict[str, Any]) -> None:
    assert waiting["nan"] == [3 * 64, 3 * 64]
    kind, rank, message = waiting["error"]
    assert (kind, rank) == ("WaitTimeoutError", 1)
    assert "rank 0 waited for rank 1" in message
    assert "expected epoch 3, observed" in message
    assert other["error"][0] == "GroupPoisonedError"


def test_a_tensor_on_the_cpu_needs_the_interpreter() -> None:
    import torch

    import weft.fused
    from weft.errors import ConfigurationError

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    x = torch.zeros(1, 8)
    with pytest.raises(ConfigurationError, match="set TRITON_INTERPRET=1 before triton"):
        weft.fused.gemv(x, torch.zeros(8, 8))


#: A thread's local memory bytes that ptxas may keep.
SPILL = 32

compiles = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: kernels are not compiled"
)


def compiled(
    kernel: Any,
    types: dict[str, str],
    num_warps: int,
    registers: int | None = None,
    groups: dict[str, Any] | None = None,
    **constants: Any,
) -> Any:
    """A kernel for sm_90a without a lint violation."""
    from weft.triton import lint

    options: dict[str, Any] = {"num_warps": num_warps, "maxnreg": registers}
    types = types | {"agreement": "*i64", "digest": "i32"}
    made = triton_code.compiled(kernel, types, constants, groups=groups, **options)
    assert lint.check(made.asm["ptx"]) == []
    return made


def stack(made: Any, folder: Path) -> int:
    """A thread's local memory bytes."""
    return triton_code.usage(made, folder, "STACK")


def _gemv(dtype: str, count: int, ranks: int, *, hidden: int = 8192, **options: Any) -> Any:
    import torch

    from weft.fused import arguments
    from weft.fused.gemm.gemv import default_tiling
    from weft.fused.kernels.gemv import Modes, Tiles, gemv_kernel

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    weight = options.pop("weight", dtype)
    its = torch.float8_e4m3fn if weight == "fp8e4nv" else torch_dtype
    tiling = default_tiling(count, hidden, 4096, torch_dtype, its, 132)
    rows = max(8, 1 << (count - 1).bit_length())
    block = rows * tiling.block_n // (2 if tiling.halves else 1)
    constants: dict[str, Any] = {
        "mode": 1,
        "ranks": ranks,
        "group": arguments.group_of(block, tiling.num_warps, ranks),
        "dot": tiling.dot,
        "halves": tiling.halves and options.get("mode") != 0,
        "scales": 0,
        "has_residual": False,
        "has_norm": False,
        "single": False,
        "block_t": rows,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "even": True,
        "chunk": min(128, 2048 // rows),
        "stages": tiling.num_stages,
    }
    types = {
        **dict.fromkeys(("x", "residual", "norm_weight", "output", "summed"), f"*{dtype}"),
        "weight": f"*{weight}",
        "weight_scale": "*fp32",
        "eps": "fp32",
        "inboxes": "*i64",
        "squares": "*i64",
        "state": "*i32",
        "context": "*i64",
    }
    if options.pop("traced", False):
        types["trace"] = "*i64"
    groups = {"modes": Modes, "tiles": Tiles}
    return compiled(gemv_kernel, types, tiling.num_warps, groups=groups, **constants | options)


@compiles
@pytest.mark.parametrize(
    ("dtype", "tokens", "ranks", "options"),
    [
        ("bf16", 1, 2, {"single": True}),
        ("bf16", 1, 2, {"has_norm": True, "has_residual": True, "single": True}),
        ("bf16", 32, 2, {"has_norm": True, "has_residual": True, "even": False}),
        ("bf16", 32, 8, {"has_norm": True, "has_residual": True, "mode": 2}),
        ("bf16", 16, 4, {"weight": "fp8e4nv", "scales": 2}),
        ("bf16", 2, 2, {"mode": 0}),
        ("bf16", 1, 2, {"block_n": 16, "block_k": 512, "has_norm": True}),
        ("fp32", 1, 2, {}),
        ("fp32", 8, 4, {"mode": 2, "has_norm": True}),
        # Triton makes arguments equal to 1 constants.
        ("bf16", 1, 2, {"tokens": 1, "hidden_by_8": 1, "inner_by_8": 1, "half_by_16": 1}),
    ],
)
def test_gemvs_keep_their_values_in_registers(
    tmp_path: Path, dtype: str, tokens: int, ranks: int, options: dict[str, Any]
) -> None:
    made = _gemv(dtype, tokens, ranks, **options)
    assert stack(made, tmp_path) <= SPILL


@compiles
@pytest.mark.parametrize(
    ("dtype", "tokens", "weight"),
    [("bf16", 32, "bf16"), ("bf16", 20, "fp8e4nv"), ("bf16", 16, "fp8e4nv"), ("fp32", 32, "fp32")],
)
def test_the_stages_of_narrow_tiles_fit_into_shared_memory(
    dtype: str, tokens: int, weight: str
) -> None:
    made = _gemv(dtype, tokens, 2, hidden=5120, weight=weight)
    # One for a program on an H100, or an H200.
    assert made.metadata.shared <= 232448


@compiles
@pytest.mark.parametrize("options", [{"has_norm": True, "single": True}, {"mode": 2}])
def test_a_trace_of_gemvs_compiles(options: dict[str, Any]) -> None:
    made, plain = (_gemv("bf16", 4, 2, traced=each, **options).asm["ptx"] for each in (True, False))
    # Waits read the clock too.
    assert made.count("%globaltimer") > plain.count("%globaltimer")


@compiles
def test_packets_are_stored_and_loaded_by_two_and_weights_in_16_bytes() -> None:
    ptx = _gemv("bf16", 1, 2).asm["ptx"]
    # 8 tokens by 64 columns for 128 threads, to 2 ranks; one word each for program epochs.
    assert len(re.findall(r"st\.global\.v2\.b64", ptx)) == 2 * 2
    assert "ld.volatile.global.v2.b64" in ptx
    assert "ld.volatile.global.b64" not in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert re.search(r"\bmma\.sync|wgmma", ptx)
    assert "cp.async.ca" not in ptx
    # 16 tokens by 32 two-element packets.
    ptx = _gemv("bf16", 16, 2).asm["ptx"]
    assert len(re.findall(r"st\.global\.v2\.b64", ptx)) == 2 * 2
    assert "ld.volatile.global.v2.b64" in ptx
    assert "ld.volatile.global.b64" not in ptx


@compiles
@pytest.mark.parametrize(("dtype", "block"), [("bf16", 8192), ("fp16", 32768), ("fp32", 4096)])
def test_rows_of_a_norm_alone_are_in_registers(tmp_path: Path, dtype: str, block: int) -> None:
    from weft.fused.kernels.norm import norm_kernel

    pointers = dict.fromkeys(("x", "norm_weight", "output"), f"*{dtype}")
    made = compiled(
        norm_kernel, pointers | {"eps": "fp32"}, 8 if block <= 8192 else 16, block=block
    )
    assert stack(made, tmp_path) <= SPILL
    assert "ld.global.v4.b32" in made.asm["ptx"]
    assert "st.global.v4.b32" in made.asm["ptx"]


def _norm(kernel: str, dtype: str, block: int, num_warps: int, **options: Any) -> Any:
    import triton.language as tl

    from weft.fused.kernels import rms_norm

    word = "*fp32" if dtype == "fp32" else "*i32"
    types = {
        **dict.fromkeys(("x", "residual", "norm_weight", "output", "summed"), word),
        "inboxes": "*i64" if kernel == "packets" else word,
        "squares": "*i64",
        "flags": "*i32",
        "state": "*i32",
        "context": "*i64",
        "eps": "fp32",
    }
    kinds = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    options |= {"dtype": kinds[dtype], "block": block}
    made = getattr(rms_norm, f"{kernel}_kernel")
    modes = {"packets": rms_norm.PacketModes, "flags": rms_norm.FlagModes}
    return compiled(made, types, num_warps, groups={"modes": modes[kernel]}, **options)


@compiles
@pytest.mark.parametrize(
    ("dtype", "ranks", "two_shot", "block", "divided", "single"),
    [
        ("bf16", 2, False, 512, True, True),
        ("bf16", 8, False, 512, True, True),
        ("bf16", 2, False, 4096, False, False),
        ("bf16", 8, True, 4096, False, False),
        ("fp32", 4, False, 1024, True, False),
        ("fp16", 4, True, 1024, True, True),
    ],
)
def test_rows_of_packets_are_in_registers(
    tmp_path: Path,
    dtype: str,
    ranks: int,
    two_shot: bool,
    block: int,
    divided: bool,
    single: bool,
) -> None:
    from weft.fused import arguments

    num_warps = max(4, block // 256)
    made = _norm(
        *("packets", dtype, block, num_warps),
        two_shot=two_shot,
        ranks=ranks,
        group=arguments.group_of(block, num_warps, ranks),
        divided=divided,
        single=single,
        chunk=32 * num_warps,
    )
    assert stack(made, tmp_path) <= SPILL
    assert "st.global.v2.b64" in made.asm["ptx"]
    assert "ld.volatile.global.v2.b64" in made.asm["ptx"]


@compiles
@pytest.mark.parametrize(
    ("dtype", "ranks", "two_shot"),
    [("bf16", 2, False), ("bf16", 8, True), ("fp16", 4, False), ("fp32", 2, True)],
)
def test_rows_with_flags_are_in_registers(
    tmp_path: Path, dtype: str, ranks: int, two_shot: bool
) -> None:
    # Two 512-thread programs on an SM with 65536 registers, with up to 4 ranks.
    registers = 64 if ranks <= 4 else None
    options = {"two_shot": two_shot, "ranks": ranks, "registers": registers}
    made = _norm("flags", dtype, 4096, 16, **options)
    assert stack(made, tmp_path) <= SPILL
    assert "st.global.v4.b32" in made.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", made.asm["ptx"])) >= 4


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (1, 2, ("packets", 512, 8, "one_shot")),
        (16, 2, ("packets", 512, 128, "one_shot")),
        (32, 2, ("flags", 4096, 32, "one_shot")),
        (128, 2, ("flags", 4096, 128, "one_shot")),
        (512, 2, ("flags", 4096, 264, "one_shot")),
        (1, 8, ("packets", 512, 8, "one_shot")),
        (16, 8, ("packets", 512, 128, "two_shot")),
        (512, 8, ("flags", 4096, 132, "two_shot")),
    ],
)
def test_protocol_and_algorithm_follow_size_and_ranks(
    rows: int, ranks: int, expected: tuple[str, int, int, str]
) -> None:
    from weft.fused.rms_norm import default_norm_tiling

    tiling, algorithm = default_norm_tiling(rows, 4096, ranks, 132)
    assert (tiling.protocol, tiling.block, tiling.programs, algorithm) == expected
