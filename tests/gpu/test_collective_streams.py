"""Device collectives on several streams, in barriers and in graphs."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.mark.parametrize("seed", range(4))
def test_calls_on_a_stream_of_their_own_give_the_same_bits(kind: str, seed: int) -> None:
    from tests.gpu.collective_calls import Group, calls_of, ranks_of

    ranks = ranks_of(kind, seed)
    group = Group(kind, ranks)
    group.verify(calls_of(50 + seed, ranks, 12, allocate=False), seed, async_finish=True)
    group.close()


def test_calls_on_two_streams_come_in_their_order(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group, ranks_of

    ranks = ranks_of(kind, 1)
    group = Group(kind, ranks, skew_timeout=10.0)
    vectors = [torch.full((5000,), 1.0, device=each.device) for each in group.members]
    others = [
        torch.cuda.Stream(device=each.device) if kind == "cuda" else None for each in group.members
    ]
    for member in group.members:
        member.prepare("sum", torch.float32)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        here, other = group.streams[rank], others[rank]
        for number in range(12):
            if other is None:
                member.all_reduce(vectors[rank])
                continue
            with torch.cuda.stream((here, other)[number % 2]):
                # The calls are ordered without help: a rank that is slow on one stream is on both.
                torch.cuda._sleep(rank * 100_000)
                member.all_reduce(vectors[rank])

    group.run(work)
    for vector in vectors:
        assert bool((vector == float(ranks) ** 12).all())
    assert group.raised() == [""] * ranks
    group.close()


def test_no_rank_leaves_a_barrier_before_all_have_come(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group

    if kind == "cuda":
        barriers_of_one_gpu()
        return
    rounds, ranks = 300, 3
    group = Group(kind, ranks)
    begun = [0] * ranks

    def work(rank: int, member: cuda.Collectives) -> bool:
        chance = random.Random(rank)
        for number in range(rounds):
            if chance.random() < 0.1:
                time.sleep(chance.random() * 0.002)
            begun[rank] = number + 1
            assert member.barrier() is None
            assert min(begun) > number
        return True

    assert group.run(work) == [True] * ranks
    assert torch.equal(torch.tensor(begun), torch.full((ranks,), rounds))
    group.close()


def barriers_of_one_gpu() -> None:
    """Ranks on one GPU, whose kernels see each other's memory."""
    import torch

    from weft.cuda import local_collectives

    ranks, rounds = 4, 3000
    members = local_collectives(ranks, ["cuda:0"] * ranks, num_sms=4)
    streams = [torch.cuda.Stream(device=0) for _ in members]
    begun = torch.zeros(ranks, dtype=torch.int32, device="cuda:0")
    seen = torch.zeros(ranks, rounds, dtype=torch.int32, device="cuda:0")
    chance = random.Random(4)
    torch.cuda.synchronize()
    for number in range(rounds):
        for rank, member in enumerate(members):
            with torch.cuda.stream(streams[rank]):
                if chance.random() < 0.3:
                    torch.cuda._sleep(chance.randrange(40_000))
                begun[rank : rank + 1].add_(1)
                member.barrier()
                torch.amin(begun, 0, out=seen[rank, number])
    torch.cuda.synchronize()
    least = torch.arange(1, rounds + 1, dtype=torch.int32)
    assert bool((seen.cpu() >= least).all())
    for member in members:
        member.check()
        member.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs_are_replayed_in_any_order_with_other_inputs(ranks: int) -> None:
    import torch

    from tests.gpu.collective_calls import Call, Group
    from tests.gpu.collective_reference import to_bytes

    group = Group("cuda", ranks)
    sizes, rounds = [(3,), (300_001,), (64,), (70_000,)], 40
    graphs: list[list[torch.cuda.CUDAGraph]] = []
    places: list[list[torch.Tensor]] = []
    results: list[list[torch.Tensor]] = []
    generator = torch.Generator().manual_seed(9)
    pool = torch.randn(rounds, ranks, 300_001, generator=generator).bfloat16()
    for member in group.members:
        member.prepare("sum", torch.bfloat16)
        member.prepare("max", torch.bfloat16)
    given = [pool[:, rank].to(each.device).contiguous() for rank, each in enumerate(group.members)]
    for rank, member in enumerate(group.members):
        with group.on(rank):
            place = [torch.zeros(300_001, dtype=torch.bfloat16, device=member.device)]
            outs = [torch.zeros(size, dtype=torch.bfloat16, device=member.device) for size in sizes]
            outs.append(torch.zeros_like(outs[0]))
            shard = torch.zeros(ranks, 50, dtype=torch.bfloat16, device=member.device)
            torch.cuda.synchronize(member.device)
            mine = []
            for number in range(2):
                graph = torch.cuda.CUDAGraph()
                stream = group.streams[rank]
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    # Tiny and long calls alternate.
                    for size, out in zip(sizes, outs[:4], strict=True):
                        part = place[0][: size[0]]
                        member.all_reduce(part, "max" if number else "sum", out=out)
                    outs[4].copy_(place[0][:3])
                    member.broadcast(outs[4], number)
                    member.all_gather(place[0][:50].view(1, 50), out=shard)
                    member.barrier()
                mine.append(graph)
        graphs.append(mine)
        places.append(place)
        results.append([*outs, shard])
    group.synchronise()
    kept = [
        [torch.zeros(rounds, *each.shape, dtype=each.dtype, device=each.device) for each in row]
        for row in results
    ]
    group.synchronise()
    chance = random.Random(2)
    order = [chance.randrange(2) for _ in range(rounds)]
    for number, which in enumerate(order):
        for rank in group.ranks:
            with group.on(rank):
                places[rank][0].copy_(given[rank][number])
                graphs[rank][which].replay()
                for result, copy in zip(results[rank], kept[rank], strict=True):
                    copy[number].copy_(result)
    group.synchronise()
    assert group.raised() == [""] * ranks
    for number, which in enumerate(order):
        inputs = [pool[number, rank] for rank in group.ranks]
        for rank in group.ranks:
            for at, size in enumerate(sizes):
                call = Call("all_reduce", "bfloat16", "max" if which else "sum", size[0], ())
                right = call.results([to_bytes(each[: size[0]]) for each in inputs])[rank]
                assert (to_bytes(kept[rank][at][number]) == right).all(), (number, rank, size)
            assert torch.equal(kept[rank][4][number].cpu(), inputs[which][:3])
            gathered = torch.stack([each[:50] for each in inputs])
            assert torch.equal(kept[rank][5][number].cpu(), gathered)
    graphs.clear()
    group.close()


