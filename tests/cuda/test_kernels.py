"""Kernels compile for every shape kind, and their machine code has the required properties.

Kernels are only compiled: PyTorch's NVRTC needs no GPU.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from weft.moe import balance

if TYPE_CHECKING:
    from tests.machine_code import Kernel

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

FP8 = {"wire_dtype": "float8_e4m3fn", "scales": ("float32", 128)}
DEEPSEEK: dict[str, Any] = {"ranks": 8, "experts": 256, "top_k": 8, "hidden": 7168}
NARROW: dict[str, Any] = {"ranks": 8, "experts": 64, "top_k": 6, "hidden": 2880}
E8M0 = NARROW | {"max_tokens": 64, "token_dtype": "float8_e4m3fn", "scales": ("float8_e8m0fnu", 32)}
FLOAT32 = {"token_dtype": "float32", "combine_dtype": "float32"}
FLOAT16 = {"token_dtype": "float16", "combine_dtype": "float16"}
DENSE = {"layout": "dense", "weighting": "expert"}
#: DeepSeek-V3 experts with 32 replicas: equal and unequal numbers on each rank.
REPLICAS = balance(range(256), [36] * 8), balance(range(256), [40] * 4 + [32] * 4)
#: Published model shapes, and limits.
SHAPES: dict[str, dict[str, Any]] = {
    "decode": DEEPSEEK | FP8 | {"max_tokens": 128},
    "one token": DEEPSEEK | FP8 | {"max_tokens": 1},
    "prefill": DEEPSEEK | FP8 | {"max_tokens": 4096},
    "prefill in bfloat16": DEEPSEEK | {"max_tokens": 4096},
    "8-bit floats given": E8M0 | {"ids_dtype": "int32"},
    "scales in words": E8M0 | {"layout": "padded", "scale_layout": "column_packed"},
    "float32": NARROW | FLOAT32 | {"max_tokens": 256, "weighting": "expert"},
    "indexed in float16": NARROW | FLOAT16 | {"max_tokens": 512, "layout": "indexed"},
    "padded": DEEPSEEK | FP8 | {"max_tokens": 128, "layout": "padded", "reply_dtype": "float32"},
    "dense": DEEPSEEK | FP8 | DENSE | {"max_tokens": 4096},
    "dense, sums rounded on their way": NARROW
    | DENSE
    | {"max_tokens": 2048, "reply_dtype": "float32"},
    "dense decode": DEEPSEEK | DENSE | {"max_tokens": 128, "ids_dtype": "int32"},
    "odd": {"ranks": 3, "experts": 7, "top_k": 3, "hidden": 1000, "max_tokens": 33, "pad_to": 8},
    "replicas": DEEPSEEK | FP8 | {"max_tokens": 128, "placement": REPLICAS[:1]},
    "replicas on uneven ranks": DEEPSEEK | FP8 | {"max_tokens": 128, "placement": REPLICAS[1:]},
    "replicas of one token": DEEPSEEK | FP8 | {"max_tokens": 1, "placement": REPLICAS[1:]},
    "replicas at prefill": DEEPSEEK | FP8 | {"max_tokens": 4096, "placement": REPLICAS[1:]},
    "one rank": {"ranks": 1, "experts": 1, "top_k": 1, "hidden": 16, "max_tokens": 8},
}
#: The newest architecture compiles a few, without a run.
CASES = [(name, "sm_90a") for name in SHAPES]
CASES += [
    (name, "sm_100a")
    for name in ("decode", "one token", "prefill", "float32", "replicas of one token")
]

HALVES = ("moe_dispatch_send", "moe_dispatch_recv", "moe_combine_send", "moe_combine_recv")
FUSED = {"moe_dispatch": HALVES[:2], "moe_combine": HALVES[2:]}
PLAN = ("moe_plan_count", "moe_plan_scan")
#: Maximum registers for a thread; blocks with few warps may use more.
MOST_REGISTERS = {"moe_dispatch_recv": 168}
USUAL_REGISTERS = 128
#: Kernels with one block per SM.
ALONE_REGISTERS = 224
#: Maximum bytes that a thread spills to local memory.
MOST_SPILT = {"sm_90a": 0, "sm_100a": 16}


def need_tools() -> None:
    """Skip unless compiler and disassembler are available."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda-bindings, which comes with PyTorch for CUDA")
    from tests.machine_code import tools

    if tools() is None:
        pytest.skip("needs cuobjdump and nvdisasm, which come with Triton")


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Kernel], dict[str, int], str]:
    """A shape's kernels, their macros, and the architecture."""
    need_tools()
    from tests.gpu.case import Shape
    from tests.gpu.side import PLACED
    from tests.machine_code import compiled
    from weft import _native

    if not hasattr(_native, "device_defines"):
        pytest.skip("needs a native module with device_defines; this one was built without")
    name, arch = request.param
    shape = Shape(**SHAPES[name])
    defines = _native.device_defines(shape.ranks, **shape.options(), **PLACED)
    numbers = [(name, value) for name, value in defines if "," not in value]
    macros = {name: int(value.removesuffix("ull")) for name, value in numbers}
    return compiled(defines, arch), macros, arch


