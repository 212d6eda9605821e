"""Device collectives beside a reference on the CPU, bit by bit; their refusals and failures."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from gpu.collective_calls import Call
    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

SKEW_SECONDS, GRACE_SECONDS = 1.0, 4.0


def calls_of(seed: int, ranks: int, count: int, *, allocate: bool) -> list[Call]:
    from gpu.collective_calls import draw_call

    chance = np.random.default_rng(seed)
    return [draw_call(chance, ranks, allocate) for _ in range(count)]


def ranks_of(kind: str, seed: int) -> int:
    """Ranks of a group: on GPUs one for each, or two that share one."""
    import torch

    if kind == "twin":
        return (2, 3, 4, 1, 5)[seed % 5]
    return max(2, int(torch.cuda.device_count()))


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_after_each_other_give_the_bits_of_the_reference(kind: str, seed: int) -> None:
    from gpu.collective_calls import Group

    ranks = ranks_of(kind, seed)
    group = Group(kind, ranks)
    # An allocation between launches could wait for kernels of a rank on the same GPU.
    group.verify(calls_of(seed, ranks, 25, allocate=not group.shared), seed)
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_share_gpus_give_the_bits_of_the_reference(ranks: int, seed: int) -> None:
    from gpu.collective_calls import Group

    group = Group("cuda", ranks)
    group.verify(calls_of(100 + seed, ranks, 25, allocate=False), seed)
    group.close()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_every_op_of_every_dtype_gives_the_bits_of_the_reference(kind: str, algorithm: str) -> None:
    from gpu.collective_calls import Call, Group
    from gpu.collective_reference import BITWISE, FLOATS, INTEGERS, OPS

    # Kernels are compiled for each pair: on a GPU a part of them.
    pairs = [(op, dtype) for dtype in (*INTEGERS, *FLOATS) for op in OPS]
    pairs += [(op, dtype) for dtype in INTEGERS for op in BITWISE]
    if kind == "cuda":
        chance = random.Random(1)
        pairs = [*chance.sample(pairs, 12), ("sum", "bfloat16"), ("avg", "float32")]
    group = Group(kind, 3 if kind == "twin" else ranks_of(kind, 0))
    options = {"algorithm": algorithm}
    calls = [
        Call("all_reduce", dtype, op, rows=37, row=(5,), options=dict(options))
        for op, dtype in pairs
    ]
    group.verify(calls, 5)
    group.close()


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_long_vectors_give_the_bits_of_the_reference(kind: str, name: str) -> None:
    from gpu.collective_calls import Call, Group

    ranks = 3 if kind == "twin" else ranks_of(kind, 0)
    group = Group(kind, ranks)
    rows = 40_000 if kind == "twin" else 1_000_000
    calls = [
        Call(name, "bfloat16", "sum", rows=rows + odd, row=(7,), mode=mode, offset=odd)
        for odd, mode in [(0, "out"), (1, "in place"), (8, "in place")]
    ]
    tiny = [Call("all_reduce", "bfloat16", rows=1, row=(3,)), Call("broadcast", rows=0)]
    group.verify([calls[0], *tiny, calls[1], *tiny, calls[2]], 6)
    group.close()


def test_algorithms_and_runs_give_the_same_bits_on_all_ranks(kind: str) -> None:
    import torch

    from gpu.collective_calls import Group

    group = Group(kind, ranks_of(kind, 1))
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(len(group.members), 1111, generator=generator).half() * 300
    given = [[row.to(m.device)] * 4 for row, m in zip(values, group.members, strict=True)]
    outs = [[torch.empty_like(each) for each in row] for row in given]
    for member in group.members:
        member.prepare("sum", torch.float16)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        ways: list[dict[str, Any]] = [
            {},
            {"algorithm": "one_shot"},
            {"algorithm": "two_shot"},
            {"algorithm": "two_shot", "num_sms": 1},
        ]
        for tensor, out, way in zip(given[rank], outs[rank], ways, strict=True):
            assert member.all_reduce(tensor, out=out, **way) is out

    group.run(work)
    first = outs[0][0].cpu()
    assert all(torch.equal(out.cpu(), first) for row in outs for out in row)
    assert group.raised() == [""] * len(group.members)
    group.close()


@pytest.mark.parametrize("seed", range(4))
def test_calls_on_a_stream_of_their_own_give_the_same_bits(kind: str, seed: int) -> None:
    from gpu.collective_calls import Group

    ranks = ranks_of(kind, seed)
    group = Group(kind, ranks)
    group.verify(calls_of(50 + seed, ranks, 12, allocate=False), seed, async_finish=True)
    group.close()


def test_calls_on_two_streams_come_in_their_order(kind: str) -> None:
    import torch

    from gpu.collective_calls import Group

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

    from gpu.collective_calls import Group

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

    from gpu.collective_calls import Call, Group
    from gpu.collective_reference import to_bytes

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

    from gpu.collective_calls import Group

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

    from gpu.collective_calls import Group

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


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_rank_that_does_not_call_is_named_in_time(kind: str, algorithm: str) -> None:
    import torch

    import weft
    from gpu.collective_calls import Group

    group = Group(kind, 3, skew_timeout=SKEW_SECONDS)
    vectors = [torch.zeros(3000, device=each.device) for each in group.members]
    later = [torch.zeros(10, device=each.device) for each in group.members]
    for member in group.members:
        member.prepare("sum", torch.float32)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        if rank == 2:
            return
        # A twin waits within the call, and raises there as well.
        with contextlib.suppress(weft.WeftError):
            member.all_reduce(vectors[rank], algorithm=algorithm)  # type: ignore[call-overload]

    began = time.monotonic()
    group.run(work)
    errors = []
    for rank in (0, 1):
        with pytest.raises(weft.WeftError) as raised:
            group.members[rank].check()
        errors.append(raised.value)
    took = time.monotonic() - began
    assert SKEW_SECONDS * 0.9 < took < SKEW_SECONDS + GRACE_SECONDS
    waited = [each for each in errors if isinstance(each, weft.errors.WaitTimeoutError)]
    assert waited, errors
    for each in waited:
        assert 2 in {each.rank} | {peer for peer, *_ in each.missing}, each
    for error in errors:
        assert error in waited or isinstance(error, weft.errors.GroupPoisonedError), error
        assert "rank 2" in str(error), error
    for vector in vectors[:2]:
        assert bool((vector.view(torch.uint8) == 0xFF).all())
    # Later calls raise, or leave no numbers, without another wait.
    began = time.monotonic()
    with group.on(0):
        try:
            group.members[0].all_reduce(later[0])
        except weft.WeftError as error:
            assert "rank 2" in str(error)  # noqa: PT017
        else:
            group.synchronise()
            assert bool((later[0].view(torch.uint8) == 0xFF).all())
    assert time.monotonic() - began < SKEW_SECONDS
    with pytest.raises(weft.WeftError):
        weft.check()
    group.close()


def refusals() -> list[tuple[str, str, Callable[[Any, Any], object]]]:
    """Class and text of an error, and the call of rank 0 of 2 that raises it."""
    import torch

    f32 = torch.float32

    def rows(m: Any, count: int = 4, dtype: Any = f32) -> Any:
        return torch.zeros(count, 3, dtype=dtype, device=m.device)

    def uneven(m: Any, given: Any, sent: Any, received: Any, **more: Any) -> Any:
        return m.all_to_all(given, input_splits=sent, output_splits=received, **more)

    def shifted(m: Any, name: str, given: slice, out: slice) -> Any:
        whole = rows(m, 8)
        return getattr(m, name)(whole[given], out=whole[out])

    return [
        ("ShapeError", "tensor is a list, not a torch tensor", lambda m, t: m.all_reduce([1])),
        ("ShapeError", "tensor is on meta: expected ", lambda m, t: m.all_reduce(t.to("meta"))),
        ("ShapeError", "out is on meta: ", lambda m, t: m.all_gather(t, out=t.to("meta"))),
        ("ShapeError", r"pass tensor\.contiguous\(\)", lambda m, t: m.all_reduce(t.t())),
        ("ShapeError", r"pass tensor\.contiguous\(\)", lambda m, t: m.broadcast(t[:, :2])),
        ("ShapeError", r"pass tensor\.to_dense\(\)", lambda m, t: m.all_reduce(t.to_sparse())),
        (
            "ShapeError",
            "lazy conjugate",
            lambda m, t: m.broadcast(torch.zeros(3, dtype=torch.complex64, device=m.device).conj()),
        ),
        (
            "ConfigurationError",
            "op 'mean': expected one of sum, avg",
            lambda m, t: m.all_reduce(t, "mean"),
        ),
        (
            "ConfigurationError",
            "xor of float32: expected bool or",
            lambda m, t: m.all_reduce(t, "xor"),
        ),
        ("ConfigurationError", "band of bfloat16", lambda m, t: m.reduce(t.bfloat16(), 0, "band")),
        (
            "ShapeError",
            "sum of complex64: expected one of bool, ",
            lambda m, t: m.all_reduce(t + 0j),
        ),
        (
            "ShapeError",
            "sum of float8_e4m3fn: .*; cast the tensor",
            lambda m, t: m.reduce_scatter(t.to(torch.float8_e4m3fn)),
        ),
        ("ConfigurationError", "op 'mean'", lambda m, t: m.prepare("mean", f32)),
        (
            "ShapeError",
            r"out has shape \(2, 3\); \(4, 3\) is needed",
            lambda m, t: m.all_reduce(t, out=rows(m, 2)),
        ),
        (
            "ShapeError",
            "out is of dtype torch.float64; torch.float32",
            lambda m, t: m.all_reduce(t, out=t.double()),
        ),
        (
            "ShapeError",
            r"out has shape \(4, 3\); \(8, 3\) is needed",
            lambda m, t: m.all_gather(t, out=rows(m)),
        ),
        (
            "ShapeError",
            r"out has shape \(4, 3\); \(2, 3\) is needed",
            lambda m, t: m.reduce_scatter(t, out=rows(m)),
        ),
        (
            "ShapeError",
            "3 rows: expected a multiple of 2 ranks",
            lambda m, t: m.reduce_scatter(rows(m, 3)),
        ),
        ("ShapeError", "3 rows: .*pass input_splits", lambda m, t: m.all_to_all(rows(m, 3))),
        (
            "ShapeError",
            r"a scalar: .*pass tensor\.view\(1\)",
            lambda m, t: m.all_gather(t[0, 0].clone()),
        ),
        ("ShapeError", "out is a scalar", lambda m, t: m.scatter(t, out=t[0, 0].clone())),
        (
            "ShapeError",
            "out overlaps the input: .*, or the input itself",
            lambda m, t: shifted(m, "all_reduce", slice(0, 4), slice(2, 6)),
        ),
        (
            "ShapeError",
            "or rows 0 to 2 of the input",
            lambda m, t: shifted(m, "reduce_scatter", slice(0, 4), slice(1, 3)),
        ),
        (
            "ShapeError",
            "or rows 0 to 4 of out as the input",
            lambda m, t: shifted(m, "all_gather", slice(4, 8), slice(0, 8)),
        ),
        ("ShapeError", "pass memory of its own$", lambda m, t: m.all_to_all(t, out=t)),
        ("UnknownError", "root is 2: expected a rank from 0 to 1", lambda m, t: m.broadcast(t, 2)),
        ("UnknownError", "root is -1", lambda m, t: m.reduce(t, -1)),
        ("UnknownError", "root is 7", lambda m, t: m.gather(t, 7)),
        ("UnknownError", "root is 7", lambda m, t: m.scatter(t, 7, out=t)),
        (
            "ConfigurationError",
            "out is given on rank 0: the root, rank 1,",
            lambda m, t: m.gather(t, 1, out=t),
        ),
        ("ConfigurationError", "out is given on rank 0", lambda m, t: m.reduce(t, 1, out=t)),
        (
            "ConfigurationError",
            "tensor is not given on rank 0",
            lambda m, t: m.scatter(None, out=t),
        ),
        (
            "ConfigurationError",
            "tensor is given on rank 0: .* other ranks pass None",
            lambda m, t: m.scatter(t, 1, out=t),
        ),
        (
            "ConfigurationError",
            "input_splits without output_splits",
            lambda m, t: m.all_to_all(t, input_splits=[2, 2]),
        ),
        (
            "ConfigurationError",
            "output_splits without input_splits",
            lambda m, t: m.all_to_all(t, output_splits=[2, 2]),
        ),
        ("ShapeError", "sum 5, expected the 4 rows", lambda m, t: uneven(m, t, [2, 3], [2, 2])),
        (
            "ShapeError",
            "has 1 numbers: expected one for each of 2 ranks",
            lambda m, t: uneven(m, t, [4], [2, 2]),
        ),
        (
            "ShapeError",
            "expected numbers of rows from 0 on",
            lambda m, t: uneven(m, t, [-1, 5], [2, 2]),
        ),
        (
            "ShapeError",
            "sends itself 1 rows and expects 2",
            lambda m, t: uneven(m, t, [1, 3], [2, 2]),
        ),
        (
            "ShapeError",
            r"pass input_splits\.tolist\(\)",
            lambda m, t: uneven(m, t, torch.tensor([2, 2]), [2, 2]),
        ),
        (
            "ConfigurationError",
            "tensor requires a gradient, .*no_grad",
            lambda m, t: m.all_reduce(t.requires_grad_()),
        ),
        (
            "ConfigurationError",
            "algorithm.*ring.*one_shot",
            lambda m, t: m.all_reduce(t, algorithm="ring"),
        ),
        ("WeftError", "num_sms", lambda m, t: m.all_reduce(t, num_sms=0)),
        ("WeftError", "num_sms", lambda m, t: m.all_reduce(t, num_sms=4096)),
        (
            "ConfigurationError",
            "one_shot of .* bytes",
            lambda m, t: m.all_reduce(rows(m, 1_000_000), algorithm="one_shot"),
        ),
        (
            "ConfigurationError",
            "one_shot",
            lambda m, t: uneven(m, t, [2, 2], [2, 2], algorithm="one_shot"),
        ),
        (
            "ConfigurationError",
            "previous_event is a int",
            lambda m, t: m.all_reduce(t, previous_event=3),
        ),
    ]


def test_what_does_not_fit_is_refused_before_any_launch(kind: str) -> None:
    import torch

    import weft
    from gpu.collective_calls import Group

    group = Group(kind, 2, skew_timeout=5.0)
    member = group.members[0]
    for name, text, call in refusals():
        kind_of = weft.WeftError if name == "WeftError" else getattr(weft.errors, name)
        with pytest.raises(kind_of, match=text):
            call(member, torch.zeros(4, 3, device=member.device))
    # No epoch was lost.
    for each in group.members:
        each.prepare("sum", torch.float32)
    vectors = [torch.full((4,), 1.0, device=each.device) for each in group.members]
    group.synchronise()
    group.run(lambda rank, member: member.all_reduce(vectors[rank]))
    assert [each.tolist() for each in vectors] == [[2.0] * 4] * 2
    assert group.raised() == ["", ""]
    group.close()
    for each in group.members:
        with pytest.raises(weft.errors.ClosedError):
            each.all_reduce(vectors[0])
        with pytest.raises(weft.errors.ClosedError):
            each.check()
        each.close()


def test_arguments_of_groups_are_checked() -> None:
    import torch

    import weft
    from weft import cuda

    def refused(text: str, ranks: int = 1, devices: Any = ("twin",), **options: Any) -> None:
        with pytest.raises(weft.WeftError, match=text):
            cuda.local_collectives(ranks, devices, **options)

    refused("1 devices are given for 2 ranks", 2)
    refused("world_size is 0", 0, ())
    refused("'cuda:1' or 'twin'", devices=["mps"])
    refused("skew_timeout nan", skew_timeout=float("nan"))
    refused("num_sms", num_sms=0)
    refused("memory", memory="tape")
    if not torch.cuda.is_available():
        refused("no GPU here", devices=["cuda:0"])
    with pytest.raises(TypeError, match=r"communicator: expected weft\.Communicator, got int"):
        cuda.Collectives(3, device="twin")  # type: ignore[arg-type]


def test_autograd_notices_a_tensor_that_a_call_has_changed() -> None:
    import torch

    from weft.cuda import local_collectives

    (member,) = local_collectives(1, ["twin"])
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    member.all_reduce(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        assert member.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
    member.close()


def test_one_rank_over_a_communicator_copies() -> None:
    import torch

    import weft
    from weft import cuda

    with weft.init(rank=0, world_size=1) as communicator:
        with cuda.Collectives(communicator, device="twin", watchdog=True) as alone:
            assert (alone.rank, alone.world_size, alone.device) == (0, 1, torch.device("cpu"))
            assert alone.num_sms > 0
            assert alone.memory_bytes > 0
            rows = torch.arange(12.0).view(4, 3)
            for result in (
                alone.all_reduce(rows.clone()),
                alone.reduce_scatter(rows, "avg"),
                alone.reduce(rows.clone(), op="max"),
                alone.all_gather(rows),
                alone.all_to_all(rows),
                alone.all_to_all(rows, input_splits=[4], output_splits=[4]),
                alone.broadcast(rows.clone()),
                alone.gather(rows),
                alone.scatter(rows, out=torch.zeros(4, 3)),
            ):
                assert result is not None
                assert torch.equal(result, rows)
            assert alone.barrier() is None
            assert alone.barrier(async_finish=True).query()
            weft.check()
        left = cuda.Collectives(communicator, device="twin")
    # The communicator closed it.
    with pytest.raises(weft.errors.ClosedError):
        left.barrier()


def test_compiled_code_calls_between_its_graphs() -> None:
    import torch

    from weft.cuda import local_collectives

    (member,) = local_collectives(1, ["twin"])

    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        return member.all_reduce(doubled) + 1

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(torch.ones(5)), torch.full((5,), 3.0))
    member.close()


@pytest.mark.parametrize("how", ["right", "kill"])
@pytest.mark.parametrize(
    ("device", "memory"),
    [
        ("twin", "fd"),
        pytest.param("cuda", "fd", marks=pytest.mark.gpu),
        pytest.param("cuda", "ipc", marks=pytest.mark.gpu),
    ],
)
def test_processes_get_the_same_bits_and_survive_a_loss(device: Any, memory: Any, how: Any) -> None:
    from gpu import collective_processes as processes

    ranks = 3 if device == "twin" else 2
    outcome = processes.play(processes.Spec(device, ranks, memory, how))
    assert "failed" not in outcome, outcome


def test_refused_calls_name_the_argument_and_leave_the_output_alone() -> None:
    import torch

    from weft import cuda
    from weft.errors import ConfigurationError, ShapeError

    for wrong in (-1, 0, 1 << 40):
        with pytest.raises(ConfigurationError, match=f"num_sms is {wrong}"):
            cuda.local_collectives(2, ["twin"] * 2, num_sms=wrong)
    member, other = cuda.local_collectives(2, ["twin"] * 2)
    with pytest.raises(ConfigurationError, match="num_sms of a call is 99: expected at most"):
        member.all_reduce(torch.ones(4), num_sms=99)
    memory = bytearray(33)
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=4)
    with pytest.raises(ShapeError, match="not a multiple of its element"):
        member.all_reduce(odd)
    out = torch.ones(4)
    version = out._version
    with pytest.raises(ShapeError, match="overlaps"):
        member.all_to_all(out, out=out)
    assert out._version == version
    member.close()
    other.close()