@pytest.mark.gpu
def test_a_first_call_may_be_captured() -> None:
    import torch

    from tests.gpu.collective_calls import Group

    group = Group("cuda", 2)
    vectors = [
        torch.full((40,), 1 + rank, dtype=torch.int16, device=each.device)
        for rank, each in enumerate(group.members)
    ]
    group.synchronise()
    graphs = []
    for rank, member in enumerate(group.members):
        graph = torch.cuda.CUDAGraph()
        with group.on(rank), torch.cuda.graph(graph, stream=group.streams[rank]):
            member.all_reduce(vectors[rank], "xor")
        graphs.append(graph)
    for rank, graph in enumerate(graphs):
        with group.on(rank):
            graph.replay()
    group.synchronise()
    assert all(each.tolist() == [3] * 40 for each in vectors)
    assert group.raised() == ["", ""]
    graphs.clear()
    group.close()


@pytest.mark.gpu
def test_a_graph_that_is_replayed_after_the_end_leaves_no_numbers() -> None:
    import torch

    from tests.gpu.collective_calls import Group

    group = Group("cuda", 2)
    vectors = [torch.ones(100, device=each.device) for each in group.members]
    graphs = []
    for rank, member in enumerate(group.members):
        member.prepare("sum", torch.float32)
        graph = torch.cuda.CUDAGraph()
        with group.on(rank):
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                member.all_reduce(vectors[rank])
        graphs.append(graph)
    group.close()
    for rank, graph in enumerate(graphs):
        with group.on(rank):
            graph.replay()
    group.synchronise()
    assert all(bool((each.view(torch.uint8) == 0xFF).all()) for each in vectors)


def test_replays_with_delays_give_right_sums(kind: str) -> None:
    from tests.gpu import collective_replays as replays

    ranks, count = (3, 3) if kind == "twin" else (2, 500)
    outcome = replays.play(ranks, count, 4, kind)
    assert not replays.failed(outcome), outcome
