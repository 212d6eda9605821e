"""The backend `weft` in torch.distributed for tensors on GPUs, by the kernels' twin."""

from typing import Any

import pytest

from tests.ranks import run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def results(worker: str, ranks: int, **arguments: Any) -> list[Any]:
    return run(
        f"backend.device.{worker}", ranks, quiet=False, timeout=120, with_torch=True, **arguments
    )


def test_each_operation_is_one_kernel_of_collectives_that_the_first_makes() -> None:
    kernels = {
        "all_reduce": "all_reduce",
        "reduce": "reduce",
        "broadcast": "broadcast",
        "all_gather": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all": "all_to_all",
        "all_to_all_single": "all_to_all",
        "gather": "gather",
        "scatter": "scatter",
        "barrier": "barrier",
    }
    for found in results("operations", 3):
        assert found.pop("before") == [0, []]
        assert found.pop("during") == 1
        assert found.pop("after") == 0
        assert found == {name: [kernel] for name, kernel in kernels.items()}


def test_rejected_arguments_are_named_before_any_kernel() -> None:
    for rank, found in enumerate(results("rejected", 2)):
        sizes = [4, 0][rank]
        assert found == [
            "TypeError: all_reduce with ReduceOp.BAND on float32 on a GPU: expected bool or an "
            "integer dtype",
            "TypeError: all_reduce with ReduceOp.AVG on bool on a GPU: expected an integer or "
            "floating-point dtype",
            "TypeError: all_reduce with ReduceOp.MAX on complex64 on a GPU: expected SUM, AVG or "
            "PREMUL_SUM; pass torch.view_as_real(tensor)",
            "TypeError: all_reduce with ReduceOp.SUM on float8_e4m3fnuz on a GPU: expected bool, "
            "an integer dtype, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64; "
            "cast the tensor",
            "TypeError: all_reduce with ReduceOp.PREMUL_SUM on bool on a GPU: expected float16, "
            "bfloat16, float32, float64 or a complex dtype",
            "ValueError: all_gather_into_tensor: input and output overlap: expected memory of "
            "their own, or this rank's part of the longer one as the other",
            "ValueError: all_to_all_single: input and output overlap: expected memory of their own",
            f"ValueError: all_to_all_single: rank {rank} sends itself 8 bytes and expects "
            f"{4 * sizes}: expected equal sizes",
            "ValueError: gather: output of 3 elements: expected 2",
        ]


def test_messages_of_a_batch_run_at_the_same_time() -> None:
    for rank, found in enumerate(results("messages", 3)):
        left, right = (rank - 1) % 3, (rank + 1) % 3
        assert found["works"] == [True]
        assert found["received"] == [left, right]
        # No collective is among them.
        assert found["launched"] == []
        early, completed = found["early"]
        assert "expected the end of coalescing before it" in early
        assert completed is False
        assert found["mixed"] == [[3.0, 3.0], [left, left], True, True]
        assert found["future"] == [left, left]
        assert found["errors"] == [
            f"ValueError: send of rank {rank} to itself: expected another rank; copy the tensor "
            "instead",
            "ValueError: recv: source 3: expected a rank from 0 to 2",
            "NotImplementedError: recvAnySource of a tensor on cpu: backend weft has receives from "
            "any rank on cpu alone; pass the source, or receive into a tensor on cpu",
            "DistBackendError: weft: coalesced messages: the tensor of a receive overlaps another "
            "one of the batch: pass memory of its own",
        ]
        assert found.get("pair") == (None if rank == 2 else [5.0, 5.0])


def test_more_dtypes_than_on_the_cpu() -> None:
    for found in results("dtypes", 2):
        for name in ("int16", "uint16", "uint32", "uint64"):
            assert found[name] == [7, 10]
        # Truncated: the sums -5 and 11, divided by two.
        assert found["avg"] == [-2, 5]
        assert found["float8"] == [2.0, 2.0]
        assert found["float8 sum"] == [4.0, 4.0]
        assert found["parameter"] == [2.0, 2.0]
        assert found["negated"] == [-1.0, -1.0]


def test_sums_of_products_with_a_factor_have_the_bits_of_the_cpu() -> None:
    for found in results("factors", 2):
        assert [name for name, same in found.items() if not same] == []
        assert len(found) == 20


def test_coalesced_and_asynchronous_operations_have_works() -> None:
    for found in results("coalesced", 2):
        assert found["gathered"] == [[0.0, 1.0], [0.0] * 3 + [1.0] * 3]
        rank = found["scattered"][0][0] / 2
        assert found["scattered"] == [[2 * rank], [2 * rank] * 3]
        assert found["broadcast"] == [[1.0, 1.0], [0.0, 0.0]]
        assert found["future"] == [4.0, 4.0]
        assert found["work"] == [True, True, [2.0, 2.0]]
        assert found["timeout"] is True
        assert found["profiled"] == ["weft:all_reduce"]
        assert found["operator"] == [[0.0, 0.0], "all_reduce"]


