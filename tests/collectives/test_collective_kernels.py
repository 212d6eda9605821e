"""Machine code of kernels for collectives between GPUs. Needs no GPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.machine_code import Kernel

pytestmark = [pytest.mark.torch, pytest.mark.timeout(420)]

#: Ranks, reduction, element and architecture; no reduction for kernels without arithmetic, and
#: "transfers" for sends and receives.
PROGRAMS: list[tuple[int, str | None, str | None, str]] = [
    (2, None, None, "sm_90a"),
    (8, None, None, "sm_90a"),
    (2, "sum", "bfloat16", "sm_90a"),
    (8, "sum", "bfloat16", "sm_90a"),
    (1, "max", "float16", "sm_90a"),
    (2, "xor", "bool", "sm_90a"),
    (3, "product", "uint64", "sm_90a"),
    (64, "sum", "float32", "sm_90a"),
    (2, "sum", "float8_e4m3fn", "sm_90a"),
    (8, "sum", "float8_e4m3fn", "sm_90a"),
    (2, "product", "float8_e5m2", "sm_90a"),
    (2, None, None, "sm_80"),
    (2, "min", "float64", "sm_80"),
    (2, "max", "float8_e4m3fn", "sm_80"),
    (1, "transfers", None, "sm_90a"),
    (2, "transfers", None, "sm_90a"),
    (64, "transfers", None, "sm_90a"),
    (2, "transfers", None, "sm_80"),
]
#: Those that `make test-torch` compiles.
QUICK = [
    (2, None, None, "sm_90a"),
    (2, "sum", "bfloat16", "sm_90a"),
    (2, "transfers", None, "sm_90a"),
]
NAMES = {"packets", "chunks", "bulk", "direct", "entry", "exit", "transfers"}
#: One-warp kernels before and behind copies by copy engines.
MEETINGS = {"entry", "exit"}


@pytest.fixture(
    params=[
        pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in PROGRAMS
    ],
    ids=lambda program: "-".join(map(str, program)),
)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Kernel], int, str]:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda.bindings, which torch installs")
    from tests import machine_code

    if machine_code.tools() is None:
        pytest.skip("needs cuobjdump and nvdisasm, which triton installs")
    ranks, reduction, element, arch = request.param
    if reduction == "transfers":
        return machine_code.collectives(ranks, arch, transfers=True), ranks, arch
    return machine_code.collectives(ranks, arch, reduction, element), ranks, arch


def test_kernels_are_there_and_keep_to_their_registers(
    case: tuple[dict[str, Kernel], int, str],
) -> None:
    kernels, ranks, arch = case
    for name, kernel in kernels.items():
        kind = name.rpartition("_")[2]
        assert kind in NAMES, name
        # A block has at most 960 threads, and one for packets, a direct call or transfers 512.
        of_512 = kind in ("packets", "direct", "transfers")
        assert kernel.registers <= (128 if of_512 else 112), name
        if ranks == 2 and kind != "chunks" and arch == "sm_90a":
            assert kernel.local <= 40, (name, kernel.local)
        if kind in MEETINGS:
            # A warp fits where other kernels leave few registers.
            assert kernel.registers <= 64, (name, kernel.registers)


def test_memory_of_earlier_kernels_is_accessed_behind_their_end(
    case: tuple[dict[str, Kernel], int, str],
) -> None:
    kernels, _, arch = case
    if arch != "sm_90a":
        pytest.skip("sm_80 has no early start of kernels")
    for name, kernel in kernels.items():
        waits = kernel.each("ACQBULK")
        assert len(waits) == 1, name
        before = {line.split()[0].split(".")[0] for line in kernel.code[: waits[0]]}
        assert before.isdisjoint({"LDG", "STG", "LD", "ST", "UBLKCP", "ATOM", "ATOMG", "RED"}), name
        # Copies follow an entry, and wait until it ends.
        assert bool(kernel.each("PREEXIT")) == (not name.endswith("_entry")), name


def test_flags_are_released_and_no_fence_is_wider_than_it_must_be(
    case: tuple[dict[str, Kernel], int, str],
) -> None:
    kernels, ranks, _ = case
    for name, kernel in kernels.items():
        # A proxy fence without a state space is a barrier on the whole GPU, in each thread.
        assert not kernel.having("MEMBAR", "GPU"), name
        kind = name.rpartition("_")[2]
        fences = kernel.each("MEMBAR.ALL.SYS") + kernel.each("MEMBAR.SC.SYS")
        if kind == "packets":
            # Packets need none; a failure record has one.
            assert len(fences) <= 1, name
        elif ranks > 1:
            assert fences, name
            direct = "_direct" in name or kind in MEETINGS
            assert kernel.each("STG.E.64.STRONG.SYS" if direct else "STG.E.STRONG.SYS"), name
            # An acquire is a strong load followed by an L1 cache invalidation.
            assert kernel.having("CCTL", "IVALL"), name


def test_data_moves_by_16_bytes_or_in_bulk(case: tuple[dict[str, Kernel], int, str]) -> None:
    kernels, ranks, arch = case
    for name, kernel in kernels.items():
        kind = name.rpartition("_")[2]
        assert kernel.having("LDG", "128") or kind == "bulk" or kind in MEETINGS, name
        if kind == "bulk" and arch == "sm_90a" and ranks > 1:
            assert kernel.each("UBLKCP.S.G"), name
            assert kernel.each("UBLKCP.G.S"), name
