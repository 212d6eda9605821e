"""Send, receive and batches beside the tensors that were sent, bit by bit."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

SKEW_SECONDS, GRACE_SECONDS = 1.0, 4.0


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_after_each_other_arrive_whole(kind: str, seed: int) -> None:
    import torch

    from tests.gpu.collective_calls import Group, ranks_of
    from tests.gpu.collective_messages import drawn

    torch.manual_seed(seed)
    chance = random.Random(seed)
    group = Group(kind, max(2, ranks_of(kind, seed)))
    rounds = [drawn(group.members, chance, 100_000) for _ in range(12)]
    ones = [torch.ones(5, device=each.device) for each in group.members]
    for member in group.members:
        member.prepare("sum", torch.float32)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for step, messages in enumerate(rounds):
            member.batch([part for each in messages for part in each.at(rank)])
            if step % 4 == 1:
                member.all_reduce(ones[rank])

    group.run(work)
    assert group.raised() == [""] * len(group.members)
    for each in (each for messages in rounds for each in messages):
        each.check()
    assert all(one.tolist() == [len(group.members) ** 3] * 5 for one in ones)
    group.close()


def test_long_messages_in_all_directions_share_a_kernel(kind: str) -> None:
    from tests.gpu.collective_calls import Group, ranks_of
    from tests.gpu.collective_messages import message

    group = Group(kind, 3 if kind == "twin" else ranks_of(kind, 0))
    ranks, count = len(group.members), 700_001 if kind == "twin" else 20_000_003
    messages = [
        message(group.members, source, (source + step) % ranks, count, offsets=(source % 2, 0))
        for source in range(ranks)
        for step in range(1, ranks)
    ]
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for _ in range(2):
            member.batch([part for each in messages for part in each.at(rank)])

    group.run(work)
    for each in messages:
        each.check()
    group.close()


def test_a_pipeline_of_ranks_needs_no_batch(kind: str) -> None:
    import torch

    from tests.gpu.collective_calls import Group, ranks_of

    group = Group(kind, ranks_of(kind, 2))
    last, steps = len(group.members) - 1, 40
    lengths = [random.Random(step).randrange(60_000) for step in range(steps)]
    values = [
        [
            torch.full((length,), float(step), device=each.device)
            for step, length in enumerate(lengths)
        ]
        for each in group.members
    ]
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        for value in values[rank]:
            if rank > 0:
                assert member.recv(value, rank - 1) is value
                value += 1
            if rank < last:
                member.send(value, rank + 1)

    group.run(work)
    assert group.raised() == [""] * len(group.members)
    for step, value in enumerate(values[last]):
        assert torch.equal(value.cpu(), torch.full((lengths[step],), float(step + last)))
    group.close()


def test_a_batch_may_run_on_the_communication_stream(kind: str) -> None:
    from tests.gpu.collective_calls import Group
    from tests.gpu.collective_messages import message
    from weft import cuda

    group = Group(kind, 2)
    there = message(group.members, 0, 1, 300_000)
    back = message(group.members, 1, 0, 300_000)
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        ours, theirs = (there, back) if rank == 0 else (back, there)
        batch: list[cuda.Send | cuda.Receive] = [
            cuda.Send(ours.given, 1 - rank),
            cuda.Receive(theirs.into, 1 - rank),
        ]
        event = member.batch(batch, async_finish=True)
        assert event is not None
        event.wait()
        assert member.batch([], async_finish=True) is None

    group.run(work)
    there.check()
    back.check()
    group.close()


def test_arguments_that_do_not_fit_are_named_before_any_launch(kind: str) -> None:
    import torch

    import weft
    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 2)
    member = group.members[0]
    tensor = torch.zeros(8, device=member.device)
    weights = torch.zeros(8, device=member.device, requires_grad=True)
    pairs: Any = [(tensor, 1)]
    cases: list[tuple[type[Exception], str, Any]] = [
        (weft.errors.UnknownError, "peer is 0: expected a rank", lambda: member.send(tensor, 0)),
        (weft.errors.UnknownError, "peer is 2: expected a rank", lambda: member.recv(tensor, 2)),
        (weft.errors.ShapeError, "not contiguous", lambda: member.send(tensor[::2], 1)),
        (weft.errors.ConfigurationError, "requires a gradient", lambda: member.recv(weights, 1)),
        (
            weft.errors.ShapeError,
            "the tensor of a receive overlaps another one",
            lambda: member.batch([cuda.Send(tensor[:5], 1), cuda.Receive(tensor[4:], 1)]),
        ),
        (
            weft.errors.ConfigurationError,
            "the number of sends and receives of a batch is 129: expected at most 128",
            lambda: member.batch([cuda.Send(tensor, 1)] * 129),
        ),
        (
            weft.errors.ConfigurationError,
            "messages contain Tensor: expected weft.cuda.Send",
            lambda: member.batch([tensor]),
        ),
        (
            weft.errors.ConfigurationError,
            "messages contain tuple: expected weft.cuda.Send",
            lambda: member.batch(pairs, async_finish=True),
        ),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    group.close()
    with pytest.raises(weft.errors.ClosedError):
        member.batch([])


def failures(group: Any, work: Any) -> tuple[list[str], float]:
    """Errors on all ranks after calls that fail, and the seconds until then."""
    import weft

    def one(rank: int, member: cuda.Collectives) -> None:
        # A twin waits within the call, and raises there as well.
        with contextlib.suppress(weft.WeftError):
            work(rank, member)

    began = time.monotonic()
    group.run(one)
    return group.raised(), time.monotonic() - began


def poisoned(tensor: torch.Tensor) -> bool:
    import torch

    return bool((tensor.view(torch.uint8) == 0xFF).all())


def test_a_rank_that_does_not_send_is_named_in_time(kind: str) -> None:
    from tests.gpu.collective_calls import Group
    from tests.gpu.collective_messages import message

    group = Group(kind, 2, skew_timeout=SKEW_SECONDS)
    missing = message(group.members, 1, 0, 50_000)
    group.synchronise()
    errors, took = failures(
        group, lambda rank, member: member.recv(missing.into, 1) if rank == 0 else None
    )
    assert SKEW_SECONDS * 0.9 < took < SKEW_SECONDS + GRACE_SECONDS
    for part in ("rank 1", "receive"):
        assert part in errors[0], errors
    assert "rank 0 recv number 1 of 200000 uint8" in errors[0]
    assert poisoned(missing.into)


def test_long_sends_towards_each_other_end_by_the_timeout(kind: str) -> None:
    from tests.gpu.collective_calls import Group
    from tests.gpu.collective_messages import message

    group = Group(kind, 2, skew_timeout=SKEW_SECONDS)
    there, back = (message(group.members, rank, 1 - rank, 4_000_000) for rank in (0, 1))
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        ours, theirs = (there, back) if rank == 0 else (back, there)
        member.send(ours.given, 1 - rank)
        member.recv(theirs.into, 1 - rank)

    errors, took = failures(group, work)
    assert took < SKEW_SECONDS + GRACE_SECONDS
    # The rank whose wait ends first ends the other one's.
    assert any("send" in each for each in errors), errors
    assert all(errors), errors


def test_messages_of_other_lengths_are_an_error_of_the_receiver(kind: str) -> None:
    from tests.gpu.collective_calls import Group
    from tests.gpu.collective_messages import message

    group = Group(kind, 2, skew_timeout=SKEW_SECONDS)
    short, long = (message(group.members, 0, 1, count) for count in (7, 5000))
    group.synchronise()

    def work(rank: int, member: cuda.Collectives) -> None:
        if rank == 0:
            member.send(short.given, 1)
        else:
            member.recv(long.into, 0)

    errors, _ = failures(group, work)
    assert "rank 1 receives 20000 bytes from rank 0, which sends 28" in errors[1], errors
    assert poisoned(long.into)


@pytest.mark.gpu
def test_a_captured_batch_is_replayed(own_context: None) -> None:
    import torch

    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group("cuda", 2)
    tensors = [
        [torch.zeros(200_000, device=each.device) for _ in range(2)] for each in group.members
    ]
    group.synchronise()
    graphs = []
    for rank, member in enumerate(group.members):
        ours, theirs = tensors[rank]
        with group.on(rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                ours += 1
                member.batch([cuda.Send(ours, 1 - rank), cuda.Receive(theirs, 1 - rank)])
            graphs.append(graph)
    for replay in range(1, 6):

        def work(rank: int, member: cuda.Collectives) -> None:
            graphs[rank].replay()

        group.run(work)
        for _, theirs in tensors:
            assert torch.equal(theirs.cpu(), torch.full((200_000,), float(replay)))
    graphs.clear()
    group.close()