def test_a_rank_that_comes_too_late_is_named() -> None:
    waiting, late = results("late", 2)
    for errors in (waiting, late):
        assert errors[0].startswith("DistBackendError: weft: all_reduce: ")
        assert errors[1].startswith("DistBackendError: weft: all_reduce: ")
        assert errors[2].startswith("DistBackendError: weft: barrier: ")
    for error in waiting:
        assert "rank 1" in error
    for error in late:
        assert "rank 0" in error
    # All GPU errors name each rank's operation and start time.
    for error in (*waiting[:2], *late[:2]):
        assert "; last calls: rank 0 all_reduce number 2 of 2 float32, " in error
        assert "; rank 1 all_reduce number 1 of 1 float32, " in error
        assert error.endswith(" s ago")


def test_survivors_of_a_loss_name_the_rank_and_go_on() -> None:
    *survivors, _ = results("lost", 3)
    for found in survivors:
        for error in found["errors"]:
            assert error.startswith("DistBackendError: weft: broadcast: ")
            assert "rank 2" in error
            # The killed process's error is among them.
            assert "rank 2 all_reduce number 1 of 2 float32" in error
        assert found["value"] == 3
        assert found["open"] == 0


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_the_end_of_a_group_ends_the_wait_of_an_operation(how: str) -> None:
    for found in results("ended", 2, how=how):
        assert found["error"].startswith("DistBackendError: weft: all_reduce: ")
        assert "rank 0" in found["error"]
        # Earlier operations' results stay.
        assert found["kept"] == [True, True, 8.0]
        assert found["open"] == 0
        # Below the group timeout, 20 s.
        assert found.get("seconds", 0) < 15


def test_groups_have_the_options_of_their_device() -> None:
    for rank, found in enumerate(results("options", 2)):
        assert found["group"] == found["split"] == [3]
        here, there = (2, 3) if rank == 0 else (3, 2)
        assert f"num_sms (0: the default) is {here} here and {there} at rank" in found["unequal"]
        assert f"copy_engine is {1 - rank} here and {rank} at rank" in found["copies"]
        assert found["invalid"] == [
            f"ConfigurationError: num_sms {given}: expected 1 or more" for given in ("0", "2.5")
        ]


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_leaves_while_others_wait_for_it_is_named_in_seconds(count: int) -> None:
    for rank, found in enumerate(results("left", count)):
        assert found["before"] == [count] * 4
        if rank == 0:
            continue
        for error in found["errors"]:
            assert error.startswith("DistBackendError: weft: all_reduce: ")
            assert "rank 0 left before the others were done" in error
        # Below the group timeout, 20 s.
        assert found["seconds"] < 12
        # Only the group with an operation in progress has failed.
        assert found["checks"].count("none") == len(found["checks"]) - 1
        assert "rank 0 left before the others were done" in found["late"]


def test_a_sender_that_leaves_is_named_in_seconds() -> None:
    _, waiting, _ = results("left_by_a_sender", 3)
    assert waiting["received"] == [3.0] * 4
    assert waiting["error"].startswith("DistBackendError: weft: recv: ")
    assert "rank 0 left before the others were done" in waiting["error"]
    # Below the group timeout, 20 s.
    assert waiting["seconds"] < 12


def test_split_groups_and_groups_that_are_made_anew() -> None:
    for rank, found in enumerate(results("groups", 3)):
        assert found["pair"] == ([3, ["all_reduce"]] if rank < 2 else None)
        assert found["alone"] == rank + 1
        assert found["live"] == [True] * 3
        assert found["again"] == 6
        assert found["open"] == 0


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abab"])
def test_ranks_on_several_hosts(hosts: str) -> None:
    ranks = len(hosts)
    mean, total = (ranks - 1) / 2, sum(range(1, ranks + 1))
    for rank, found in enumerate(results("apart", ranks, transport="default", hosts=list(hosts))):
        assert found["refused"] == "none"
        assert found["averaged"] == [mean + each for each in range(6)]
        assert found["part"] == [2 * rank * total, (2 * rank + 1) * total]
        assert found["whole"]
        assert found["rows"] == list(range(ranks))
        assert found["sent"] == [1.0] * 3
        assert found["complex"] == [total, total - ranks]
        calls = ["all_gather", "all_reduce", "barrier", "broadcast", "reduce_scatter"]
        assert found["launched"] == calls
        for lacking, name in zip(found["lacking"], ("all_to_all", "reduce"), strict=False):
            assert lacking == (
                f"DistBackendError: weft: {name}: {name} of tensors on GPUs of several hosts: "
                f"expected one of {', '.join(sorted(calls, key=order))}; make a group of the ranks "
                "of one host, or pass tensors on the CPU"
            )
        assert "sum of uint16 between hosts: expected one of uint8, int8" in found["lacking"][2]
        assert found["after"] == mean * ranks
        assert found["open"] == 0


def order(operation: str) -> int:
    """An operation's place in an error text."""
    every = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]
    return every.index(operation)


def test_hosts_with_different_numbers_of_ranks_are_an_error_that_names_the_remedy() -> None:
    for found in results("apart", 3, transport="default", hosts=["a", "a", "b"]):
        assert found["refused"] == (
            "DistBackendError: weft: all_reduce: ranks of each host: a 2, b 1; expected equal "
            "numbers; start as many ranks on each host"
        )
