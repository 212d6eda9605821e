"""Errors are reported in time with their rank, poison the affected outputs, and spare the rest."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.gpu.case import Batch, Shape
    from tests.gpu.side import Guarded, Side

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

SKEW_SECONDS = 1.0
#: Additional time until an error, on a shared machine.
GRACE_SECONDS = 3.0


def begun(side: Side, sent: list[Batch]) -> None:
    """Copy all ranks' batches to their devices."""
    for rank, batch in zip(side.ranks, sent, strict=True):
        rank.load(batch)
    side.synchronise()


def group(kind: str, shape: Shape, **more: Any) -> Side:
    from tests.gpu.side import Side

    return Side(shape, kind, **({"skew_timeout": SKEW_SECONDS} | more))


def batches(side: Side, seed: int = 0, routing: str = "uniform") -> list[Batch]:
    """Full batches without a count."""
    from tests.gpu.case import Chance

    chance, shape = Chance(seed), side.shape

    def full() -> Batch:
        while True:
            batch = chance.batch(shape, side.positions, routing)
            if batch.tokens_that_exist == shape.max_tokens:
                return batch

    return [full() for _ in side.ranks]


def outcome(side: Side, rank: int, calls: Iterable[Callable[[], object]]) -> Exception | None:
    """Make calls, wait for the device, and return a call's error or a later check's."""
    import weft

    native = side.ranks[rank].native
    try:
        for call in calls:
            call()
        side.synchronise()
        native.check()
    except weft.WeftError as error:
        side.synchronise()
        return error
    return None


def poisoned(output: Guarded) -> bool:
    """True if every output byte is a failed round's poison."""
    from tests.gpu.case import POISON

    return bool((output.own == POISON).all())


def dispatched(side: Side, rank: int, given: Batch, channel: int = 0) -> list[Callable[[], object]]:
    """Both dispatch halves at a rank."""
    each = side.ranks[rank]
    return [
        lambda: each.native.dispatch_send(each.on, channel, *each.inputs(given)),
        lambda: each.native.dispatch_recv(each.on, channel, *each.receipts()),
    ]


def combined(side: Side, rank: int, given: Batch, channel: int = 0) -> list[Callable[[], object]]:
    """Both combine halves at a rank."""
    each = side.ranks[rank]
    outputs = each.scratch.outputs.data_ptr()
    counted = each.counted(given)
    return [
        lambda: each.native.combine_send(each.on, channel, outputs, False),
        lambda: each.native.combine_recv(each.on, channel, each.combined.address, *counted, False),
    ]


PATHS = ["packets", "latency", "bandwidth"]


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_does_not_dispatch_is_named_in_time(kind: str, path: str) -> None:
    import weft
    from tests.gpu.case import Shape

    side = group(kind, Shape(ranks=3, path=path))
    sent = batches(side)
    begun(side, sent)
    began = time.monotonic()
    for rank in (0, 1):
        dispatched(side, rank, sent[rank])[0]()
    # Both wait concurrently: the twin waits on the calling thread.
    receives = [dispatched(side, rank, sent[rank])[1] for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda receive: receive(), receives))
    errors = [outcome(side, rank, []) for rank in (0, 1)]
    took = time.monotonic() - began
    # The first timeout poisons the group, and the other rank gets the cause.
    waited = [each for each in errors if isinstance(each, weft.errors.WaitTimeoutError)]
    assert waited, errors
    for each in waited:
        assert 2 in {each.rank} | {peer for peer, *_ in each.missing}, each
    for rank, error in enumerate(errors):
        assert error in waited or isinstance(error, weft.errors.GroupPoisonedError), error
        assert "rank 2" in str(error), error
        assert "dispatch" in str(error), error
        got = side.ranks[rank]
        for output in (got.tokens, got.rows, got.weights):
            assert poisoned(output)
        assert not got.counts.own[: got.own_experts].any()
        assert not got.offsets.own[: got.own_experts + 1].any()
    assert SKEW_SECONDS * 0.9 < took < SKEW_SECONDS + GRACE_SECONDS
    # The group is poisoned, and calls raise without another wait.
    began = time.monotonic()
    again = outcome(side, 0, dispatched(side, 0, sent[0], channel=1))
    assert isinstance(again, weft.WeftError)
    assert time.monotonic() - began < SKEW_SECONDS
    side.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_does_not_combine_is_named_in_time(kind: str, path: str) -> None:
    import weft
    from tests.gpu.case import Shape

    side = group(kind, Shape(ranks=2, path=path))
    sent = batches(side)
    begun(side, sent)
    for half in (0, 1):
        for rank in (0, 1):
            dispatched(side, rank, sent[rank])[half]()
    side.synchronise()
    error = outcome(side, 0, combined(side, 0, sent[0]))
    assert isinstance(error, weft.errors.WaitTimeoutError), error
    assert "combine" in str(error), error
    assert "1" in str(error), error
    assert poisoned(side.ranks[0].combined)
    side.close()


