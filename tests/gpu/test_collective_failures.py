"""Device collectives whose ranks do not call, or are killed."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft import cuda

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

SKEW_SECONDS, GRACE_SECONDS = 1.0, 4.0


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "direct"])
def test_a_rank_that_does_not_call_is_named_in_time(kind: str, algorithm: str) -> None:
    import torch

    import weft
    from tests.gpu.collective_calls import Group
    from weft import cuda

    group = Group(kind, 3, skew_timeout=SKEW_SECONDS)
    vectors = cuda.local_symmetric_empty(group.members, 3000, torch.float32)
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
    from tests.gpu import collective_processes as processes

    ranks = 3 if device == "twin" else 2
    outcome = processes.play(processes.Spec(device, ranks, memory, how))
    assert "failed" not in outcome, outcome


#: Each call kind, with both ways to lose a rank.
LOSSES = [
    ("stop", "all_reduce"),
    ("stop", "direct"),
    ("kill", "reduce_scatter"),
    ("stop", "all_gather"),
    ("kill", "all_to_all"),
    ("stop", "broadcast"),
    ("kill", "reduce"),
    ("stop", "gather"),
    ("kill", "scatter"),
    ("stop", "messages"),
    ("kill", "copies"),
    ("stop", "barrier"),
]


# Half with the twin, for its time.
@pytest.mark.parametrize(
    ("device", "how", "loop"),
    [
        *(("twin", *each) for number, each in enumerate(LOSSES) if number % 4 in (1, 2)),
        *(pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in LOSSES),
    ],
)
def test_a_rank_that_is_lost_in_a_call_is_named(device: Any, how: Any, loop: str) -> None:
    from tests.gpu import collective_processes as processes

    ranks = 3 if device == "twin" else 2
    outcome = processes.play(processes.Spec(device, ranks, how=how, loop=loop))
    assert "failed" not in outcome, outcome
