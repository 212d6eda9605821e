"""Collectives by copy engines into outputs in symmetric memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

#: Ranks that share a context could wait for each other's copies in one copy engine queue.
apart = pytest.mark.usefixtures("own_context")

NAMES = ("all_gather", "all_to_all", "broadcast", "scatter")


def random_calls(seed: int, ranks: int, count: int) -> list[Any]:
    """Random calls by copy engines, and calls by kernels between them."""
    import numpy as np

    from tests.gpu.collective_calls import OTHERS, Call
    from tests.gpu.collective_reference import FLOATS, INTEGERS

    random = np.random.default_rng([seed, 7])
    calls = []
    for _ in range(count):
        name = str(random.choice(NAMES))
        call = Call(
            name,
            str(random.choice([*INTEGERS, *FLOATS, *OTHERS])),
            rows=int(random.choice([0, 1, 2, 5, 33, 200, 3000])),
            row=((), (1,), (3,), (8,), (64,), (2, 50))[int(random.integers(6))],
            root=int(random.integers(ranks)),
            mode="in place" if name == "all_gather" and random.random() < 0.5 else "out",
            offset=int(random.choice([0, 0, 1, 3, 8])),
            symmetric=True,
        )
        way = random.random()
        if way < 0.7:
            call.options["copy_engine"] = True
        elif way < 0.9:
            call.options["algorithm"] = str(random.choice(["direct", "two_shot"]))
        calls.append(call)
    return calls


@apart
@pytest.mark.parametrize("seed", range(10))
def test_random_calls_after_each_other_give_the_bits_of_the_reference(kind: str, seed: int) -> None:
    from tests.gpu.collective_calls import Group, ranks_of

    ranks = ranks_of(kind, seed)
    group = Group(kind, ranks)
    group.verify(random_calls(seed, ranks, 25), seed, async_finish=seed % 3 == 2)
    group.close()


@apart
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_long_calls_give_the_bits_of_the_reference(kind: str, name: str) -> None:
    from tests.gpu.collective_calls import Call, Group, ranks_of

    group = Group(kind, 3 if kind == "twin" else ranks_of(kind, 0))
    rows = 40_000 if kind == "twin" else 4_000_000
    modes = ("out", "in place") if name == "all_gather" else ("out",)
    options = {"copy_engine": True}
    calls = [
        Call(name, "bfloat16", rows=rows + 3, row=(), mode=mode, symmetric=True, options=options)
        for mode in modes
    ]
    group.verify(calls, 3)
    group.close()


@apart
def test_calls_that_repeat_on_changing_inputs_have_the_results_of_each(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2 if kind == "cuda" else 3)
    ranks, length = len(group.members), 1 << 16
    every = cuda.local_symmetric_empty(group.members, (ranks * length,), torch.int32)
    exchanged = cuda.local_symmetric_empty(group.members, (ranks * length,), torch.int32)
    inputs = [torch.empty_like(each) for each in every]
    steps = range(12)
    kept = [
        [torch.empty(2, ranks, dtype=torch.int32, device=m.device) for _ in steps]
        for m in group.members
    ]
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for step in steps:
            # The last call's copies must have read the input, and peers' have ended.
            inputs[rank].fill_(1000 * step + rank)
            member.all_gather(inputs[rank][:length], out=every[rank], copy_engine=True)
            member.all_to_all(inputs[rank], out=exchanged[rank], copy_engine=True)
            for to, tensor in zip(kept[rank][step], (every[rank], exchanged[rank]), strict=True):
                parts = tensor.view(ranks, length)
                to.copy_(torch.where(parts.amin(1) == parts.amax(1), parts[:, 0], -1))

    group.run(work)
    for rank in group.ranks:
        for step in steps:
            expected = [1000 * step + each for each in group.ranks]
            assert kept[rank][step].tolist() == [expected] * 2, (rank, step)
    assert group.raised() == [""] * ranks
    group.close()


@apart
def test_calls_by_the_default_of_the_constructor_have_the_results_of_others(kind: str) -> None:
    from tests.gpu.collective_calls import Call, Group

    group = Group(kind, 2, copy_engine=True)
    calls = [
        Call(name, "float32", rows=rows, row=(), symmetric=symmetric, options=options)
        for options in ({}, {"copy_engine": False}, {"num_sms": 1})
        for symmetric in (True, False)
        # Around the shortest message that copy engines take, and for packets.
        for rows in ((1 << 18) - 1, 1 << 18, 100)
        for name in ("all_gather", "all_to_all", "scatter")
    ]
    group.verify(calls, 11)
    group.close()


def failures(group: Any, call: Callable[[int, Any], Any]) -> list[str]:
    """Errors on all ranks after a call."""
    import weft

    def work(rank: int, member: Any) -> None:
        # A twin raises within the call.
        with contextlib.suppress(weft.WeftError):
            call(rank, member)

    group.run(work)
    errors: list[str] = group.raised()
    return errors


@apart
@pytest.mark.parametrize("what", ["place", "count", "algorithm"])
def test_calls_that_differ_between_ranks_raise_on_all(kind: str, what: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2)
    outs = cuda.local_symmetric_empty(group.members, 4096, torch.float32)
    inputs = [torch.zeros(1024, device=each.device) for each in group.members]
    group.synchronise()

    def call(rank: int, member: Any) -> None:
        given, out, options = inputs[rank], outs[rank][:2048], {"copy_engine": True}
        if rank == 1 and what == "place":
            out = outs[rank][8:2056]
        elif rank == 1 and what == "count":
            given, out = given[:1000], out[:2000]
        elif rank == 1:
            options = {"algorithm": "direct"}  # type: ignore[dict-item]
        member.all_gather(given, out=out, **options)

    errors = failures(group, call)
    assert any("different direct calls" in text for text in errors), errors
    assert all("rank " in text for text in errors), errors
    group.close()


@apart
def test_a_rank_that_does_not_call_is_named_and_later_calls_raise(kind: str) -> None:
    import torch

    import weft
    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2, skew_timeout=1.0)
    outs = cuda.local_symmetric_empty(group.members, 6000, torch.float32)
    inputs = [torch.ones(3000, device=each.device) for each in group.members]
    group.synchronise()

    def call(rank: int, member: cuda.Collectives) -> None:
        if rank == 0:
            member.all_gather(inputs[rank], out=outs[rank], copy_engine=True)

    first, _ = failures(group, call)
    assert first.startswith("WaitTimeoutError"), first
    assert "rank 1" in first, first
    # The failed rank's peers are not in the call: the output has no other writer.
    assert bool((outs[0].view(torch.uint8) == 0xFF).all())
    with pytest.raises(weft.WeftError):
        group.members[0].all_gather(inputs[0], out=outs[0], copy_engine=True)
    if kind == "twin":
        # A twin does not copy behind an entry that failed; copies on a stream run all the same.
        assert outs[1].count_nonzero() == 0
    group.close()


def test_what_copy_engines_do_not_carry_is_refused_by_name() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda
    from weft.errors import ConfigurationError

    group = Group("twin", 2)
    member: Any = group.members[0]
    (out, _) = cuda.local_symmetric_empty(group.members, (4, 8), torch.float32)
    plain = torch.zeros(4, 8)
    splits = {"input_splits": [2, 2], "output_splits": [2, 2]}
    cases: list[tuple[str, Callable[..., Any]]] = [
        ("all_gather: the output must be", lambda **o: member.all_gather(out[:2], **o)),
        ("all_gather: the output must", lambda **o: member.all_gather(out[:2], out=plain, **o)),
        ("all_to_all: the output must", lambda **o: member.all_to_all(out, out=plain, **o)),
        ("broadcast: the output must", lambda **o: member.broadcast(plain, **o)),
        ("scatter: the output must", lambda **o: member.scatter(out, out=plain[:2], **o)),
        ("all_to_all: no form", lambda **o: member.all_to_all(plain, out=out, **splits, **o)),
    ]
    for text, call in cases:
        with pytest.raises(ConfigurationError, match=f"copy_engine of {text}.*omit copy_engine"):
            call(copy_engine=True)
    with pytest.raises(ConfigurationError, match=r"copy_engine with algorithm .direct.: omit"):
        member.all_gather(out[:2], copy_engine=True, algorithm="direct")
    with pytest.raises(ConfigurationError, match=r"algorithm is .copy_engine"):
        member.all_gather(out[:2], algorithm="copy_engine")
    with pytest.raises(TypeError):
        member.all_reduce(out, copy_engine=True)
    group.close()


@apart
@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 3_000_000])
def test_replays_of_a_graph_with_jitter_have_the_results_of_each(length: int) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("cuda", 2)
    every = cuda.local_symmetric_empty(group.members, 2 * length, torch.int32)
    exchanged = cuda.local_symmetric_empty(group.members, 2 * length, torch.int32)
    inputs = [torch.zeros(2 * length, dtype=torch.int32, device=m.device) for m in group.members]
    wrong = [torch.zeros(1, dtype=torch.int64, device=m.device) for m in group.members]
    for member in group.members:
        member.prepare("sum", torch.int32)
    graphs = []
    for rank, member in enumerate(group.members):
        with group.on(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                for _ in range(2):
                    inputs[rank].add_(1 + rank)
                    member.all_gather(inputs[rank][:length], out=every[rank], copy_engine=True)
                    member.all_to_all(inputs[rank], out=exchanged[rank], copy_engine=True)
                    # Rank 1 has twice rank 0's value.
                    value = inputs[rank][:1] if rank == 0 else inputs[rank][:1] // 2
                    for out in (every[rank], exchanged[rank]):
                        wrong[rank] += (out[:length] != value).sum()
                        wrong[rank] += (out[length:] != 2 * value).sum()
                # In place, behind another algorithm's kernel.
                part = every[rank].view(2, -1)[rank]
                member.all_reduce(part[:64].clone(), algorithm="one_shot")
                part.fill_(7 + rank)
                member.all_gather(part, out=every[rank], copy_engine=True)
                wrong[rank] += (every[rank][:length] != 7).sum()
                wrong[rank] += (every[rank][length:] != 8).sum()
            graphs.append(graph)
    group.synchronise()
    chance = torch.Generator().manual_seed(5)
    replays = 300
    for _ in range(replays):
        for rank in torch.randperm(2, generator=chance).tolist():
            with group.on(rank):
                if float(torch.rand((), generator=chance)) < 0.1:
                    torch.cuda._sleep(int(torch.randint(1, 40_000, (), generator=chance)))
                graphs[rank].replay()
    group.synchronise()
    assert group.raised() == ["", ""]
    assert [int(each) for each in wrong] == [0, 0]
    assert [int(each[0]) for each in inputs] == [2 * replays, 4 * replays]
    group.close()


@apart
@pytest.mark.gpu
def test_eager_calls_during_a_capture_are_not_part_of_it() -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("cuda", 2)
    outs = cuda.local_symmetric_empty(group.members, 2 << 20, torch.int32)
    inputs = [torch.ones(1 << 20, dtype=torch.int32, device=m.device) for m in group.members]
    graphs = []
    group.synchronise()
    for rank, member in enumerate(group.members):
        with group.on(rank):
            graph = torch.cuda.CUDAGraph()
            other = torch.cuda.Stream(device=member.device)
            with torch.cuda.graph(
                graph, stream=group.streams[rank], capture_error_mode="thread_local"
            ):
                member.all_gather(inputs[rank], out=outs[rank], copy_engine=True)
                with torch.cuda.stream(other):
                    member.all_gather(inputs[rank], out=outs[rank], copy_engine=True)
            graphs.append(graph)
    group.synchronise()
    assert [int(out.sum()) for out in outs] == [2 << 20] * 2
    for rank in group.ranks:
        outs[rank].zero_()
    group.synchronise()
    for rank, graph in enumerate(graphs):
        with group.on(rank):
            graph.replay()
    group.synchronise()
    assert [int(out.sum()) for out in outs] == [2 << 20] * 2
    assert group.raised() == ["", ""]
    group.close()
