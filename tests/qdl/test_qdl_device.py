"""Accelerator nodes whose model takes torch tensors, on the CPU; `ask`, which the tests use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.errors import ConfigurationError, WeftError
from weft.qdl import Accelerator, Tensor, UpTo, ask
from weft.qdl.device import DeviceModel, device_named

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VECTOR = Tensor("vector", "float32", (3,))
TEXT = Tensor("text", "int32", (2, UpTo(5)))
LABEL = Tensor("label", "int64", (1,))


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Exception texts that models raise."""
    texts: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: texts.append(str(found.exc_value)))
    return texts


def vectors(count: int) -> list[list[Any]]:
    return [[np.array([at, at + 1, at + 2], np.float32)] for at in range(count)]


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_each_answer_is_that_of_its_query(provider: Any) -> None:
    sizes = []

    def model(batch: Any) -> Any:
        assert isinstance(batch, torch.Tensor)
        assert batch.dtype == torch.float32
        sizes.append(len(batch))
        return batch * 2

    with Accelerator(
        model, inputs=[VECTOR], outputs=[VECTOR], device="cpu", max_batch=16, window=0.001
    ) as node:
        found = ask([node.address], vectors(300), provider=provider, checksum=True)
    assert (found.answered, found.failed, found.failures) == (300, 0, {})
    for (query,), answer in zip(vectors(300), found.answers, strict=True):
        assert answer is not None
        assert np.frombuffer(answer[0], np.float32).tolist() == (query * 2).tolist()
    assert sum(sizes) == 300
    assert 1 < max(sizes) <= 16


def test_inputs_and_outputs_may_vary() -> None:
    def model(texts: Any, batch: Any) -> tuple[Any, Any]:
        assert [text.dtype for text in texts] == [torch.int32] * len(batch)
        sums = torch.stack([text.sum() for text in texts])[:, None]
        return [text + 1 for text in texts], sums

    queries = [[np.full((2, at % 6), at, np.int32), np.zeros(3, np.float32)] for at in range(64)]
    with Accelerator(
        model, inputs=[TEXT, VECTOR], outputs=[TEXT, LABEL], device=torch.device("cpu")
    ) as node:
        found = ask([node.address], queries)
    for (text, _), answer in zip(queries, found.answers, strict=True):
        assert answer is not None
        assert np.frombuffer(answer[0], np.int32).tolist() == (text + 1).ravel().tolist()
        assert np.frombuffer(answer[1], np.int64).tolist() == [text.sum()]


@pytest.mark.parametrize(
    "returned",
    [
        lambda batch: batch.numpy(),
        lambda batch: batch.double(),
        lambda batch: list(batch),
        lambda batch: [row.numpy() for row in batch],
        lambda batch: batch.t().contiguous().t(),
        lambda batch: torch.nn.Parameter(batch),
    ],
)
def test_a_model_may_return_arrays_and_other_layouts_and_types(returned: Any) -> None:
    with Accelerator(returned, inputs=[VECTOR], outputs=[VECTOR], device="cpu") as node:
        found = ask([node.address], vectors(20))
    answers = [np.frombuffer(answer[0], np.float32) for answer in found.answers if answer]
    assert np.array_equal(answers, np.concatenate(vectors(20)))


def test_tensors_may_be_bfloat16() -> None:
    tensor = Tensor("x", "bfloat16", (2,))
    with Accelerator(lambda x: x + 1, inputs=[tensor], outputs=[tensor], device="cpu") as node:
        query = torch.tensor([1, 2], dtype=torch.bfloat16).view(torch.uint8).numpy()
        (answer,) = ask([node.address], [[query]]).answers
    assert answer is not None
    numbers = torch.frombuffer(bytearray(answer[0]), dtype=torch.bfloat16)
    assert numbers.tolist() == [2, 3]


def test_calls_of_the_model_are_one_at_a_time_while_batches_overlap() -> None:
    inside = threading.Lock()
    threads = set()

    def model(batch: Any) -> Any:
        assert inside.acquire(blocking=False)
        threads.add(threading.get_ident())
        time.sleep(0.002)
        inside.release()
        return batch

    with Accelerator(model, inputs=[VECTOR], outputs=[VECTOR], device="cpu", max_batch=2) as node:
        found = ask([node.address], vectors(40))
    assert found.answered == 40
    assert len(threads) == 2


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda batch: batch[:, :2], r"output 'vector' of shape \(2,\): expected \(3\)"),
        (lambda batch: batch[:0], "output 'vector' of 0 queries: expected 1"),
        (lambda batch: [part[:1] for part in batch], r"shape \(1,\): expected \(3\)"),
        (lambda batch: batch.to("meta"), "output 'vector' is on meta: expected cpu"),
        (lambda batch: 1 / 0, "division by zero"),
    ],
)
def test_queries_of_a_failed_batch_fail_and_later_ones_are_answered(
    model: Any, text: str, raised: list[str]
) -> None:
    def checked(batch: Any) -> Any:
        return model(batch) if batch[0, 0] == 7 else batch

    with Accelerator(checked, inputs=[VECTOR], outputs=[VECTOR], device="cpu", max_batch=1) as node:
        found = ask([node.address], vectors(20))
        counts = node.counts()
    assert list(found.failures) == [7]
    assert "returned error 1" in found.failures[7]
    assert (found.answered, counts.answered, counts.failed) == (19, 19, 1)
    (error,) = raised
    assert re.search(text, error)


