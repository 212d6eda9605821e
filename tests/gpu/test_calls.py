"""`weft.cuda` calls on a GPU: streams and allocations."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(120)]

ROUNDS = 50

#: Dispatch and combine streams: the previous call's, and another.
PATTERN = ((0, 0), (0, 0), (0, 1), (1, 1), (1, 0), (1, 0))


def alone(**arguments: Any) -> Any:
    import weft.cuda

    shape: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 1024, "max_tokens": 128}
    (rank,) = weft.cuda.local_group(1, ["cuda:0"], **(shape | arguments))
    return rank


def batch(number: int) -> tuple[Any, Any]:
    """Tokens with two experts each."""
    import torch

    tokens = torch.arange(128, device="cuda:0", dtype=torch.float32)[:, None] + number
    ids = torch.tensor([[0, 3], [1, 2]], device="cuda:0").repeat(64, 1)
    return tokens.expand(128, 1024).contiguous(), ids


def round(rank: Any, given: tuple[Any, Any], second: Any, **options: Any) -> Any:
    """A round whose combine is on a separate stream; only Weft orders later work."""
    import torch

    received = rank.dispatch(*given, **options)
    outputs = torch.zeros(rank.positions, rank.hidden, device=rank.device)
    outputs.copy_(received.tokens)
    ready = torch.cuda.current_stream(rank.device).record_event()
    with torch.cuda.stream(second):
        second.wait_event(ready)
        combined = rank.combine(received, outputs)
        outputs.record_stream(second)
    received.release()
    return combined


def test_calls_on_two_streams_in_turn_do_not_overlap() -> None:
    import torch

    rank, streams = alone(channels=1), [torch.cuda.Stream(0), torch.cuda.Stream(0)]
    assert rank._launcher.quick is not None
    batches = [batch(number) for number in range(ROUNDS)]
    torch.cuda.synchronize(0)
    results = []
    for number, given in enumerate(batches):
        first, second = PATTERN[number % len(PATTERN)]
        with torch.cuda.stream(streams[first]):
            results.append(round(rank, given, streams[second]))
    torch.cuda.synchronize(0)
    rank.check()
    for (tokens, _), result in zip(batches, results, strict=True):
        assert torch.equal(result, tokens * 2)
    rank.close()


def test_calls_captured_on_two_streams_and_eager_ones_are_ordered() -> None:
    import torch

    rank, other = alone(channels=1), torch.cuda.Stream(0)
    given = batch(0)
    outputs = rank.empty_outputs()
    round(rank, given, torch.cuda.current_stream(0))
    torch.cuda.synchronize(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [round(rank, given, other, out=outputs) for _ in range(3)]
        torch.cuda.current_stream(0).wait_stream(other)
    for number in range(ROUNDS):
        given[0].copy_(batch(number)[0])
        graph.replay()
        eager = round(rank, given, torch.cuda.current_stream(0), out=outputs)
        for result in (*captured, eager):
            assert torch.equal(result, given[0] * 2)
    rank.check()
    rank.close()


def test_outputs_are_on_the_device_of_the_all_to_all() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    rank, given = alone(), batch(3)
    torch.cuda.synchronize(0)
    with torch.cuda.device(1):
        for _ in range(3):
            received = rank.dispatch(*given)
            assert received.tokens.device == received.rows.device == rank.device
            combined = rank.combine(received, received.tokens)
            assert combined.device == rank.device
            received.release()
    torch.cuda.synchronize(0)
    assert torch.equal(combined, given[0] * 2)
    rank.check()
    rank.close()
