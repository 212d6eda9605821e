"""Direct collectives on tensors in symmetric memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def test_calls_that_repeat_on_changing_inputs_have_the_results_of_each(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2 if kind == "cuda" else 3)
    ranks = len(group.members)
    inputs = cuda.local_symmetric_empty(group.members, 4096, torch.int32)
    sums = cuda.local_symmetric_empty(group.members, 4096, torch.int32)
    every = cuda.local_symmetric_empty(group.members, (ranks * 4096,), torch.int32)
    for member in group.members:
        member.prepare("sum", torch.int32)
    group.synchronise()
    kept = [
        [(torch.empty_like(sums[rank]), torch.empty_like(every[rank])) for _ in range(12)]
        for rank in group.ranks
    ]

    def work(rank: int, member: cuda.Collectives) -> None:
        for step in range(12):
            # Peers may still read the last values if their kernels have not ended.
            inputs[rank].fill_(1000 * step + rank)
            member.all_reduce(inputs[rank], out=sums[rank], algorithm="direct")
            member.all_gather(inputs[rank], out=every[rank], algorithm="direct")
            for copy, tensor in zip(kept[rank][step], (sums[rank], every[rank]), strict=True):
                copy.copy_(tensor)

    group.run(work)
    for rank in group.ranks:
        for step, (total, gathered) in enumerate(kept[rank]):
            values = [1000 * step + each for each in group.ranks]
            assert total.unique().tolist() == [sum(values)]
            assert gathered.view(ranks, -1).tolist() == [[each] * 4096 for each in values]
    assert group.raised() == [""] * ranks
    group.close()


def test_long_calls_of_symmetric_tensors_are_direct_by_default() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("twin", 2)
    tensors = cuda.local_symmetric_empty(group.members, 1 << 20, torch.float32)
    views = [tensor[16:] for tensor in tensors]
    place: Callable[[int], int] = lambda rank: 0 if rank == 0 else 4  # noqa: E731
    # Only direct calls compare places.
    errors = differing(group, lambda rank, m: m.all_reduce(views[rank][place(rank) :][:900_000]))
    assert all("different direct calls" in text for text in errors), errors
    group.close()


@pytest.mark.parametrize("what", ["place", "count", "dtype", "op", "num_sms", "allocation"])
def test_direct_calls_that_differ_between_ranks_raise_on_all(kind: str, what: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2)
    tensors = cuda.local_symmetric_empty(group.members, 4096, torch.float32)
    others = cuda.local_symmetric_empty(group.members, 4096, torch.float32)
    for member in group.members:
        for op, dtype in (("sum", torch.float32), ("max", torch.float32), ("sum", torch.int32)):
            member.prepare(op, dtype)
    before = [tensor.fill_(rank + 1) for rank, tensor in enumerate(tensors)]
    group.synchronise()

    def call(rank: int, member: Any) -> None:
        tensor, op, options = tensors[rank][:2048], "sum", {"algorithm": "direct"}
        if rank == 1 and what == "place":
            tensor = tensors[rank][4:2052]
        elif rank == 1 and what == "count":
            tensor = tensors[rank][:2044]
        elif rank == 1 and what == "dtype":
            tensor = tensor.view(torch.int32)
        elif rank == 1 and what == "allocation":
            tensor = others[rank][:2048]
        elif rank == 1 and what == "op":
            op = "max"
        elif rank == 1:
            options["num_sms"] = 1  # type: ignore[assignment]
        member.all_reduce(tensor, op, **options)

    errors = differing(group, call)
    assert any("different direct calls" in text for text in errors), errors
    assert all("rank " in text for text in errors), errors
    # What a call does not own is as before.
    for rank, tensor in enumerate(before):
        assert tensor[2060:].unique().tolist() == [rank + 1]
    group.close()


def differing(group: Any, call: Callable[[int, Any], Any]) -> list[str]:
    """Errors on all ranks after a call."""
    import weft

    def work(rank: int, member: Any) -> None:
        # A twin raises within the call.
        with contextlib.suppress(weft.WeftError):
            call(rank, member)

    group.run(work)
    errors: list[str] = group.raised()
    return errors


def test_what_is_not_symmetric_is_refused_by_name() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda
    from weft.errors import ConfigurationError

    group = Group("twin", 2)
    member = group.members[0]
    (tensor, _) = cuda.local_symmetric_empty(group.members, (2, 8), torch.float32)
    plain = torch.zeros(2, 8)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("input and output", lambda: member.all_reduce(plain, algorithm="direct")),
        ("input and output", lambda: member.all_reduce(tensor, out=plain, algorithm="direct")),
        ("the input", lambda: member.reduce_scatter(plain, algorithm="direct")),
        ("the output", lambda: member.all_gather(tensor, algorithm="direct")),
        ("no direct form", lambda: member.gather(tensor, algorithm="direct")),
    ]
    for text, call in cases:
        with pytest.raises(ConfigurationError, match=f"direct .*: .*{text}"):
            call()
    with pytest.raises(ConfigurationError, match=r"use weft\.cuda\.local_symmetric_empty"):
        member.symmetric_empty(3)
    with pytest.raises(ConfigurationError, match="all ranks of local_collectives"):
        cuda.local_symmetric_empty(group.members[:1], 3)
    other = Group("twin", 2)
    with pytest.raises(ConfigurationError, match="all ranks of local_collectives"):
        cuda.local_symmetric_empty([group.members[0], other.members[1]], 3)
    other.close()
    with pytest.raises(ConfigurationError, match="sizes from 0 on"):
        cuda.local_symmetric_empty(group.members, -1)
    group.close()


def test_symmetric_memory_outlives_the_group() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("twin", 2)
    tensors = cuda.local_symmetric_empty(group.members, 100, torch.int64)
    assert [tensor.tolist() for tensor in tensors] == [[0] * 100] * 2
    group.close()
    tensors[0].fill_(7)
    assert tensors[1].unique().tolist() == [0]


@pytest.mark.gpu
def test_replays_of_a_graph_with_jitter_give_the_bits_of_the_reference() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("cuda", 2)
    lengths = (1, 700, 40_000, 3_000_000)
    tensors = cuda.local_symmetric_empty(group.members, sum(lengths) + 64, torch.int32)
    sums = [torch.zeros(2, dtype=torch.int64, device=each.device) for each in group.members]
    for member in group.members:
        member.prepare("sum", torch.int32)
    graphs = []
    for rank, member in enumerate(group.members):
        with group.on(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                begin = 0
                for number, length in enumerate(lengths):
                    part = tensors[rank][begin : begin + length]
                    begin += -(-length // 4) * 4
                    part.add_(rank + number)
                    algorithm = ("one_shot", "two_shot", "direct", "direct")[number]
                    member.all_reduce(part, algorithm=algorithm)  # type: ignore[call-overload]
                    part.remainder_(1009)
                    sums[rank][0] += part.sum()
            graphs.append(graph)
    group.synchronise()
    chance = torch.Generator().manual_seed(5)
    for _ in range(1000):
        for rank in torch.randperm(2, generator=chance).tolist():
            with group.on(rank):
                if float(torch.rand((), generator=chance)) < 0.1:
                    torch.cuda._sleep(int(torch.randint(1, 40_000, (), generator=chance)))
                graphs[rank].replay()
    group.synchronise()
    assert group.raised() == ["", ""]
    expected = 0
    values = [0] * len(lengths)
    for _ in range(1000):
        for number, length in enumerate(lengths):
            values[number] = (2 * values[number] + 1 + 2 * number) % 1009
            expected += values[number] * length
    assert [int(each[0]) for each in sums] == [expected] * 2
    group.close()
