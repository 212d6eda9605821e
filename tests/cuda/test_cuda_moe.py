"""Dispatch and combine on a device, or its twin, bit by bit beside the CPU's."""

import importlib
from typing import Any

import pytest

import weft
from tests import ranks
from tests.device_group import SHAPE, batch, group

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")


CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "routing": "masked", "weighting": "expert"},
    {"dtype": "bfloat16", "combine_dtype": "float32", "output_dtype": "float32"},
    {"dtype": "bfloat16", "reply_dtype": "float32", "layout": "indexed"},
    {"dtype": "float8_e4m3fn", "hidden": 320},
    {"dtype": "float8_e4m3fn", "block": 32, "layout": "indexed", "reply_dtype": "float32"},
    {"dtype": "float8_e5m2", "scale_dtype": "float8_e8m0fnu", "block": 64, "hidden": 192},
    {"layout": "indexed", "routing": "masked", "counted": True},
    {"pad_to": 8, "routing": "masked", "dtype": "bfloat16", "counted": True},
    {"ids_dtype": "int32", "routing": "unweighted"},
    {"routing": "some"},
    {"routing": "empty", "dtype": "float8_e4m3fn"},
    {"routing": "one", "pad_to": 8},
    {"routing": "full", "layout": "indexed"},
    {"experts": 7, "top_k": 3},
    {"experts": 3, "top_k": 2, "pad_to": 8},
    {"experts": 1, "top_k": 1},
    {"experts": 33, "top_k": 8, "hidden": 16},
    {"max_tokens": 3, "hidden": 1000},
    {"max_tokens": 8, "top_k": 4, "dtype": "bfloat16", "path": "packets"},
    {"max_tokens": 100, "path": "latency", "dtype": "bfloat16", "rounds": 2},
    {"max_tokens": 100, "path": "bandwidth", "dtype": "bfloat16", "rounds": 2},
    {"channels": 1, "rounds": 6},
    {"channels": 3, "max_positions": 40, "top_k": 1, "routing": "random", "experts": 64},
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("count", "step"), [(1, 2), (2, 1), (4, 3)])
def test_a_twin_gives_the_bits_of_the_cpu(count: int, step: int) -> None:
    failures = ranks.run(
        "cuda.moe.cases",
        count,
        timeout=140,
        environment={"OMP_NUM_THREADS": "1"},
        with_torch=True,
        cases=CASES[::step],
        seed=count,
    )
    assert failures == [[]] * count


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@needs_gpu
@pytest.mark.timeout(600)
def test_gpus_give_the_bits_of_the_cpu() -> None:
    count = torch.cuda.device_count()
    failures = ranks.run(
        "cuda.moe.cases", count, timeout=580, cases=CASES, seed=count, device="cuda"
    )
    assert failures == [[]] * count


@needs_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_a_graph_is_replayed(layout: str) -> None:
    (rank,) = cuda.local_group(1, ["cuda:0"], **SHAPE, layout=layout)
    given = [each.cuda() for each in batch(8)]

    def round() -> Any:
        with rank.dispatch(*given) as received:
            used = torch.arange(received.positions, device="cuda") < received.expert_offsets[-1]
            rows = torch.where(used, received.rows, 0) if layout == "indexed" else slice(None)
            return rank.combine(received, (received.tokens[rows] * 2).contiguous())

    round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combined = round()
    for turn in range(3):
        given[0].copy_(batch(8)[0] + turn)
        graph.replay()
        # Every third token names one expert, and the others two; weights are halves.
        assert torch.equal(combined[:2].cpu(), (batch(8)[0] + turn)[:2] * 2)
        assert torch.equal(combined[2].cpu(), batch(8)[0][2] + turn)
    torch.cuda.synchronize()
    rank.check()


@pytest.mark.parametrize("watchdog", [False, True])
def test_a_rank_that_does_not_come_is_named_at_all_ranks(watchdog: bool) -> None:
    results = ranks.run(
        "cuda.moe.lost", 2, with_torch=True, skew_timeout=0.3, watchdog=watchdog, quiet=not watchdog
    )
    (poisoned, counts, (error, message)), (elsewhere, same) = results
    assert poisoned
    assert counts == [0]
    assert error == "WaitTimeoutError"
    assert "rank 0 waited for rank 1 in dispatch_recv" in message
    assert elsewhere == "GroupPoisonedError"
    assert message in same


def test_a_released_round_ends_at_all_ranks() -> None:
    from tests.workers.cuda.moe import together

    def rounds(rank: Any) -> list[bool]:
        equal = []
        for turn in range(6):
            first = rank.dispatch(*batch())
            second = rank.dispatch_send(*batch(5))
            with pytest.raises(weft.errors.ChannelInUseError, match="2 rounds"):
                rank.dispatch_send(*batch())
            if turn % 2:
                first.release()
            else:
                with first:
                    rank.combine_send(first, torch.zeros(first.positions, 32))
            with second.recv() as received:
                combined = rank.combine(received, received.tokens * 2)
            equal.append(torch.equal(combined[:2], batch(5)[0][:2] * 2))
        rank.check()
        return equal

    members = group(2)
    assert together(members, rounds) == [[True] * 6] * 2
    together(members, lambda rank: rank.close())
