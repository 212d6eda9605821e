"""Compiled fused GEMM kernels: PTX lint, instructions, registers, residency."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.triton import triton_code

pytestmark = [
    *(pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(420)),
    pytest.mark.usefixtures("triton_cache"),
]

triton = pytest.importorskip("triton")

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)

import torch  # noqa: E402

from weft.fused import Tiling, default_tiling  # noqa: E402
from weft.fused.kernels.gemm import gemm, receive, send, stream  # noqa: E402
from weft.fused.kernels.gemm.gemm import COLUMN_SCALES, FAST_SUMS, ROW_SCALES, SCALED  # noqa: E402
from weft.fused.kernels.gemm.send import ALL_TO_ALL  # noqa: E402
from weft.triton import lint, ptx  # noqa: E402

#: H100 and H200 SM limits: shared memory with 1 KiB for each block, registers.
SHARED, RESERVED, REGISTERS = 228 << 10, 1 << 10, 65536

LONG = default_tiling(8192, 8192, 7168, torch.float16)
SHORT = default_tiling(4096, 7168, 1024, torch.float16)
FEW_ROWS = default_tiling(64, 7168, 2048, torch.float16, blocks=8)
STREAM = default_tiling(64, 7168, 2048, torch.float16, blocks=2)
STREAM_OF_64 = default_tiling(16, 7168, 2048, torch.float16, blocks=2)
WIDE = default_tiling(8192, 8192, 7168, torch.bfloat16, torch.float32)
UNALIGNED = default_tiling(4096, 4097, 4097, torch.float16)
SMALL = FEW_ROWS._replace(columns=64, stages=2)
SINGLE = default_tiling(4096, 4096, 4096, torch.float32)
BULK = LONG._replace(stages=3, bulk_stores=True)
BULK_SHORT = SHORT._replace(stages=2, bulk_stores=True)

SEND: dict[str, dict[str, Any]] = {
    "all_to_all": {"operation": send.ALL_TO_ALL, "in_place": False},
    "all_to_all in place": {"operation": send.ALL_TO_ALL, "in_place": True},
    "reduce_scatter": {"operation": send.REDUCE_SCATTER, "in_place": False},
    "all_reduce": {"operation": send.ALL_REDUCE, "in_place": False},
    "all_reduce in place": {"operation": send.ALL_REDUCE, "in_place": True},
}
#: Descriptors for bulk stores.
STORES = ("peer_tiles", "own_tiles")
RECEIVE: dict[str, dict[str, Any]] = {
    "all_gather": {"scatter": False},
    "all_to_all": {"scatter": True},
}


class Compiled(NamedTuple):
    ttgir: str
    ptx: str
    sass: str
    registers: int
    stack: int
    shared: int


def compiled(
    kernel: Any,
    tiling: Tiling,
    folder: Path,
    *,
    dtype: str = "fp16",
    partials: str = "",
    bulk: bool = True,
    transposed: bool = False,
    traced: bool = False,
    stores: tuple[str, ...] = (),
    paced: bool = False,
    out: str = "",
    **constants: Any,
) -> Compiled:
    """A kernel for sm_90a, with columns and inner that are multiples of 16."""
    size = {"fp32": 4, "fp8e4nv": 1, "fp8e5": 1}.get(dtype, 2)
    constants |= {
        "block_rows": tiling.rows,
        "block_columns": tiling.columns,
        "block_inner": tiling.inner,
        "group": tiling.group,
        "transposed": transposed,
        "bulk": bulk,
        "interpreted": False,
        "send_block": tiling.warps * (4096 if bulk else 512) // size,
    }
    out = out or dtype
    names = ("x", "weight", "matrix", "received", "source_rows", "inbox")
    types = dict.fromkeys(names, f"*{dtype}")
    types |= {"out": f"*{out}", "landing": f"*{out}", "partials": f"*{partials or out}"}
    if constants.get("scaling"):
        types |= {"scale_x": "*fp32", "scale_weight": "*fp32"}
    types |= {"agreement": "*i64", "digest": "i32"}
    types |= {"context": "*i64", "landing_context": "*i64", "words": "*i32", "state": "*i32"}
    types |= {"parts": "*fp32", "counters": "*i32"} | ({"trace": "*i64"} if traced else {})
    if bulk:
        rows = f"tensordesc<{dtype}[{tiling.rows},{tiling.inner}]>"
        block = [tiling.inner, tiling.columns] if transposed else [tiling.columns, tiling.inner]
        weight = f"tensordesc<{dtype}[{block[0]},{block[1]}]>"
        types |= {"x": rows, "received": rows, "weight": weight}
    tile = f"[{tiling.rows},{tiling.columns}]>"
    types |= dict.fromkeys(stores, f"tensordesc<{out}{tile}")
    if paced:
        types["staging"] = types["landing" if constants["operation"] == ALL_TO_ALL else "partials"]
    groups: dict[str, Any] = {"blocks": gemm.Blocks}
    if "modes" in kernel.arg_names:
        groups["modes"] = receive.Modes if "sources" in kernel.arg_names else send.Modes
    parameters = triton_code.names(kernel, groups)
    its = {name: value for name, value in constants.items() if name in parameters}
    made = triton_code.compiled(
        kernel,
        types,
        its,
        groups=groups,
        is_aligned=lambda name, of: of.startswith("*") or (name in ("columns", "inner") and bulk),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    registers, stack = (triton_code.usage(made, folder, name) for name in ("REG", "STACK"))
    shared = int(made.metadata.shared)
    texts = made.asm["ttgir"], made.asm["ptx"], triton_code.sass(made, folder)
    return Compiled(*texts, registers, stack, shared)


def check(made: Compiled, tiling: Tiling, *, instruction: str = "HGMMA", stack: int = 0) -> None:
    """Memory order; tensor cores; few spills; wide or bulk stores; all programs resident."""
    assert lint.check(made.ptx) == []
    (function,) = ptx.functions(made.ptx)
    multiplications = [
        at
        for at, each in enumerate(function.instructions)
        if each.opcode.startswith("wgmma.mma_async")
    ]
    assert all(any(at in body for body in function.loops) for at in multiplications)
    assert instruction in made.sass
    # 16-bit multiplications in one main loop step, at most two, are not serialised by ptxas.
    assert instruction != "HGMMA" or made.sass.count("WARPGROUP.ARRIVE") <= 2
    # The loads for all stages but one, of two operands, are in flight before the loop.
    assert made.sass.count("UTMALDG") >= 2 * tiling.stages
    assert made.stack <= stack
    stores = set(re.findall(r"\bst\.global\S*", made.ptx))
    # Single words belong to error records.
    assert stores <= {"st.global.v4.b32", "st.global.b32", "st.global.b64"}
    assert "st.global.v4.b32" in stores or tiling.bulk_stores
    assert tiling.programs * (made.shared + RESERVED) <= SHARED
    granted = -(-made.registers // 8) * 8 * tiling.warps * 32
    assert tiling.programs * granted <= REGISTERS


@pytest.mark.parametrize(("tiling", "transposed"), [(LONG, False), (SHORT, True)])
def test_the_gemm_without_communication(tiling: Tiling, transposed: bool, tmp_path: Path) -> None:
    check(compiled(gemm.multiply, tiling, tmp_path, transposed=transposed), tiling)


@pytest.mark.parametrize(
    ("operation", "tiling"),
    [
        ("all_to_all", LONG),
        ("reduce_scatter", LONG),
        ("all_reduce in place", LONG),
        ("all_to_all in place", FEW_ROWS),
        ("all_reduce", SHORT),
    ],
)
def test_gemms_that_send(operation: str, tiling: Tiling, tmp_path: Path) -> None:
    check(compiled(send.multiply_send, tiling, tmp_path, **SEND[operation]), tiling)


@pytest.mark.parametrize(
    ("operation", "tiling", "options"),
    [
        ("all_to_all", BULK, {}),
        ("all_to_all in place", BULK_SHORT, {"transposed": True}),
        ("all_to_all in place", BULK, {"dtype": "bf16", "traced": True}),
    ],
)
def test_bulk_stores_overlap_the_main_loop(
    operation: str, tiling: Tiling, options: dict[str, Any], tmp_path: Path
) -> None:
    options = SEND[operation] | options | {"stores": STORES}
    made = compiled(send.multiply_send, tiling, tmp_path, **options)
    if options.get("traced"):
        assert lint.check(made.ptx) == []
    else:
        check(made, tiling)
    (function,) = ptx.functions(made.ptx)
    code = function.instructions
    sent = [at for at, each in enumerate(code) if lint._is_bulk_store(each)]
    assert len(sent) == len(STORES) == made.sass.count("UTMASTG")
    waits = ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read")
    for at in sent:
        # The buffer is free again, and its values are visible to the copy engine.
        before = set(function.before(at, lambda each: each.opcode in waits))
        assert not before & {-1, *sent}
        before = set(
            function.before(at, lambda each: each.opcode == "fence.proxy.async.shared::cta")
        )
        assert not any(code[each].opcode.startswith("st.shared") for each in before)
    # A path from step 1's stores to the main loop has no wait.
    ahead = {
        each
        for at, instruction in enumerate(code)
        if instruction.opcode.startswith("wgmma.mma_async")
        for each in function.before(at, lambda each: each.opcode in waits)
    }
    assert ahead & set(sent)
    # An arrival is counted in its step's iteration, as tiles are stored: not ahead, as loads.
    ahead_of_stores = made.ttgir.partition("async_tma_copy_local_to_global")[0]
    stored = re.findall(r"arith\.cmpi eq, (%\w+), %step ", ahead_of_stores)
    counted = re.findall(r"arith\.cmpi eq, (%\w+), %late", made.ttgir)
    assert counted == stored[-1:]
    # Completion, then proxy order, before the arrival count.
    assert (
        len(re.findall(r"cp.async.bulk.wait_group 0;\s*fence.proxy.async.global;", made.ptx)) >= 2
    )


@pytest.mark.parametrize(
    ("operation", "tiling", "options"),
    [
        ("all_to_all", LONG, {}),
        ("all_to_all in place", SHORT, {"transposed": True, "stack": 16}),
        ("reduce_scatter", LONG, {"dtype": "bf16"}),
        ("reduce_scatter", WIDE, {"partials": "fp32"}),
        ("reduce_scatter", SHORT, {"stack": 16}),
        ("all_reduce", LONG, {"dtype": "bf16", "traced": True, "stack": 24}),
        ("all_reduce in place", LONG, {}),
    ],
)
def test_paced_stores_are_in_the_main_loop(
    operation: str, tiling: Tiling, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"stack": 0, **options}
    stack = options.pop("stack")
    options |= SEND[operation]
    made = compiled(send.multiply_send, tiling, tmp_path, paced=True, **options)
    check(made, tiling, stack=stack)
    # While a step's multiplications run, and before they are awaited: a store to the peer,
    # and behind it the next part's load.
    loop = made.ttgir[made.ttgir.index("ttng.warp_group_dot") :]
    part = tiling.rows // 16
    store = re.search(rf"tt.store %held.* : tensor<{part}x{tiling.columns}x", loop)
    load = re.search(rf"%held\S* = tt.load .*cacheModifier = cg : tensor<{part}x", loop)
    end = loop.index("scf.yield %", loop.index("tt.store"))
    assert store is not None
    assert load is not None
    assert store.start() < load.start() < end
    plain = compiled(send.multiply_send, tiling, tmp_path, **options)
    assert made.shared == plain.shared


@pytest.mark.parametrize(("operation", "tiling"), [("all_gather", LONG), ("all_to_all", SHORT)])
def test_gemms_that_receive(operation: str, tiling: Tiling, tmp_path: Path) -> None:
    made = compiled(receive.receive_multiply, tiling, tmp_path, **RECEIVE[operation])
    check(made, tiling)
    assert "fence.proxy.async.global" in made.ptx


def test_traced_gemms_are_pipelined(tmp_path: Path) -> None:
    for kernel, options in (
        (send.multiply_send, SEND["reduce_scatter"]),
        (receive.receive_multiply, RECEIVE["all_gather"]),
    ):
        made = compiled(kernel, LONG, tmp_path, traced=True, **options)
        assert lint.check(made.ptx) == []
        plain = compiled(kernel, LONG, tmp_path, **options)
        # Waits read the clock too.
        assert made.ptx.count("%globaltimer") > plain.ptx.count("%globaltimer")
        assert made.sass.count("UTMALDG") >= 2 * LONG.stages
        assert LONG.programs * (made.shared + RESERVED) <= SHARED


def test_few_rows(tmp_path: Path) -> None:
    for kernel, tiling, options in (
        (stream.multiply, STREAM_OF_64, {}),
        (stream.multiply_send, STREAM_OF_64, SEND["all_to_all"]),
        (stream.multiply_send, STREAM, SEND["all_reduce"] | {"partials": "fp32"}),
        (stream.receive_multiply, STREAM, RECEIVE["all_gather"]),
    ):
        assert tiling.stream_k
        check(compiled(kernel, tiling, tmp_path, **options), tiling)


def test_bfloat16_and_partials_of_float32(tmp_path: Path) -> None:
    options = SEND["reduce_scatter"] | {"dtype": "bf16", "partials": "fp32"}
    check(compiled(send.multiply_send, WIDE, tmp_path, **options), WIDE)


BY_ROWS = SCALED + ROW_SCALES + COLUMN_SCALES
FLOAT8: dict[str, Any] = {"dtype": "fp8e4nv", "out": "bf16", "scaling": BY_ROWS}
FAST = FLOAT8 | {"scaling": BY_ROWS + FAST_SUMS}


@pytest.mark.parametrize(
    ("operation", "sizes", "options"),
    [
        ("all_reduce in place", (8192, 8192, 7168), FAST),
        ("reduce_scatter", (4096, 7168, 1024), FAST),
        ("reduce_scatter", (8192, 8192, 7168), FLOAT8),
        ("all_to_all", (64, 7168, 2048), FLOAT8 | {"scaling": SCALED}),
        ("all_gather", (8192, 8192, 7168), FAST | {"dtype": "fp8e5"}),
    ],
)
def test_float8(
    operation: str, sizes: tuple[int, int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    tiling = default_tiling(
        *sizes, torch.float8_e4m3fn, blocks=8, fast=bool(options["scaling"] & FAST_SUMS)
    )
    assert tiling.inner == 128
    kernel, its = receive.receive_multiply, RECEIVE.get(operation)
    if its is None:
        kernel, its = send.multiply_send, SEND[operation]
    made = compiled(kernel, tiling, tmp_path, **its, **options)
    # Scales take registers, and some words are spilled where a tile is stored.
    check(made, tiling, instruction="QGMMA", stack=48)


def test_few_rows_of_float8(tmp_path: Path) -> None:
    for kernel, rows, options in (
        (stream.multiply_send, 64, SEND["all_reduce"] | {"partials": "fp32"} | FLOAT8),
        (stream.receive_multiply, 16, RECEIVE["all_gather"] | FAST),
    ):
        tiling = default_tiling(rows, 7168, 2048, torch.float8_e4m3fn, blocks=2)
        assert tiling.stream_k
        check(compiled(kernel, tiling, tmp_path, **options), tiling, instruction="QGMMA")


def test_operands_without_alignment_are_loaded_by_pointers(tmp_path: Path) -> None:
    kernel, options = receive.receive_multiply, RECEIVE["all_gather"]
    made = compiled(kernel, UNALIGNED, tmp_path, bulk=False, **options)
    assert lint.check(made.ptx) == []
    assert "HGMMA" in made.sass
    assert made.stack == 0


def test_sizes_of_1_are_constants(tmp_path: Path) -> None:
    for kernel, tiling in (
        (send.multiply_send, SMALL),
        (stream.multiply_send, SMALL._replace(stream_k=True)),
    ):
        sizes = SEND["all_reduce"] | {"bulk": False, "columns": 1, "inner": 1}
        made = compiled(kernel, tiling, tmp_path, **sizes)
        assert lint.check(made.ptx) == []


def test_float32(tmp_path: Path) -> None:
    for kernel, options in (
        (send.multiply_send, SEND["all_reduce"]),
        (receive.receive_multiply, RECEIVE["all_gather"]),
    ):
        made = compiled(kernel, SINGLE, tmp_path, dtype="fp32", **options)
        assert lint.check(made.ptx) == []
        assert made.stack == 0
        assert SINGLE.programs * (made.shared + RESERVED) <= SHARED
        assert SINGLE.programs * made.registers * SINGLE.warps * 32 <= REGISTERS
