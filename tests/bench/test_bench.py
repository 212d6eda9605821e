"""`weft bench` with real processes and small workloads: counts, never times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from weft.bench.moe_worker import error_share, expert_output
from weft.bench.moe_workload import Router, Workload
from weft.bench.sizes import parse_sizes
from weft.bench.transfer_memory import HostMemory
from weft.bench.transfer_worker import Places, Shape
from weft.cli import main


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "weft", "bench", *arguments, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def options(**values: int) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def workload(**changes: Any) -> Workload:
    given: dict[str, Any] = {"ranks": 2, "tokens": 8, "hidden": 5, "experts": 6, "top_k": 2}
    given |= {"dtype": "float32", "routing": "uniform", "rounds": 1}
    return Workload(**(given | changes))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("provider", "routing", "dtype"),
    [("shm", "zipf", "bfloat16"), ("tcp", "uniform", "float16"), ("shm", "incast", "float32")],
)
def test_every_result_is_within_the_bound(
    tmp_path: Path, provider: str, routing: str, dtype: str
) -> None:
    trace, record = tmp_path / "trace.json", tmp_path / "new" / "moe.jsonl"
    small = options(ranks=3, tokens=12, hidden=33, experts=7, top_k=3, rounds=4)
    found = bench(
        *("moe", *small, "--provider", provider, "--routing", routing, "--dtype", dtype),
        *("--trace", str(trace), "--record", str(record)),
    )
    assert found["routes"] == [provider]
    assert found["wrong_rounds"] == 0
    assert 0 < found["largest_share_of_bound"] <= 1
    assert 0 < found["bytes_ratio"] < 1
    assert found["expert_imbalance"] >= 1
    assert len(found["phases"]) == 5
    assert json.loads(record.read_text(encoding="utf-8")) == found
    kinds = [e["ph"] for e in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    assert kinds.count("s") == kinds.count("f") > 0


@pytest.mark.timeout(120)
def test_a_file_can_say_which_experts_tokens_name(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    np.savez(path, ids=np.array([[0, 5], [-1, 5], [5, 1]]))
    small = options(ranks=2, tokens=3, hidden=8, experts=6, top_k=2, rounds=2)
    found = bench("moe", *small, "--routing", str(path))
    assert found["wrong_rounds"] == 0
    # Among 5 ids in each of 4 batches, expert 5 has 3; the mean is over 6 experts.
    assert found["expert_imbalance"] == pytest.approx(3 / (5 / 6))


@pytest.mark.timeout(120)
def test_rounds_take_the_layers_of_a_file_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "routing.safetensors"
    weights = np.full((2, 2), 0.5, ml_dtypes.bfloat16)
    save_file(
        {
            "model.layers.10.ids": np.array([[0, 1], [0, 2]], np.int32),
            "model.layers.9.ids": np.array([[0, 1], [2, 3]]),
            "model.layers.9.weights": weights,
            "other": np.zeros(3),
        },
        path,
    )
    small = options(ranks=2, tokens=2, hidden=8, experts=4, top_k=2, rounds=6)
    found = bench("moe", *small, "--routing", str(path))
    assert found["wrong_rounds"] == 0
    assert found["layers"] == [
        {"layer": "model.layers.9.ids", "expert_imbalance": 1, "rank_imbalance": 1},
        {"layer": "model.layers.10.ids", "expert_imbalance": 2, "rank_imbalance": 1.5},
    ]
    assert (found["expert_imbalance"], found["rank_imbalance"]) == (2, 1.5)


def test_layers_of_one_array_are_those_of_its_first_axis(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    ids = np.array([[[0, 1], [2, 3]], [[4, 5], [5, 0]]])
    np.savez(path, ids=ids, weights=np.arange(8.0).reshape(2, 2, 2))
    router = Router(workload(routing=str(path), ranks=1, tokens=2))
    for number in range(4):
        batch = router.batch(0, number)
        np.testing.assert_array_equal(batch.ids, ids[number % 2])
        assert batch.weights[0, 0] == 4 * (number % 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_every_byte_of_every_transfer_arrives(provider: str) -> None:
    sizes = "8,1001,64K,9M"
    found = bench("transfer", "--provider", provider, "--sizes", sizes, "--rounds", "5")
    assert (found["interface"], found["route"]) == ("Python", provider)
    assert [size["bytes"] for size in found["sizes"]] == [8, 1001, 65536, 9 << 20]
    assert all(size["wrong"] == 0 and size["rounds"] == 5 for size in found["sizes"])
    assert all(size["parts"] >= 1 and size["memcpy_gb_per_s"] > 0 for size in found["sizes"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("device", "provider", "route", "staged"),
    [
        ("cpu", "shm", "shm", None),
        ("twin", None, "copy", False),
        ("twin", "copy", "copy", False),
        ("twin", "shm", "shm", True),
        ("twin", "tcp", "tcp", True),
    ],
)
def test_every_page_of_every_list_arrives_in_its_place(
    tmp_path: Path, device: str, provider: str | None, route: str, staged: bool | None
) -> None:
    record = tmp_path / "lists.jsonl"
    over = [] if provider is None else ["--provider", provider]
    found = bench(
        *("transfer", *over, "--device", device, "--pages", "40", "--page-bytes", "3,1001,4K"),
        *("--rounds", "5", "--record", str(record)),
    )
    memory = (None, None) if device == "cpu" else (device, staged)
    assert (found["route"], found.get("device"), found.get("staged")) == (route, *memory)
    sizes = found["sizes"]
    lists = [(size["pages"], size["page_bytes"], size["bytes"]) for size in sizes]
    assert lists == [(40, 3, 120), (40, 1001, 40040), (40, 4096, 163840)]
    assert all((size["wrong"], size["rounds"]) == (0, 5) for size in sizes)
    assert all(0 < size["one_way_p50_us"] <= size["one_way_p99_us"] for size in sizes)
    assert {"commit", "machine", "weft"} < found["origin"].keys()
    assert json.loads(record.read_text(encoding="utf-8")) == found


@pytest.mark.timeout(120)
def test_contiguous_writes_take_memory_of_a_device() -> None:
    sizes = "8,1001,3M"
    found = bench("transfer", "--device", "twin", "--sizes", sizes, "--rounds", "3")
    assert (found["route"], found["device"]) == ("copy", "twin")
    assert [size["bytes"] for size in found["sizes"]] == [8, 1001, 3 << 20]
    assert all(size["wrong"] == 0 and "pages" not in size for size in found["sizes"])


def test_a_page_in_another_place_is_wrong() -> None:
    memory, places = HostMemory(), Places.of(Shape(3, 4), rank=0)
    values = np.arange(12, dtype=np.uint8).reshape(4, 3) + 1
    pages, expected = np.zeros((2, 8, 3), np.uint8)
    assert (places.pool, len({*places.destination.tolist()})) == (8, 4)
    assert places.source.tolist() != places.destination.tolist()
    memory.put(pages, places.destination, values)
    expected[places.destination] = values
    assert memory.is_equal(pages, expected)
    memory.put(pages, places.destination[[1, 0, 2, 3]], values)
    assert not memory.is_equal(pages, expected)
    memory.put(pages, places.destination, values)
    between = next(place for place in range(8) if place not in places.destination)
    pages[between, 0] = 1
    assert not memory.is_equal(pages, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfer", "--page-bytes", "4K"], "--page-bytes needs --pages"),
        (["transfer", "--pages", "2", "--sizes", "8"], "--sizes is of contiguous writes"),
        (["transfer", "--pages", "65536", "--page-bytes", "1M"], "expected at most 1G bytes"),
        (["transfer", "--pages", "65537"], "expected at most 65536"),
        (["transfer", "--pages", "2", "--page-bytes", "0"], "--page-bytes: '0': expected a size"),
        (["transfer", "--device", "rocm"], "invalid choice: 'rocm'"),
        (["moe", "--top-k", "9", "--experts", "8"], "cannot name 9 different experts of 8"),
        (["moe", "--dtype", "int8"], "dtype int8 is not supported: float32"),
        (["moe", "--tokens", "0"], "expected at least 1"),
        (["moe", "--routing", "unknown"], "'unknown' is neither uniform, zipf, incast nor"),
        (["moe", "--routing", "no.safetensors"], "there is no file no.safetensors"),
        (["moe", "--trace", "/absent/t.json"], "no directory /absent; create it first"),
        (["transfer", "--sizes", "8,many"], "'many': expected a size"),
        (["transfer", "--sizes", "0"], "'0': expected a size"),
        (["transfer", "--sizes", "2G"], "'2G': expected a size"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, "no array `ids`"),
        ({"ids": np.zeros((4, 3), int)}, r"shape \(4, 3\); \(tokens, 2\) is needed"),
        ({"ids": np.zeros((4, 2))}, "float64, not of whole numbers"),
        ({"ids": np.array([[0, 1], [6, 1]])}, "row 1 of ids names expert 6; there are 6"),
        ({"ids": np.array([[-1, -1], [3, 3]])}, "row 1 of ids names an expert twice"),
        ({"ids": np.array([[0, 1]]), "weights": np.ones((2, 2))}, "weights has shape"),
        ({"ids": np.array([[0, 1]]), "weights": np.array([[1, np.nan]])}, "not all finite"),
        ({"ids": np.array([[0, 1]]), "weights": np.array([[1, 2]])}, "not all finite"),
        ({"layers.7.ids": np.array([[0, 1], [6, 1]])}, "row 1 of layers.7.ids names expert 6"),
        ({"ids": np.array([[[0, 1]], [[2, 2]]])}, r"row 0 of ids\[1\] names an expert twice"),
        ({"ids": np.zeros((1, 1, 2), int), "weights": np.zeros((1, 2))}, "weights has shape"),
    ],
)
def test_a_routing_file_that_does_not_fit_is_refused(
    arrays: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "routing.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        workload(routing=str(path))


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_broken_routing_file_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"routing.{suffix}"
    path.write_bytes(b"PK not really")
    with pytest.raises(ValueError, match="cannot be read"):
        workload(routing=str(path))


@pytest.mark.parametrize("routing", ["uniform", "zipf", "incast"])
def test_batches_are_valid_fresh_and_repeatable(routing: str) -> None:
    router = Router(workload(routing=routing))
    batch, again, other = router.batch(1, 3), router.batch(1, 3), router.batch(1, 4)
    for one, two in zip(batch, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not (batch.tokens == other.tokens).any()
    assert ((batch.ids >= 0) & (batch.ids < 6)).all()
    assert (batch.ids[:, 0] != batch.ids[:, 1]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_check_sees_a_wrong_element(dtype: str) -> None:
    """The last few bits are within tolerance, an expert's share is not."""
    given = workload(dtype=dtype)
    batch = Router(given).batch(0, 0)
    exact = np.zeros(batch.tokens.shape)
    for slot in range(given.top_k):
        ids = batch.ids[:, slot, None]
        term = expert_output(batch.tokens, ids, given).astype(np.float64)
        exact += batch.weights[:, slot, None] * term
    right = exact.astype(batch.tokens.dtype)
    assert error_share(right, batch, given) <= 1
    swapped = right[:, ::-1].copy()
    assert error_share(swapped, batch, given) > 1


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_sizes("8, 4K,2MiB,1g") == [8, 4096, 2 << 20, 1 << 30]