def test_a_front_end_that_leaves_while_a_batch_runs_costs_no_other_its_answers() -> None:
    runs, goes_on = threading.Event(), threading.Event()

    def model(batch: Any) -> Any:
        if batch[0, 0] == 0:
            runs.set()
            assert goes_on.wait(20)
        # The lost front end's slot memory is read and written after its loss.
        return batch + 1

    with Accelerator(model, inputs=[VECTOR], outputs=[VECTOR], device="cpu", max_batch=1) as node:
        impatient = threading.Thread(
            target=ask, args=([node.address], vectors(1)), kwargs={"deadline": 1.0}
        )
        impatient.start()
        assert runs.wait(20)
        later = vectors(9)[1:]
        goes_on_later = threading.Timer(2.0, goes_on.set)
        goes_on_later.start()
        found = ask([node.address], later)
        impatient.join()
        assert found.answered == 8


def test_a_node_that_never_started_stops() -> None:
    Accelerator(lambda x: x, inputs=[VECTOR], outputs=[VECTOR], device="cpu").stop()


def backends() -> int:
    """Model threads in this process."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            count += task.read_text(encoding="utf-8") == "weft-backend\n"
    return count


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_batches(node: Accelerator, queries: int) -> None:
    wait_until(lambda: node.counts().issued == queries)


def test_a_node_that_stops_while_batches_run_ends(raised: list[str]) -> None:
    goes_on, calls = threading.Event(), []

    def model(batch: Any) -> Any:
        calls.append(len(batch))
        assert goes_on.wait(20)
        return batch

    wait_until(lambda: backends() == 0)
    node = Accelerator(model, inputs=[VECTOR], outputs=[VECTOR], device="cpu", max_batch=1)
    node.start()
    asked = threading.Thread(
        target=ask, args=([node.address], vectors(3)), kwargs={"deadline": 2.0}
    )
    asked.start()
    # One thread is in the model, the other one waits for its turn.
    wait_for_batches(node, 2)
    wait_until(lambda: calls)
    node.stop()
    reference = weakref.ref(node)
    del node
    gc.collect()
    goes_on.set()
    wait_until(lambda: backends() == 0)
    assert (reference(), calls, raised) == (None, [1], [])
    asked.join(60)
    assert not asked.is_alive()


def parts_of(model: Any, outputs: list[Tensor], count: int, compute: Any = None) -> Any:
    """A model's output parts, and the object that keeps them."""
    node = DeviceModel(model, [VECTOR], outputs, device="cpu", max_batch=count)
    node.compute = compute
    return node(node.lanes[0], count, [[12] * count])


def numbers(parts: Any, dtype: Any = np.float32) -> list[list[float]]:
    _, addresses, lengths = parts
    each = zip(addresses, lengths, strict=True)
    return [np.frombuffer(ctypes.string_at(*part), dtype).tolist() for part in each]


@pytest.mark.parametrize("is_list", [False, True])
def test_outputs_are_copies_that_a_later_call_does_not_write(is_list: bool) -> None:
    static = torch.zeros(4, 3)

    def model(_: Any) -> Any:
        static.fill_(1)
        return list(static) if is_list else static

    (parts,), kept = parts_of(model, [VECTOR], 4)
    static.fill_(2)
    assert numbers(parts) == [[1, 1, 1]] * 4
    assert len(kept) == 1


def test_tensors_of_a_list_are_copied_into_one() -> None:
    tensor = Tensor("x", "int64", (UpTo(9),))
    given = [torch.arange(length, dtype=torch.int32) for length in (2, 0, 3)]
    (parts,), (joined,) = parts_of(lambda _: given, [tensor], 3)
    assert numbers(parts, np.int64) == [[0, 1], [], [0, 1, 2]]
    assert parts[1] == [joined.data_ptr() + offset for offset in (0, 16, 16)]


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_outputs_on_the_cpu_are_converted_after_the_work_that_writes_them(kind: str) -> None:
    target = torch.zeros(2, 3, dtype=torch.float64)
    returned = {"tensor": target, "array": target.numpy(), "list": list(target)}[kind]
    compute = SimpleNamespace(synchronize=lambda: target.fill_(5))
    (parts,), kept = parts_of(lambda _: returned, [VECTOR], 2, compute)
    assert numbers(parts) == [[5, 5, 5]] * 2
    assert kept


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("meta", "device='meta': expected cpu or a CUDA device"),
        ("nonsense", "device='nonsense': expected cpu or a CUDA device: "),
        ("cuda:99", "device='cuda:99': torch finds (no|[0-9]+) CUDA device"),
    ],
)
def test_a_device_that_cannot_be_is_refused(device: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Accelerator(lambda x: x, inputs=[VECTOR], outputs=[VECTOR], device=device)


def test_a_device_without_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match="PyTorch is not installed"):
        device_named("cuda:0")


def test_element_types_are_checked_before_buffers_are_made() -> None:
    wrong = Tensor("x", "complex64", (1,))
    with pytest.raises(ConfigurationError, match="'complex64': expected uint8"):
        Accelerator(lambda x: x, inputs=[wrong], outputs=[VECTOR], device="cpu")


def test_ask_refuses_what_no_node_takes_and_reports_nodes_that_are_not_there() -> None:
    with Accelerator(lambda x: x, inputs=[VECTOR], outputs=[VECTOR], device="cpu") as node:
        with pytest.raises(ConfigurationError, match=r"tensors \[4\]: expected those of"):
            ask([node.address], [[b"1234"]])
        with pytest.raises(ConfigurationError, match="deadline 0"):
            ask([node.address], vectors(1), deadline=0)
        found = ask([node.address], vectors(5), repeat=0.05)
        assert len(found.answers) == 5
        assert found.answered > 5
        assert found.rate == found.answered / found.seconds
    with pytest.raises(WeftError):
        ask([], vectors(1))
