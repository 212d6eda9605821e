"""Launches by native code, and operators in compiled code."""

import importlib
import shutil
from typing import Any

import pytest

from tests import ranks
from tests.device_group import batch, group

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_calls_are_checked_and_launched_in_native_code(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = group(1, dtype=dtype, scale_dtype="float8_e8m0fnu", block=16, ids_dtype="int32")
    kind = getattr(torch, dtype)
    tokens, ids, weights = batch()
    given = (tokens.to(kind), ids.int(), weights)
    scales = torch.full((3, 2), 128, dtype=torch.uint8) if rank.scales else None
    count = torch.tensor([2], dtype=torch.int32)

    def rounds() -> list[Any]:
        results = []
        for halves in (False, True):
            if halves:
                received = rank.dispatch_send(*given, scales=scales, count=count).recv()
            else:
                received = rank.dispatch(*given, scales=scales, count=count)
            used = int(received.expert_offsets[-1])
            outputs = torch.zeros(received.positions, 32, dtype=torch.bfloat16)
            outputs[:used] = received.tokens[:used].bfloat16()
            results += [received.rows[:used].clone(), received.weights[:used].clone()]
            if halves:
                results.append(rank.combine_send(received, outputs).recv()[:2])
            else:
                results.append(rank.combine(received, outputs)[:2])
            received.release()
        return results

    launcher = rank._launcher
    assert launcher.quick is not None
    with monkeypatch.context() as patched:
        for name in ("dispatch_send", "dispatch_recv", "dispatch"):
            patched.setattr(launcher, name, None)
        for name in ("combine_send", "combine_recv", "combine"):
            patched.setattr(launcher, name, None)
        quick = rounds()
    # A torch whose tensors cannot be read natively.
    monkeypatch.setattr(launcher, "quick", None)
    for one, other in zip(quick, rounds(), strict=True):
        assert torch.equal(one, other)
    rank.check()


def test_tensors_that_native_code_cannot_read_are_taken_as_well(alone: Any) -> None:
    tokens, ids, weights = batch()
    expected = alone.dispatch(tokens, ids, weights)
    with torch.no_grad():
        received = alone.dispatch(torch.nn.Parameter(tokens), ids, torch.nn.Parameter(weights))
    used = int(expected.expert_offsets[-1])
    assert torch.equal(received.tokens[:used], expected.tokens[:used])
    assert torch.equal(received.weights[:used], expected.weights[:used])
    native = importlib.import_module("weft._native")
    assert native.DeviceCalls.of(alone._native, dict, None, alone._layout.places) is None


def test_native_calls_are_for_the_stream_of_the_last_one(alone: Any) -> None:
    quick = alone._launcher.quick
    assert not quick.follows(0, 7)
    quick.follow(0, 7, False)
    quick.follow(0, 8, True)
    quick.follow(1, 9, False)
    assert [quick.follows(0, stream) for stream in (7, 8, 9)] == [True, False, False]
    assert [quick.follows(channel, 9) for channel in (0, 1, 2)] == [False, True, False]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                shutil.which("g++") is None, reason="Inductor needs a C++ compiler, g++"
            ),
        ),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_compiled_code_gives_the_same_bits(layout: str, backend: str) -> None:
    results = ranks.run(
        "cuda.moe.compiled", 2, timeout=580, with_torch=True, backend=backend, layout=layout
    )
    assert results == [[True] * 6 + ["free"]] * 2


@pytest.mark.parametrize("layout", ["contiguous", "indexed", "dense"])
@pytest.mark.parametrize("test", ["test_schema", "test_faketensor"])
@pytest.mark.filterwarnings("ignore")
def test_operators_are_as_they_say(test: str, layout: str) -> None:
    # torch's own mutated argument check cannot compare 8-bit floats.
    dtype = "float8_e4m3fn" if test == "test_faketensor" else "bfloat16"
    (rank,) = group(1, layout=layout, dtype=dtype, block=32)
    tokens, ids, weights = batch(dtype=getattr(torch, dtype))
    scales = torch.ones(3, 1) if rank.scales else None
    given = (tokens, scales, ids, weights, torch.tensor([2], dtype=torch.int32))
    outputs = torch.zeros(rank.positions, 32, dtype=torch.bfloat16)
    load = torch.zeros(rank.experts, dtype=torch.int64)
    for operator, *arguments in (
        ("moe_dispatch_send", *given),
        ("moe_dispatch_recv", load),
        *((("moe_landed",),) if layout == "indexed" else ()),
        ("moe_combine_send", outputs),
        ("moe_combine_recv", 3, None, None, None, None),
        ("moe_dispatch", load, *given),
        ("moe_combine", outputs, 3, None, torch.ones_like(outputs[:3]), None, None),
        ("moe_dispatch", None, *given),
        ("moe_release",),
    ):
        call = getattr(torch.ops.weft, operator).default
        arguments = [rank._handle, 0, None, rank._workspace, *arguments]
        torch.library.opcheck(call, tuple(arguments), test_utils=test)
    rank.check()
