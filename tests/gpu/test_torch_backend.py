"""The backend `weft` in torch.distributed: tensors on two GPUs, one for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gpu.torch_backend.ranks import Ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

#: Processes by kind, for all tests in this file.
started: dict[str, Ranks] = {}


def require(kind: str) -> None:
    """Skip without two GPUs, or without what builds the C++ library."""
    import torch

    from weft.errors import ConfigurationError
    from weft.torch import build

    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    try:
        build.load()
    except ConfigurationError as error:
        pytest.skip(f"needs the C++ library of the backend: {str(error).splitlines()[0]}")


def running(kind: str, folders: pytest.TempPathFactory) -> Ranks:
    """Two ranks with a default group; started again after a failure."""
    from tests.gpu.torch_backend.ranks import Ranks

    require(kind)
    if kind not in started or not started[kind].alive:
        started[kind] = Ranks(kind, str(folders.mktemp("ranks")))
    return started[kind]


@pytest.fixture
def ranks(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Ranks on GPUs, or with the twin."""
    return running(kind, tmp_path_factory)


@pytest.fixture
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Ranks on GPUs."""
    return running("cuda", tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """End all processes after the tests."""
    yield
    for each in started.values():
        each.end()
    started.clear()


def test_reductions_equal_those_on_the_cpu(ranks: Ranks) -> None:
    assert ranks.run("operations.reductions") == [144, 144]


def test_sums_of_products_with_a_factor_equal_those_on_the_cpu(ranks: Ranks) -> None:
    assert ranks.run("operations.factors") == [108, 108]


def test_movements_equal_those_on_the_cpu(ranks: Ranks) -> None:
    assert ranks.run("operations.movements") == [135, 135]


def test_messages_equal_the_tensors_that_were_sent(ranks: Ranks) -> None:
    assert ranks.run("operations.messages") == [103, 103]


def test_a_receive_without_its_send_names_the_rank(ranks: Ranks, kind: str) -> None:
    import math

    waiting, _ = ranks.run("failures.unmatched")
    assert waiting["first"] == "none" if kind == "cuda" else "rank 1" in waiting["first"]
    assert 2.5 < waiting["seconds"] < 40
    assert all(map(math.isnan, waiting["value"]))
    assert waiting["later"].startswith("DistBackendError: weft: send: ")
    assert "rank 1" in waiting["later"]


def test_coalesced_operations_and_groups_of_some_ranks(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run("operations.groups")):
        assert found["gathered"] == [[0.0, 1.0], [0.0] * 3 + [1.0] * 3]
        assert found["scattered"] == [2.0 * rank, 6.0 * rank]
        assert found["reduced"] == [2.0, 6.0]
        assert found["broadcast"] == [[0.0, 0.0], [1.0, 1.0]]
        assert found["alone"] == rank + 1
        assert found["second"] == [1.0, 2.0]
        assert found["mesh"] == 3
        assert found["live"] == [8.0, 16.0]


@pytest.mark.gpu
def test_operations_are_in_order_on_streams_and_do_not_block_the_host(gpu_ranks: Ranks) -> None:
    from tests.gpu.torch_backend.streams import AT_ONCE_SECONDS

    for found in gpu_ranks.run("streams.streams"):
        slow = {
            name: found[name]
            for name in ("sync", "async", "query", "wait")
            if found[name] > AT_ONCE_SECONDS
        }
        assert slow == {}
        assert found["sync value"] == [6.0]
        assert found["completed before"] is False
        assert found["async value"] == [6.0]
        assert found["completed after"] is True
        assert found["other"] == 1000.0
        assert found["side value"] == [5.0]
        assert found["future value"] == [4.0]
        assert found["completed after a wait on the host"] is True
        assert "all_reduce is not done after 20 ms" in found["short wait"]


@pytest.mark.gpu
def test_tensors_live_until_their_operation_is_done(gpu_ranks: Ranks) -> None:
    assert gpu_ranks.run("streams.memory") == [[float(step) for step in range(20)]] * 2


@pytest.mark.gpu
def test_graphs_with_operations_are_replayed(gpu_ranks: Ranks) -> None:
    for found in gpu_ranks.run("streams.graphs"):
        assert found["completed"] is True
        sums = [2.0 * round + 1 for round in range(5)]
        assert found["replays"] == [[each, 2 * each, 2 * each + 2] for each in sums]
        assert found["eager"] == [2.0] * 3
        assert found["unprepared"].startswith("DistBackendError: weft: all_reduce: ")
        assert "run one operation before the capture" in found["unprepared"]


@pytest.mark.gpu
def test_a_barrier_waits_for_the_streams_of_all_ranks(gpu_ranks: Ranks) -> None:
    from tests.gpu.torch_backend.streams import BUSY_SECONDS

    assert all(seconds > BUSY_SECONDS / 4 for seconds in gpu_ranks.run("streams.barriers"))


@pytest.mark.gpu
def test_operations_that_gpus_lack_are_named(gpu_ranks: Ranks) -> None:
    for rank, found in enumerate(gpu_ranks.run("failures.errors")):
        assert found["recv"].startswith(
            f"NotImplementedError: recvAnySource of a tensor on cuda:{rank}: backend weft has "
            "receives from any rank on cpu alone; pass the source"
        )
        assert "ReduceOp.PREMUL_SUM on int32 on a GPU: expected float16" in found["factor"]
        assert f"on cuda:{rank} and cpu: expected one device" in found["mixed"]
        assert f"all_reduce of a tensor on cuda:{1 - rank}: expected cuda:{rank}" in found["device"]
        assert found["sparse"] != "none"


def test_a_rank_that_comes_too_late_is_named(ranks: Ranks, kind: str) -> None:
    import math

    waiting, late = ranks.run("failures.late")
    assert waiting["first"] == "none" if kind == "cuda" else "rank 1" in waiting["first"]
    assert 2.5 < waiting["seconds"] < 40
    assert all(map(math.isnan, waiting["value"]))
    assert waiting["later"].startswith("DistBackendError: weft: broadcast: ")
    assert "rank 1" in waiting["later"]
    assert late["later"].startswith("DistBackendError: weft: broadcast: ")


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_the_end_of_a_group_ends_the_wait_of_its_kernel(gpu_ranks: Ranks, how: str) -> None:
    first, second = gpu_ranks.run("failures.ended", how=how)
    assert first["seconds"] < 15
    assert second["error"].startswith("DistBackendError: weft: all_reduce: ")
    assert "rank 0" in second["error"]
    assert "rank 0 aborted the group" in first.get("error", "rank 0 aborted the group")


def test_training_equals_that_of_one_process(ranks: Ranks) -> None:
    for found in ranks.run("training.training"):
        assert found["ddp"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["fsdp"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["factor"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["difference"] < 1e-5
        assert found["parameters"] < 1e-3
        assert found["alone"][-1] < found["alone"][0]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_functional_collectives_run_alone_and_compiled(
    ranks: Ranks, compiler: str, kind: str
) -> None:
    if compiler == "inductor" and kind == "twin":
        pytest.skip("tests/backend/test_backend.py compiles on the CPU")
    for rank, found in enumerate(ranks.run("training.compiled", backend=compiler)):
        assert found["eager"] == found["compiled"]
        whole = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
        share = [2 * each for each in whole[4 * rank : 4 * rank + 4]]
        summed = [a + b for a, b in zip([2.0, 6.0, 10.0, 14.0], share, strict=True)]
        moved = [0.0, 1.0, 1.0, 2.0] if rank == 0 else [2.0, 3.0, 3.0, 4.0]
        assert found["eager"] == [summed, whole, moved, [3.0, 5.0, 7.0, 9.0]]


def test_a_killed_rank_is_named_and_the_gpu_goes_on(kind: str, tmp_path: Any) -> None:
    from tests.gpu.torch_backend.ranks import Ranks

    require(kind)
    pair = Ranks(kind, str(tmp_path), bound=True)
    try:
        assert pair.run("training.bound") == [{"sum": [2.0, 2.0], "max": [2.0, 2.0]}] * 2
        pair.begin("failures.lost")
        failed, found = pair.receive(0)
        assert not failed, found
        assert found["error"].startswith("DistBackendError: weft: all_reduce: ")
        assert "rank 1" in found["error"]
        assert found["barrier"].startswith("DistBackendError: weft: barrier: ")
        assert found["seconds"] < 29
        assert found["total"] == 1000.0
    finally:
        pair.end()
