"""Token counts for each expert, counted by dispatch over rounds."""

import importlib
from typing import Any

import pytest

import weft

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")
cuda: Any = importlib.import_module("weft.cuda")

SHAPE: dict[str, Any] = {"experts": 7, "top_k": 3, "hidden": 16, "max_tokens": 9}


def group(count: int = 2, **arguments: Any) -> list[Any]:
    return list(cuda.local_group(count, ["twin"] * count, **(SHAPE | arguments)))


def batch(rank: int, turn: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(10 * turn + rank)
    ids = torch.rand(9, 7, generator=random).topk(3).indices
    ids[torch.rand(ids.shape, generator=random) < 0.2] = -1
    return torch.zeros(9, 16), ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded"])
@pytest.mark.parametrize("path", [None, "latency", "bandwidth"])
def test_each_rank_adds_what_its_experts_got(path: str | None, layout: str, dtype: Any) -> None:
    from tests.workers.cuda.moe import together

    def rounds(rank: Any) -> Any:
        # A row in a layer table.
        load = torch.full((3, 7), 5, dtype=dtype)
        for turn in range(4):
            tokens, ids = batch(rank.rank, turn)
            if turn % 2:
                rank.dispatch(tokens, ids, expert_load=load[1]).release()
            else:
                rank.dispatch_send(tokens, ids, expert_load=load[1]).recv().release()
            rank.dispatch(tokens, ids).release()
        rank.check()
        assert load[[0, 2]].unique().tolist() == [5]
        mine = torch.zeros(7, dtype=torch.bool)
        mine[list(rank.local_experts)] = True
        assert load[1][~mine].unique().tolist() == [5]
        return load[1] - 5

    loads = together(group(path=path, layout=layout), rounds)
    ids = torch.cat([batch(rank, turn)[1].flatten() for rank in range(2) for turn in range(4)])
    assert torch.equal(sum(loads), torch.bincount(ids[ids >= 0], minlength=7).to(dtype))


def test_a_round_without_room_adds_nothing() -> None:
    (rank,) = group(1, max_positions=4)
    load = torch.zeros(7, dtype=torch.int64)
    rank.dispatch(*batch(0, 0), expert_load=load).release()
    with pytest.raises(weft.errors.CapacityError):
        rank.check()
    assert load.tolist() == [0] * 7


def test_what_does_not_fit_is_refused() -> None:
    (rank,) = group(1)
    for load, reason in (
        (torch.zeros(6, dtype=torch.int32), r"expert_load has shape \(6,\); \(7,\) is needed"),
        (torch.zeros(7), "expert_load is of dtype torch.float32"),
        (torch.zeros(14, dtype=torch.int64)[::2], "expert_load is not contiguous"),
        ([0] * 7, "expert_load is a list"),
    ):
        with pytest.raises(weft.errors.ShapeError, match=reason):
            rank.dispatch(*batch(0, 0), expert_load=load)
        with pytest.raises(weft.errors.ShapeError, match=reason):
            rank.dispatch_send(*batch(0, 0), expert_load=load).recv()
    rank.check()


@pytest.mark.parametrize("halves", [False, True])
def test_compiled_code_counts_too(halves: bool) -> None:
    (rank,) = group(1)

    def layer(tokens: Any, ids: Any, load: Any) -> Any:
        if halves:
            received = rank.dispatch_send(tokens, ids, expert_load=load).recv()
        else:
            received = rank.dispatch(tokens, ids, expert_load=load)
        counts = received.expert_counts * 2
        received.release()
        return counts

    loads = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        load = torch.zeros(7, dtype=torch.int32)
        for turn in range(2):
            call(*batch(0, turn), load)
        loads.append(load)
    assert torch.equal(*loads)
    assert loads[0].sum() > 0
