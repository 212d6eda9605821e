"""Accelerator nodes whose model takes tensors on a GPU: answers, streams, failures, ends."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(120)]

#: Clock cycles in a kernel that keeps the model's stream busy for about a millisecond.
MILLISECOND = 1_500_000
BYTES = 150_528


def node(model: Any, inputs: Any, outputs: Any, **options: Any) -> Any:
    from weft.qdl import Accelerator

    return Accelerator(model, inputs=inputs, outputs=outputs, device="cuda:0", **options)


def random_bytes(count: int, length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(length).integers(0, 256, (count, length), np.uint8)


def answers_of(found: Any, dtype: Any) -> np.ndarray[Any, Any]:
    assert found.failures == {}
    return np.array([np.frombuffer(answer[0], dtype) for answer in found.answers])


@pytest.mark.parametrize("length", [64, 1024, BYTES])
@pytest.mark.parametrize("provider", ["shm", "tcp"])
@pytest.mark.parametrize("busy", [False, True])
def test_inputs_reach_the_gpu_and_outputs_come_back(
    length: int, provider: Any, busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from weft.qdl import Tensor, ask

    def model(batch: Any) -> Any:
        assert batch.is_cuda
        if busy:
            # Batches are read and answers are written long after the call has returned.
            torch.cuda._sleep(MILLISECOND)
        return batch + 1

    tensor = Tensor("x", "uint8", (length,))
    queries = random_bytes(512, length)
    with node(model, [tensor], [tensor], max_batch=32, window=0.0005) as served:
        found = ask([served.address], [[query] for query in queries], provider=provider)
    assert np.array_equal(answers_of(found, np.uint8), queries + np.uint8(1))
    assert "page-locked" not in caplog.text


def test_inputs_and_outputs_may_vary() -> None:
    import torch

    from weft.qdl import Tensor, UpTo, ask

    text, sums = Tensor("text", "int32", (UpTo(300), 2)), Tensor("sum", "int64", (1,))

    def model(texts: Any) -> Any:
        torch.cuda._sleep(MILLISECOND // 4)
        total = torch.stack([each.sum() for each in texts])
        return [each * 2 for each in texts], total[:, None]

    queries = [np.full((at * 7 % 301, 2), at, np.int32) for at in range(200)]
    with node(model, [text], [text, sums], max_batch=16) as served:
        found = ask([served.address], [[query] for query in queries])
    for query, answer in zip(queries, found.answers, strict=True):
        assert answer is not None
        assert np.array_equal(np.frombuffer(answer[0], np.int32), (query * 2).ravel())
        assert np.frombuffer(answer[1], np.int64).tolist() == [query.sum()]


@pytest.mark.parametrize(
    "place", ["cpu", "cpu, under way", "list under way", "numpy under way", "list of both"]
)
def test_outputs_may_be_on_the_host(place: str) -> None:
    import torch

    from weft.qdl import Tensor, ask

    def model(batch: Any) -> Any:
        torch.cuda._sleep(MILLISECOND)
        if place.endswith("under way"):
            # In a type other than the output's: converted after the copy.
            target = torch.empty(batch.shape, dtype=torch.int16, pin_memory=True)
            target.copy_(batch + 1, non_blocking=True)
            if place.startswith("list"):
                return list(target)
            return target.numpy() if place.startswith("numpy") else target
        if place == "list of both":
            return [row + 1 if at % 2 else (row + 1).cpu() for at, row in enumerate(batch)]
        return (batch + 1).cpu()

    tensor = Tensor("x", "uint8", (1024,))
    queries = random_bytes(100, 1024)
    with node(model, [tensor], [tensor], max_batch=8) as served:
        found = ask([served.address], [[query] for query in queries])
    assert np.array_equal(answers_of(found, np.uint8), queries + np.uint8(1))


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_model_may_return_its_own_memory_again(is_graph: bool) -> None:
    import torch

    from weft.qdl import Tensor, ask

    length, most = 1 << 20, 4
    static_input, static = torch.zeros(2, most, length, dtype=torch.uint8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    if is_graph:
        with torch.cuda.graph(graph):
            torch.add(static_input, 1, out=static)

    def model(batch: Any) -> Any:
        static_input[: len(batch)] = batch
        if is_graph:
            graph.replay()
        else:
            torch.add(static_input, 1, out=static)
        return static[: len(batch)]

    tensor = Tensor("x", "uint8", (length,))
    queries = random_bytes(100, length)
    with node(model, [tensor], [tensor], max_batch=most, slots=16) as served:
        found = ask([served.address], [[query] for query in queries], slots=16)
    assert np.array_equal(answers_of(found, np.uint8), queries + np.uint8(1))


def test_a_model_with_a_state_on_the_gpu_sees_one_batch_after_the_other() -> None:
    import torch

    from weft.qdl import Tensor, ask

    state = torch.zeros(1, dtype=torch.int64, device="cuda:0")

    def model(batch: Any) -> Any:
        # Not atomic: calls that overlapped on the GPU would lose queries.
        before = state.clone()
        torch.cuda._sleep(MILLISECOND // 4)
        state.copy_(before + len(batch))
        return (before + torch.arange(len(batch), device="cuda:0"))[:, None]

    number = Tensor("number", "int64", (1,))
    with node(model, [Tensor("x", "uint8", (8,))], [number], max_batch=4) as served:
        found = ask([served.address], [[query] for query in random_bytes(300, 8)])
    assert sorted(answers_of(found, np.int64)[:, 0].tolist()) == list(range(300))


def test_a_batch_whose_model_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from weft.qdl import Tensor, ask

    errors: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: errors.append(str(found.exc_value)))

    def model(batch: Any) -> Any:
        # Work that reads the inputs is under way when the call raises.
        torch.cuda._sleep(MILLISECOND)
        doubled = batch * 2
        if int(batch[0, 0].item()) == 3:
            raise RuntimeError("no answer")
        return doubled

    tensor = Tensor("x", "int64", (16,))
    queries = [[np.full(16, at, np.int64)] for at in range(40)]
    with node(model, [tensor], [tensor], max_batch=1) as served:
        found = ask([served.address], queries)
    assert list(found.failures) == [3]
    assert errors == ["no answer"]
    for at, answer in enumerate(found.answers):
        assert at == 3 or (answer and np.frombuffer(answer[0], np.int64).tolist() == [2 * at] * 16)


def test_front_ends_come_and_leave_while_batches_run() -> None:
    import torch

    from weft.qdl import Tensor, ask

    def model(batch: Any) -> Any:
        torch.cuda._sleep(4 * MILLISECOND)
        return batch + 1

    tensor = Tensor("x", "uint8", (4096,))
    queries = random_bytes(64, 4096)
    listed = [[query] for query in queries]
    failed: list[int] = []
    with node(model, [tensor], [tensor], max_batch=4) as served:

        def leaves() -> None:
            # A batch takes longer than its deadline: its slots are freed with batches under way.
            failed.extend(
                ask([served.address], listed, deadline=0.001, slots=8).failed for _ in range(5)
            )

        others = [threading.Thread(target=leaves) for _ in range(2)]
        for other in others:
            other.start()
        for _ in range(8):
            found = ask([served.address], listed, slots=16)
            assert np.array_equal(answers_of(found, np.uint8), queries + np.uint8(1))
        for other in others:
            other.join()
    assert len(failed) == 10
    assert min(failed) > 0


def test_a_node_ends_while_batches_run() -> None:
    import torch

    from weft.qdl import Tensor, ask

    begun = threading.Event()

    def model(batch: Any) -> Any:
        begun.set()
        torch.cuda._sleep(20 * MILLISECOND)
        return batch

    tensor = Tensor("x", "uint8", (BYTES,))
    for _ in range(3):
        begun.clear()
        served = node(model, [tensor], [tensor], max_batch=2)
        served.start()
        queries = [[query] for query in random_bytes(64, BYTES)]
        asked = threading.Thread(
            target=ask, args=([served.address], queries), kwargs={"deadline": 3.0}
        )
        asked.start()
        assert begun.wait(30)
        served.stop()
        del served
        torch.empty(1 << 20, device="cuda:0").fill_(7)
        asked.join(60)
        assert not asked.is_alive()
    torch.cuda.synchronize()


def test_a_device_that_is_not_there_is_refused() -> None:
    import torch

    from weft.errors import ConfigurationError
    from weft.qdl import Accelerator, Tensor

    tensor = Tensor("x", "uint8", (8,))
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigurationError, match="CUDA devices; pass one of them"):
        Accelerator(lambda x: x, inputs=[tensor], outputs=[tensor], device=device)