def test_calls_out_of_order_are_refused(kind: str) -> None:
    import weft
    from tests.gpu.case import Shape

    shape = Shape(ranks=1)
    side = group(kind, shape)
    [given] = batches(side)
    side.close()
    attempts: list[Callable[[Side], list[Callable[[], object]]]] = [
        lambda side: dispatched(side, 0, given)[1:],
        lambda side: combined(side, 0, given)[:1],
        lambda side: combined(side, 0, given)[1:],
        lambda side: [dispatched(side, 0, given)[0]] * 2,
        lambda side: [*dispatched(side, 0, given), *combined(side, 0, given)[1:]],
    ]
    for number, attempt in enumerate(attempts):
        side = group(kind, shape)
        side.ranks[0].load(given)
        side.synchronise()
        error = outcome(side, 0, attempt(side))
        assert isinstance(error, weft.errors.StageError), (number, error)
        side.close()


@pytest.mark.gpu
def test_two_launches_at_once_on_one_channel_are_noticed() -> None:
    import torch

    import weft
    from tests.gpu.case import Shape

    side = group("cuda", Shape(ranks=2))
    sent = batches(side)
    begun(side, sent)
    each = side.ranks[0]
    other = torch.cuda.Stream(each.device)
    send, receive = dispatched(side, 0, sent[0])
    send()
    receive()
    # Both wait for rank 1 now; neither can detect the other before the next phase.
    each.native.dispatch_recv(other.cuda_stream, 0, *each.receipts())
    for call in dispatched(side, 1, sent[1]):
        call()
    side.synchronise()
    error = outcome(side, 0, combined(side, 0, sent[0])[:1])
    assert isinstance(error, weft.errors.StageError), error
    side.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", ["too large", "named twice"])
def test_wrong_expert_ids_are_told_and_the_group_goes_on(kind: str, path: str, wrong: str) -> None:
    from tests.gpu.case import Shape
    from tests.gpu.compare import differences
    from tests.gpu.reference import Reference

    side = group(kind, Shape(ranks=2, top_k=3, path=path))
    sent = batches(side)
    right = sent[1].ids[3].copy()
    sent[1].ids[3, 1] = side.shape.experts if wrong == "too large" else right[0]
    results = side.run(sent)
    assert [result.error for result in results] == [None, "ExpertError"]
    # Such an id counts as masked.
    sent[1].ids[3, 1] = -1
    for seen, expected in zip(
        results, Reference(side.shape, side.positions).run(sent), strict=True
    ):
        assert list(differences(seen._replace(error=None), expected)) == []
    sent = batches(side, seed=1)
    for seen, expected in zip(
        side.run(sent), Reference(side.shape, side.positions).run(sent), strict=True
    ):
        assert list(differences(seen, expected)) == []
    side.close()


@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded", "dense"])
@pytest.mark.parametrize("path", PATHS)
def test_a_round_beyond_the_capacity_is_told_everywhere(kind: str, path: str, layout: str) -> None:
    from tests.gpu.case import Shape
    from tests.gpu.compare import differences
    from tests.gpu.reference import Reference

    if path == "packets" and layout == "indexed":
        path = "latency"
    room: dict[str, Any] = {"expert_capacity": 20} if layout == "padded" else {"max_positions": 60}
    if layout == "dense":
        room = {"max_positions": 40, "weighting": "expert"}
    side = group(kind, Shape(ranks=3, path=path, layout=layout, **room))
    for seed, routing in enumerate(("incast", "masked", "incast", "masked")):
        sent = batches(side, seed, routing)
        if routing == "masked":
            for batch in sent:
                batch.ids[6:] = -1
        else:
            for batch in sent:
                batch.ids[:] = [7, 6]
        results = side.run(sent, channel=seed % 2)
        expected = Reference(side.shape, side.positions).run(sent)
        reports = "CapacityError" if routing == "incast" else None
        assert [result.error for result in results] == [reports] * 3
        for pair in zip(results, expected, strict=True):
            assert list(differences(*pair)) == []
    side.close()