Case: TypeAlias = tuple[dict[str, "Kernel"], dict[str, int], str]


def test_every_kernel_keeps_to_its_registers(case: Case) -> None:
    kernels, macros, arch = case
    needed = {*HALVES, *FUSED} | (set(PLAN) if macros["WEFT_PATH"] == 2 else set())
    assert needed <= set(kernels)
    for name, kernel in kernels.items():
        usual = ALONE_REGISTERS if macros["WEFT_PATH"] == 2 else USUAL_REGISTERS
        assert kernel.registers <= MOST_REGISTERS.get(name, usual), name
        assert kernel.local <= MOST_SPILT[arch], name
        if not MOST_SPILT[arch]:
            assert not kernel.having("LDL") + kernel.having("STL"), name


def test_rows_move_by_16_bytes_or_in_bulk(case: Case) -> None:
    kernels, macros, _ = case
    packets = macros["WEFT_PATH"] == 0
    for name in ("moe_dispatch_send", "moe_combine_send", "moe_dispatch", "moe_combine"):
        assert kernels[name].having("LDG", "128") or kernels[name].each("UBLKCP.S.G"), name
        # On the packets path each word has its epoch beside it, so threads store both.
        stored = bool(kernels[name].having("STG", "128"))
        # Sums of large batches are stored from registers, all other rows in bulk.
        in_bulk = macros["WEFT_PATH"] != 2 or "dispatch" in name or copies(macros)
        if not packets and in_bulk:
            stored = bool(kernels[name].each("UBLKCP.G.S"))
        # A float32 sum rounds to half of 16 bytes.
        assert stored or macros["WEFT_COMBINE_TYPE"] != macros["WEFT_REPLY_TYPE"], name
        assert not packets or not kernels[name].each("UBLKCP.G.S"), name
    receive = kernels["moe_dispatch_recv"]
    if packets:
        assert receive.having("LDG", "128")
    # In the indexed layout rows stay at their arrival slots.
    if macros["WEFT_LAYOUT"] != 1:
        assert receive.having("STG", "128") or receive.each("UBLKCP.G.S")
    receive = kernels["moe_combine_recv"]
    assert receive.having("LDG", "128") or receive.each("UBLKCP.S.G")
    # A thread rounds 16 reply bytes to 8, 16 or 32 output bytes.
    assert receive.having("STG", "128") or macros["WEFT_REPLY_TYPE"] != macros["WEFT_OUTPUT_TYPE"]


