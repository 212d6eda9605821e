"""The backend `weft` in torch.distributed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.ranks import run
from weft.errors import ConfigurationError

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
#: "model": only the C++ library, over a C table model. "twin": operations on GPUs, by the
#: kernels' twin on the CPU.
BACKENDS = ["weft", "model"]


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("model", 2), ("weft", 1), ("weft", 2), ("weft", 4), ("twin", 1), ("twin", 2), ("twin", 3)],
)
def test_collectives_equal_those_of_gloo(backend: str, ranks: int) -> None:
    results = run(
        "backend.conformance.compare",
        ranks,
        backend=backend,
        repeats=1,
        seed="0",
        quiet=False,
        timeout=300,
        with_torch=True,
    )
    for result in results:
        assert result["wrong"] == []
        assert result["cases"] > 200


@pytest.mark.parametrize("backend", ["weft", "twin"])
def test_concurrent_sequences_on_several_groups_equal_those_of_gloo(backend: str) -> None:
    calls = int(os.environ.get("WEFT_TEST_CONCURRENT_CALLS", "200" if backend == "weft" else "40"))
    for result in results("backend.conformance.concurrent", 4, backend, calls=calls, seed="0"):
        assert result["wrong"] == []
        assert result["groups"] > 3


def results(worker: str, ranks: int, backend: str, **arguments: Any) -> list[Any]:
    return run(
        worker, ranks, backend=backend, quiet=False, timeout=120, with_torch=True, **arguments
    )


def test_forked_ranks_that_raise_fail_their_test() -> None:
    with pytest.raises(AssertionError, match=r"weft run: rank \d exited with status 1"):
        run("backend.process_groups.rejected", 2, backend="weft", unknown="value", with_torch=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "twin"])
def test_works_have_futures_and_results(backend: str) -> None:
    for rank, found in enumerate(results("backend.process_groups.handles", 3, backend)):
        assert found["chained"] == [6.0] * 5
        assert found["completed"]
        assert found["later first"]
        assert found["result"] == [3.0] * 9
        assert found["coalesced"] == [9.0, 48.0]
        assert found["batch"] == (rank - 1) % 3
        assert found.get("senders", [1, 2]) == [1, 2]
        assert found["objects"] == [0, 1, 2]
        assert found["parts"] == [0, 1, 2]


def test_messages_have_events_of_the_profiler() -> None:
    sent, received = results("backend.process_groups.profiled", 2, "model")
    assert sent == [["weft:send", [[4, 2]], True]] * 2
    names = ["weft:recv", "weft:recvAnySource"]
    assert received == [[name, [[4, 2]], True] for name in names]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receive_without_a_message_delays_no_other_work(backend: str) -> None:
    assert results("backend.process_groups.unmatched", 2, backend) == [[7.0, 7.0], [2.0] * 3]


@pytest.mark.parametrize("backend", [*BACKENDS, "twin"])
def test_groups_of_some_ranks_and_several_at_once(backend: str) -> None:
    for rank, found in enumerate(results("backend.process_groups.groups", 4, backend)):
        assert found["half"] == (1 if rank < 2 else 5)
        assert found["totals"] == [0.0, 80_000.0, 160_000.0]
        assert found["mesh"] == (2 if rank % 2 == 0 else 4)


@pytest.mark.parametrize("backend", [*BACKENDS, "twin"])
def test_functional_collectives_run_alone_and_compiled(backend: str) -> None:
    for rank, found in enumerate(results("backend.process_groups.compiled", 2, backend)):
        assert found["eager"] == found["compiled"]
        total = [2.0, 6.0, 10.0, 14.0]
        whole = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
        share = [2 * each for each in whole[4 * rank : 4 * rank + 4]]
        summed = [a + b for a, b in zip(total, share, strict=True)]
        moved = [0.0, 1.0, 1.0, 2.0] if rank == 0 else [2.0, 3.0, 3.0, 4.0]
        assert found["eager"] == [summed, whole, moved]


def test_the_operator_is_an_all_reduce_that_compiled_functions_keep() -> None:
    for rank, found in enumerate(results("backend.process_groups.operator", 2, "weft")):
        assert found["floats"] == [
            [3.0, 5.0, 7.0, 9.0],
            [1.5, 2.5, 3.5, 4.5],
            [2.0, 6.0, 12.0, 20.0],
            [1.0, 2.0, 3.0, 4.0],
            [2.0, 3.0, 4.0, 5.0],
        ]
        assert found["bits"] == [[0, 4], [3, 4], [3, 0]]
        assert found["columns"] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
        assert found["alone"] == [1.0 + rank, 2.0 + rank, 3.0 + rank, 4.0 + rank]
        assert found["eager"] == found["compiled"] == [5.0, 7.0, 9.0, 11.0]
        assert found["errors"] == [
            "ConfigurationError: weft.torch.all_reduce_: no process group; expected "
            "init_process_group('weft') before",
            "ValueError: weft.torch.all_reduce_: op 'mean': expected sum, avg, product, min, max, "
            "band, bor or bxor",
            "TypeError: all_reduce with ReduceOp.BAND on float32: expected an integer dtype",
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_arguments_are_named(backend: str) -> None:
    for found in results("backend.process_groups.rejected", 2, backend):
        assert found == [
            "TypeError: all_reduce with ReduceOp.BAND on float32: expected an integer dtype",
            "TypeError: all_reduce with ReduceOp.AVG on int32: expected a floating-point dtype",
            "TypeError: all_reduce with ReduceOp.SUM on int16: expected float16, bfloat16, "
            "float32, float64, int8, uint8, int32, int64 or bool; complex64 or complex128 with "
            "SUM, AVG or PREMUL_SUM",
            "TypeError: all_reduce of a Sparse tensor on cpu: expected a dense tensor on cpu or "
            "cuda",
            "ValueError: all_gather_into_tensor: output of 3 elements: expected 4",
            "ValueError: reduce_scatter_tensor: input of 2 elements: expected 4",
            "ValueError: all_to_all_single: output split sizes [5, 0]: expected 2 that add up to 2",
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_ends_the_group_at_every_rank(backend: str) -> None:
    waiting, late = results("backend.process_groups.absent", 2, backend, which="timeout")
    assert "all_reduce: timed out after 1500 ms" in waiting[0]
    assert "rank 1" in waiting[0]
    assert "all_reduce of rank 0 timed out after 1500 ms" in late[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_wait_may_be_repeated(backend: str) -> None:
    waiting, late = results("backend.process_groups.absent", 2, backend, which="wait")
    assert "all_reduce is not done after 200 ms" in waiting[0]
    assert "all_reduce of rank 0 timed out" in late[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_monitored_barrier_names_all_missing_ranks(backend: str) -> None:
    *waiting, late = results("backend.process_groups.absent", 3, backend, which="monitored")
    assert "did not arrive within 0 ms" in waiting[0].pop(0)
    for errors in (*waiting, late):
        assert "rank 2 did not arrive within 1000 ms" in errors[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_abort_ends_all_groups_of_all_ranks(backend: str) -> None:
    for errors in results("backend.process_groups.aborted", 2, backend):
        assert len(errors) == 2
        for error in errors:
            assert "rank 0 aborted the group" in error


@pytest.mark.parametrize("backend", [*BACKENDS, "twin"])
def test_training_has_the_losses_of_one_process(backend: str) -> None:
    for found in results("backend.training.run", 2, backend):
        for losses in found.values():
            assert losses == pytest.approx(found["alone"], rel=1e-4)


def test_survivors_of_a_loss_name_the_rank_and_go_on() -> None:
    *survivors, _ = results("backend.process_groups.lost", 3, "weft")
    for found in survivors:
        assert len(found["errors"]) == 2
        for error in found["errors"]:
            assert error.startswith("weft: all_reduce: ")
            assert "rank 2" in error
        assert found["value"] == 3


def test_a_caller_and_the_thread_of_the_group_wait_for_the_same_messages() -> None:
    assert results("backend.process_groups.exchanged", 4, "weft") == [240_000] * 4


def test_a_rank_that_leaves_ends_the_waits_for_it() -> None:
    errors, _ = results("backend.process_groups.left", 2, "weft")
    assert len(errors) == 2
    for error in errors:
        assert "rank 1 left" in error


def test_three_ranks_go_on_training_after_the_loss_of_the_fourth() -> None:
    pytest.importorskip("sklearn")
    example = ROOT / "examples" / "train_through_loss.py"
    process = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=200, check=False
    )
    start, loss, again, *ends, statuses = process.stdout.splitlines()
    assert start == "step 0: 4 ranks"
    assert re.fullmatch(r"step 25: weft: \w+: rank 2 was lost: .*", loss)
    assert again == "step 25: 3 ranks"
    assert statuses == "statuses [0, 0, -9, 0]"
    names, texts = zip(*(each.split(": ") for each in sorted(ends)), strict=True)
    assert names == ("rank 0 of 3", "rank 1 of 3", "rank 2 of 3")
    # Replicas with equal state: one text, whose number comes from a trained network.
    (text,) = set(texts)
    right = re.fullmatch(r"60 steps, (\d+\.\d)% of the digits are right", text)
    assert right is not None
    assert float(right[1]) > 85


def test_training_goes_on_from_the_last_step_after_an_elastic_restart(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = subprocess.run(
        [*command, "--max-restarts", "1", "-m", "tests.workers", "backend.elastic.run", "{}"],
        cwd=ROOT,
        env=os.environ | {"TEST_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    for rank in ("0", "1"):
        found = json.loads((tmp_path / rank).read_text())
        assert (found["restarts"], found["first"]) == (1, 3)
        assert found["losses"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["value"] == [2.0, 2.0]


def test_importing_weft_after_torch_registers_the_backend(torch: Any) -> None:
    code = "import torch, weft; print(torch.distributed.is_backend_available('weft'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_another_torch_and_a_missing_compiler_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.base import compile as _compile
    from weft.torch import build

    for version in ("2.10.1", "2.12.0+cpu", "3.11.0"):
        with pytest.raises(ConfigurationError, match=rf"torch {re.escape(version)}: expected"):
            build.check_torch(version)
    build.check_torch("2.11.3+cu130")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match=r"no C\+\+ compiler .CXX=no-such"):
        _compile.find_compiler("backend weft", "weft.torch")


#: A rank whose WEFT_SECRET may be another one.
JOIN = """
import weft.torch
from torch import distributed
distributed.init_process_group("weft")
print("joined")
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("secrets", [("apple", "apple"), ("apple", "pear"), ("apple", "")])
def test_a_secret_of_the_environment_is_part_of_the_groups(secrets: tuple[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env=os.environ | common | {"RANK": str(rank), "WEFT_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    if secrets[0] == secrets[1]:
        assert [text.startswith("joined") for text in outputs] == [True, True], outputs
    else:
        assert "has another secret: set WEFT_SECRET" in outputs[1], outputs
        assert not any("joined" in text for text in outputs)