@pytest.mark.parametrize("path", PATHS)
def test_epochs_begin_again_after_the_last(kind: str, path: str) -> None:
    """Words are set to their values after slightly less than 2^32 rounds."""
    from tests.gpu.case import Shape
    from tests.gpu.compare import differences
    from tests.gpu.heap import set_epochs
    from tests.gpu.reference import Reference

    side = group(kind, Shape(ranks=2, layout="contiguous", path=path, channels=2))
    set_epochs(side, 2**32 - 4)
    for round in range(14):
        sent = batches(side, round, "masked" if round % 2 else "uniform")
        results = side.run(sent, channel=round % 2, mode="halves" if round % 3 else "fused")
        for pair in zip(results, Reference(side.shape, side.positions).run(sent), strict=True):
            assert list(differences(*pair)) == [], round
    side.close()


@pytest.mark.parametrize("path", PATHS)
def test_no_round_has_the_epoch_that_memory_begins_with(kind: str, path: str) -> None:
    """An unused slot, in the round after the last epoch."""
    import weft
    from tests.gpu.case import Shape
    from tests.gpu.heap import announce, set_epochs

    side = group(kind, Shape(ranks=2, path=path))
    sent = batches(side)
    side.ranks[0].load(sent[0])
    set_epochs(side, 2**32 - 1)
    # Rank 1 has announced one row, and delays it.
    announce(side, side.ranks[0], source=1, epoch=2**31)
    error = outcome(side, 0, dispatched(side, 0, sent[0]))
    assert isinstance(error, weft.errors.WaitTimeoutError), error
    side.close()


@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded", "dense"])
@pytest.mark.parametrize("path", PATHS)
def test_rows_that_were_announced_and_never_come_end_the_round(
    kind: str, path: str, layout: str
) -> None:
    """Some lanes in a warp time out; others have no wait."""
    import weft
    from tests.gpu.case import Shape
    from tests.gpu.heap import announce

    if (path, layout) == ("packets", "indexed"):
        pytest.skip("rows of packets do not stay where they landed")
    weighting = "expert" if layout == "dense" else "combine"
    side = group(kind, Shape(ranks=2, path=path, layout=layout, weighting=weighting))
    sent = batches(side)
    side.ranks[0].load(sent[0])
    announce(side, side.ranks[0], source=1, epoch=1)
    began = time.monotonic()
    error = outcome(side, 0, dispatched(side, 0, sent[0]))
    assert isinstance(error, weft.errors.WaitTimeoutError), error
    assert time.monotonic() - began < SKEW_SECONDS + GRACE_SECONDS
    side.close()


@pytest.mark.parametrize("path", PATHS)
def test_tokens_that_combine_alone_is_told_of_have_sums_of_zero(kind: str, path: str) -> None:
    """The number of tokens that exist grows between dispatch and combine."""
    from dataclasses import replace

    from tests.gpu.case import Shape

    side = group(kind, Shape(ranks=2, path=path))
    sent, few = batches(side), side.shape.max_tokens // 2
    sent = [replace(batch, count=few) for batch in sent]
    begun(side, sent)
    # Both ranks concurrently: the twin waits on the calling thread.
    for half in range(2):
        calls = [dispatched(side, rank, sent[rank])[half] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda call: call(), calls))
    side.synchronise()
    for each in side.ranks:
        each.scratch.outputs.fill_(1)
        each.count.fill_(side.shape.max_tokens)
    side.synchronise()
    for half in range(2):
        calls = [combined(side, rank, sent[rank])[half] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda call: call(), calls))
    assert [outcome(side, rank, []) for rank in (0, 1)] == [None, None]
    for each in side.ranks:
        sums = each.combined.own[: side.shape.max_tokens]
        assert not sums[few:].any()
        assert sums[:few].any()
    side.close()