def test_memory_of_earlier_kernels_is_accessed_behind_their_end(case: Case) -> None:
    for name, kernel in case[0].items():
        waits = kernel.each("ACQBULK")
        assert len(waits) == 1, name
        before = {line.split()[0].split(".")[0] for line in kernel.code[: waits[0]]}
        # Only entry counts are added before, and no kernel on the stream adds to them then.
        assert before.isdisjoint({"LDG", "STG", "LD", "ST", "UBLKCP", "ATOM", "CALL"}), name
        plan = name in (*PLAN, "moe_counts")
        assert bool(before & {"ATOMG", "REDG", "RED"}) != plan, name
        # Kernels that wait for peers let the next one start before they end.
        assert bool(kernel.each("PREEXIT")) != plan, name


#: Maximum instructions between a fence and its store; one fence may precede many rows' flags,
#: whose addresses are computed after it.
NEAR = 5
NEAR_FOR_MANY = 60


def test_whatever_a_peer_waits_for_is_released(case: Case) -> None:
    kernels, macros, _ = case
    near = NEAR_FOR_MANY if macros["WEFT_PATH"] == 2 else NEAR
    for name, kernel in kernels.items():
        fences = [at for at, line in enumerate(kernel.code) if fence(line)]
        stores = kernel.each("STG.E.STRONG.SYS")
        for at in stores:
            before = kernel.code[max(0, at - near) : at]
            assert any(fence(line) for line in before), (name, before, kernel.code[at])
        # Packets carry their own epoch and need no fence; flags and signals do.
        if name in ("moe_dispatch_send", "moe_dispatch") and macros["WEFT_PATH"] != 0:
            assert stores, name
        if name in ("moe_combine_send", "moe_combine"):
            signals = kernel.each("STG.E.64.STRONG.SYS")
            assert any(any(0 < at - fence <= NEAR for fence in fences) for at in signals), name
        if name in ("moe_dispatch_recv", "moe_combine_recv"):
            # An acquire is a strong load followed by an L1 cache invalidation.
            assert kernel.having("LDG", "STRONG", "SYS"), name
            assert kernel.having("CCTL", "IVALL"), name


def test_no_fence_is_wider_than_it_must_be(case: Case) -> None:
    for name, kernel in case[0].items():
        # A proxy fence without a state space is a barrier on the whole GPU, in each thread.
        assert not kernel.having("MEMBAR", "GPU"), name
        # A peer's flags are released by one thread each, or one fence precedes many.
        assert len([line for line in kernel.code if fence(line)]) <= 8, name


#: Maximum instructions between such a fence and the bulk load that refills a stage.
NEAR_LOAD = 20

#: Shared memory proxy fences in kernels that load in bulk, by path: behind the initialisation of
#: barriers, before a stage is refilled, and before one is stored in bulk. None: right before loads.
SHARED_FENCES = {
    "moe_dispatch_send": (0, 1, 2),
    "moe_dispatch_recv": (1, 2, 2),
    "moe_dispatch": (1, 3, 3),
    "moe_combine_send": (2, 3, None),
    "moe_combine_recv": (0, 0, None),
    "moe_combine": (2, 3, None),
}


def test_a_stage_that_was_read_is_refilled_behind_a_fence(case: Case) -> None:
    kernels, macros, _ = case
    for name, kernel in kernels.items():
        if kernel.each("UBLKCP.S.G"):
            # Such a fence first waits for the thread's accesses; a single barrier's does not.
            waits = set(kernel.each("MEMBAR.ALL.CTA"))
            fences = [at for at in kernel.each("FENCE.VIEW.ASYNC.S") if at - 1 in waits]
            needed = SHARED_FENCES[name][macros["WEFT_PATH"]]
            if needed is None:
                loads = kernel.each("UBLKCP.S.G")
                behind = [at for at in loads if any(0 < at - f <= NEAR_LOAD for f in fences)]
                # Copied rows are not read by threads.
                copied = copies(macros) and name != "moe_combine_recv"
                assert behind == loads or copied, name
                assert behind or name == "moe_combine_send", name
                continue
            straight = macros["WEFT_LAYOUT"] != 1 and not macros["WEFT_CAST"]
            if name == "moe_dispatch" and macros["WEFT_PATH"] == 2 and straight:
                needed += 1  # recorded own rows
            assert len(fences) == needed, name
    for name, kernel in kernels.items():
        if name in ("moe_dispatch_recv", "moe_combine_recv") and kernel.each("UBLKCP.S.G"):
            # Bulk loads from a peer's writes follow a fence for that state space.
            assert kernel.having("FENCE", "VIEW", "ASYNC", "G"), name


#: Third-party kernel that uses Weft's device functions.
EXCHANGE = """
#include "weft/device.cuh"
using namespace weft;
extern "C" __global__ void exchange(Watch watching, void *to, const void *from, u64 bytes,
                                    u32 *const *words, u32 ranks, u32 epoch, u32 *failed) {
    const Team team{1, threadIdx.x, blockDim.x};
    put_signal(team, to, from, bytes, words[1] + ranks, epoch);
    bool here = wait(watching, words[0] + ranks, epoch, 1, 0);
    here &= barrier(watching, team, words, ranks, epoch);
    if (!here) *failed = 1;
}
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_device_functions_order_what_they_put_before_their_signal(arch: str) -> None:
    need_tools()
    from tests.machine_code import compiled

    kernel = compiled([], arch, EXCHANGE)["exchange"]
    assert kernel.local == 0
    names = [set(line.split()[0].split(".")) for line in kernel.code]
    puts = [at for at, name in enumerate(names) if {"STG", "128"} <= name]
    signals = kernel.each("STG.E.STRONG.SYS")
    assert puts
    assert signals
    # All threads store, then a barrier, then one thread fences, and then it signals.
    first = next(at for at in signals if at > puts[0])
    order = [at for at in range(puts[0], first) if "BAR" in names[at] or fence(kernel.code[at])]
    assert ["BAR" in names[at] for at in order][:2] == [True, False]


#: Compiles only if all launches have the same share count.
SHARED_OUT = """
#include "moe/launch.cuh"
using namespace weft::moe;
constexpr bool sums_up(u32 blocks) {
    u32 sum = 0, least = SHARES, most = 0;
    for (u32 block = 0; block < blocks; ++block) {
        const u32 own = share(block, blocks);
        sum += own;
        least = own < least ? own : least, most = own > most ? own : most;
    }
    return sum == SHARES && least > 0 && most - least <= 1;
}
constexpr bool all_sum_up() {
    for (u32 blocks = 1; blocks <= 160; ++blocks)
        if (!sums_up(blocks)) return false;
    return sums_up(65535) && sums_up(SHARES);
}
static_assert(all_sum_up());
"""


def test_a_launch_has_as_many_shares_whatever_its_blocks() -> None:
    need_tools()
    from tests.gpu.case import Shape
    from tests.gpu.side import PLACED
    from tests.machine_code import cubin
    from weft import _native

    shape = Shape(**SHAPES["odd"])
    defines = tuple(_native.device_defines(shape.ranks, **shape.options(), **PLACED))
    assert cubin(defines, "sm_90a", SHARED_OUT)
    with pytest.raises(AssertionError, match="static assertion failed"):
        cubin(defines, "sm_90a", SHARED_OUT.replace("sum == SHARES", "sum == SHARES + 1"))


def copies(macros: dict[str, int]) -> bool:
    """True if replies are unconverted expert outputs."""
    same = macros["WEFT_COMBINE_TYPE"] == macros["WEFT_REPLY_TYPE"]
    return macros["WEFT_PATH"] == 2 and macros["WEFT_LAYOUT"] == 3 and same


def fence(line: str) -> bool:
    """True if an instruction orders earlier stores at system scope."""
    return line.split()[0] in ("MEMBAR.ALL.SYS", "MEMBAR.SC.SYS")
