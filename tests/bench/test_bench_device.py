"""`weft bench moe --device`: measurements and checks, on the CPU twin."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from weft import _native
from weft.bench import moe_device
from weft.bench.device.cases import CASES, Case, choose, small
from weft.bench.device.check import Plan, difference, error_share, expert_outputs, plan
from weft.bench.device.inputs import Source, cast, dequantise, owners
from weft.bench.device.machine import Cuda, Twin, links, missing
from weft.bench.device.summary import summarise
from weft.cli import main

TINY: dict[str, Any] = {"tokens": 5, "hidden": 192, "experts": 7, "top_k": 3, "slots": 2}
TINY |= {"samples": 2}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def native() -> None:
    if not hasattr(_native, "DeviceAllToAll"):
        pytest.skip("needs a native module with DeviceAllToAll; this one was built without")


def tiny(**changes: Any) -> Case:
    return Case("tiny", **(TINY | changes))


# ---- cases


def test_cases_have_names_of_their_own_and_the_decode_step_comes_first() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert names[0] == "decode"
    assert all(case.seconds < case.limit for case in CASES)
    swept = {case.name.split(" ")[1] for case in CASES if case.name.startswith("sweep ")}
    assert swept == {"routing", "hidden", "top_k", "experts"}


def test_cases_are_named_alone_by_their_beginning_or_all() -> None:
    assert choose("all") == list(CASES)
    assert [case.name for case in choose("one token, decode")] == ["one token", "decode"]
    assert [case.name for case in choose("start")] == ["start cold", "start warm"]
    with pytest.raises(ValueError, match="no case 'unknown'; there are decode, harness"):
        choose("decode,unknown")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_has_a_small_one_and_goes_through_json(case: Case) -> None:
    less = small(case)
    assert Case(**json.loads(json.dumps(less.to_json()))) == less
    assert less.tokens * less.hidden <= 6 * 256
    assert (less.kind, less.wire, less.layout) == (case.kind, case.wire, case.layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"top_k": 9, "experts": 8}, "cannot name 9 different experts of 8"),
        ({"dtype": "int8"}, "dtype int8 is not measured here"),
        ({"wire": "float16"}, "travels as it is or as float8_e4m3fn, not as float16"),
        ({"layout": "heap"}, "layout 'heap' is none of"),
        ({"kind": "other"}, "not 'other'"),
    ],
)
def test_a_case_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_bytes_on_the_wire_are_those_of_codes_scales_and_answers() -> None:
    decode = CASES[0]
    assert (decode.token_bytes, decode.reply_bytes) == (7168 + 56 * 4, 2 * 7168)
    wide = tiny(wire="bfloat16")
    assert (wide.token_bytes, wide.scales) == (2 * 192, 0)


# ---- inputs and the reference


def test_a_token_goes_once_to_each_rank_that_owns_one_of_its_experts() -> None:
    ids = np.array([[0, 1, 6], [-1, -1, -1], [3, 4, -1]])
    assert owners(tiny(), 2, ids).tolist() == [[True, True], [False, False], [False, True]]
    assert owners(tiny(), 3, ids).tolist()[2] == [False, True, True]


@pytest.mark.torch
def test_codes_and_scales_are_within_half_a_step(torch: Any) -> None:
    values = torch.randn(4, 192, generator=torch.Generator().manual_seed(1))
    values[1] = 0
    values[2, 130] = 1e4
    codes, scales = cast(torch, values)
    assert (codes.shape, scales.shape) == ((4, 192), (4, 2))
    assert scales[1].tolist() == [1, 1]
    assert scales[2, 1] == torch.tensor(1e4) / 448
    error = (dequantise(torch, codes, scales) - values).abs()
    step = scales.repeat_interleave(128, dim=1)[:, :192]
    assert (error <= values.abs() * 2.0**-4 + step * 2.0**-10).all()


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded"])
def test_positions_are_those_of_a_loop_over_experts_sources_and_tokens(
    torch: Any, layout: str
) -> None:
    case = tiny(layout=layout)
    source = Source(case, Twin(), ranks=2)
    for rank, experts in ((0, range(3)), (1, range(3, 7))):
        wanted: list[tuple[Any, ...]] = []
        for local, expert in enumerate(experts):
            base = local * 10 if layout == "padded" else len(wanted)
            group = []
            for sender in range(2):
                ids, weights = source.routes(sender, 4)
                mine = [t for t in range(5) if set(ids[t]) & set(experts)]
                group += [
                    (
                        local,
                        sender,
                        t,
                        5 * sender + mine.index(t),
                        weights[t, list(ids[t]).index(expert)],
                    )
                    for t in range(5)
                    if expert in ids[t]
                ]
            wanted += [(base + place, *entry) for place, entry in enumerate(group)]
        found = plan(case, source, rank, 4)
        columns = (found.position, found.expert, found.source, found.token, found.row, found.weight)
        assert list(zip(*columns, strict=True)) == wanted
        assert found.counts.sum() == len(wanted)
        assert len(found.offsets) == len(experts) + 1


@pytest.mark.torch
def test_dense_rows_are_those_of_a_loop_over_sources_and_tokens(torch: Any) -> None:
    case = tiny(layout="dense")
    source = Source(case, Twin(), ranks=2)
    for rank, experts in ((0, range(3)), (1, range(3, 7))):
        wanted, begins, row = set(), [0], 0
        for sender in range(2):
            ids, weights = source.routes(sender, 4)
            for token in range(5):
                here = [k for k in range(case.top_k) if ids[token, k] in experts]
                for k in here:
                    wanted.add((row, k, ids[token, k] - experts.start, weights[token, k]))
                row += bool(here)
            begins.append(row)
        found = plan(case, source, rank, 4)
        columns = (found.position, found.choice, found.expert, found.weight)
        assert set(zip(*columns, strict=True)) == wanted
        assert found.offsets.tolist() == begins
        assert found.counts.sum() == len(found.position) == len(wanted)


class Landed:
    """A rank's received tokens, made from the plan, as the reference's input."""

    def __init__(self, torch: Any, case: Case, source: Source, expected: Plan, number: int) -> None:
        end = max(int(expected.offsets[-1]), 1)
        self.expert_counts, self.expert_offsets = expected.counts, expected.offsets
        self.rows, self.weights = np.full(end, -1), np.zeros(end, np.float32)
        self.rows[expected.position] = expected.row
        self.weights[expected.position] = expected.weight
        self.tokens = torch.zeros((end, case.hidden), dtype=torch.float8_e4m3fn)
        self.scales = torch.zeros((end, case.scales))
        for at in range(len(expected.position)):
            codes, scales = source.wire(int(expected.source[at]), number)
            place, token = int(expected.position[at]), int(expected.token[at])
            self.tokens.view(torch.uint8)[place] = codes.view(torch.uint8)[token]
            self.scales[place] = scales[token]


@pytest.mark.torch
def test_the_check_of_dispatch_sees_a_wrong_bit_anywhere(torch: Any) -> None:
    case, twin = tiny(), Twin()
    source = Source(case, twin, ranks=2)
    expected = plan(case, source, 1, 0)

    def wrong(change: Any) -> str | None:
        landed = Landed(torch, case, source, expected, 0)
        change(landed)
        return difference(case, twin, source, 0, expected, landed)

    def flip(landed: Landed) -> None:
        landed.tokens.view(torch.uint8)[2, 77] ^= 1

    assert wrong(lambda landed: None) is None
    assert wrong(flip) == "tokens from rank 0 are not those that it sent"
    for name, message in (
        ("expert_counts", "expert_counts"),
        ("expert_offsets", "expert_offsets"),
        ("rows", "rows"),
        ("weights", "weights"),
        ("scales", "scales from rank 0"),
    ):

        def raised(landed: Landed, name: str = name) -> None:
            changed = getattr(landed, name)
            changed = changed.copy() if isinstance(changed, np.ndarray) else changed
            changed[0] += 1
            setattr(landed, name, changed)

        assert str(wrong(raised)).startswith(message), name


@pytest.mark.torch
def test_the_check_of_combine_forgives_a_rounding_and_no_more(torch: Any) -> None:
    case, twin = tiny(), Twin()
    source = Source(case, twin, ranks=2)
    codes, scales = source.wire(0, 0)
    ids, weights = source.routes(0, 0)
    exact = torch.zeros(5, 192, dtype=torch.float64)
    for slot in range(3):
        term = expert_outputs(case, torch, codes, scales, torch.from_numpy(ids[:, slot]))
        exact += term.double() * torch.from_numpy(weights[:, slot]).double()[:, None]
    right = exact.bfloat16()
    assert error_share(case, twin, source, 0, 0, right) <= 1
    assert error_share(case, twin, source, 0, 0, right.roll(1, dims=1)) > 1
    right[3, 3] = float("nan")
    assert error_share(case, twin, source, 0, 0, right) == float("inf")


# ---- rank results


def rank(times: dict[str, list[float]], **changes: Any) -> dict[str, Any]:
    facts = {"heap_bytes": 1 << 20, "path": "latency", "num_sms": 8, "positions": 64}
    given: dict[str, Any] = {"times": times, "wrong": 0, "largest_share_of_bound": 0.5}
    given["facts"] = facts | {"build": {"seconds": 1.5, "cached": False}}
    return given | changes


def test_the_slowest_rank_is_the_one_with_the_largest_median() -> None:
    ranks = [
        rank({"dispatch": [10.0, 10.0, 90.0]}, rows_sent=4, dispatch_bytes=4000, combine_bytes=0),
        rank({"dispatch": [20.0, 20.0, 20.0]}, rows_sent=8, dispatch_bytes=8000, combine_bytes=0),
    ]
    found = summarise(ranks)
    time = found["times"]["dispatch"]
    assert (time["slowest_rank"], time["slowest_p50_us"], time["p50_us"]) == (1, 20, 20)
    assert (time["min_us"], time["samples"]) == (10, 3)
    # 6000 bytes on average, in 20 microseconds.
    assert found["bytes"]["dispatch_gb_per_s"] == pytest.approx(0.3)
    assert found["bytes"]["combine_gb_per_s"] is None
    assert found["bytes"]["rows_per_rank"] == 6


def test_links_are_told_in_words() -> None:
    switch = {"bus_id": "A", "nvlinks": ["S"] * 18}
    assert links([switch, switch]) == "18 NVLinks each, to a switch"
    assert links([{"bus_id": "A", "nvlinks": ["b"]}, {"bus_id": "B", "nvlinks": ["a"]}]) == (
        "1 NVLinks each, to other GPUs"
    )
    assert links([{"bus_id": "A", "nvlinks": []}]) == "no NVLink"
    assert links(None) == "not known (no NVML)"


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "decode"], "--cases needs --device cuda or twin"),
        (["--num-sms", "8"], "--num-sms needs --device"),
        (["--device", "twin", "--trace", "t.json"], "--trace is of counted writes"),
        (["--device", "twin", "--budget", "0"], "--budget 0.0: expected"),
        (["--device", "twin", "--cases", "dekode"], "there is no case 'dekode'"),
        (["--device", "twin", "--cases", "all", "--tokens", "4"], "--cases settles --tokens"),
        (["--device", "twin", "--wire", "float16"], "travels as it is or as"),
        (["--device", "twin", "--routing", "unknown"], "'unknown' is neither uniform"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "moe", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_message_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = "--device cuda needs a GPU, and there is none: no driver"
    monkeypatch.setattr(moe_device, "missing", lambda kind: lacking)
    assert main(["bench", "moe", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == f"weft bench moe: {lacking}\n"


@pytest.mark.torch
def test_what_is_missing_is_named(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device cuda needs a GPU, and there is none" in str(missing("cuda"))
    assert missing("twin") is None


def test_without_pytorch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'weft[torch]'" in str(missing("twin"))


# ---- all cases, on the twin


SCHEMA: dict[str, Any] = {
    "benchmark": str,
    "case": str,
    "kind": str,
    "status": str,
    "reason": str | None,
    "workload": dict,
    "result": dict | None,
    "seconds": float | None,
    "origin": dict,
}


def check_record(record: dict[str, Any]) -> None:
    assert record.keys() == SCHEMA.keys()
    for name, kind in SCHEMA.items():
        assert isinstance(record[name], kind), (name, record[name])
    assert record["benchmark"] == "gpu-moe"
    assert Case(**record["workload"]).name == record["case"]
    assert {"at", "weft", "commit", "profile", "machine"} <= record["origin"].keys()
    if record["status"] != "ok":
        assert record["reason"]
        return
    assert {"device", "ranks", "gpus", "versions"} <= record["origin"].keys()
    result = record["result"]
    assert result["wrong"] == 0
    assert 0 < result["largest_share_of_bound"] <= 1
    assert result["heap_bytes"] > 0
    for time in result["times"].values():
        assert 0 < time["min_us"] <= time["p50_us"] <= time["p99_us"]
        assert time["slowest_rank"] in range(record["origin"]["ranks"])


def run(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "weft", "bench", "moe", "--device", "twin", "--json"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == status, done.stderr
    records: list[dict[str, Any]] = json.loads(done.stdout)["cases"]
    for record in records:
        check_record(record)
    return records


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(520)
@pytest.mark.usefixtures("native", "torch")
@pytest.mark.parametrize("layout", ["contiguous", "indexed", "padded", "dense"])
def test_one_workload_is_measured_and_checked(layout: str, tmp_path: Path) -> None:
    small = ["--tokens=5", "--hidden=192", "--experts=7", "--top-k=3", "--rounds=16"]
    file = tmp_path / "gpu.jsonl"
    records = run("--ranks=3", f"--layout={layout}", *small, f"--record={file}")
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    (record,) = records
    assert record["origin"]["device"] == "twin"
    phases = {"round", "dispatch", "combine", "nothing", "dispatch send", "dispatch recv"}
    assert record["result"]["times"].keys() == phases | {"combine send", "combine recv"}
    assert record["result"]["bytes"]["dispatch_per_rank"] > 0
    assert record["result"]["beside"]["backend"] == "gloo"
    assert record["result"]["beside"]["wrong"] == 0


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(520)
@pytest.mark.usefixtures("native", "torch")
def test_every_kind_of_case_is_measured() -> None:
    names = "decode,harness,one token,prefill 24,modes,late,decode given fp8,start,gemm 16"
    records = run("--cases", names, "--ranks=2")
    outcomes = {record["case"]: record["status"] for record in records}
    assert outcomes.pop("gemm 16") == "skipped"
    assert set(outcomes.values()) == {"ok"}
    by_case = {record["case"]: record["result"] for record in records}
    assert {"cold dispatch", "cold combine"} <= by_case["decode"]["times"].keys()
    assert {"eager once pair", "graph between pair"} <= by_case["harness"]["times"].keys()
    calls = {"dispatch", "combine", "dispatch send", "dispatch out=", "combine out="}
    assert set(by_case["modes"]["host_us"]) >= calls
    assert by_case["late"]["late_rank"] == 1
    assert by_case["late"]["of_late_rank"]["late dispatch"]["p50_us"] > 0
    assert len(by_case["start cold"]["constructor_seconds"]) == 2


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(520)
@pytest.mark.usefixtures("native", "torch")
def test_a_case_that_fails_is_kept_and_the_others_go_on(tmp_path: Path) -> None:
    """The all-to-all itself rejects 20-byte rows, after ranks start."""
    bad = tiny(hidden=10, wire="bfloat16", beside=False)
    good = Case("good", **(TINY | {"beside": False}))
    options = moe_device.Options("twin", ranks=2, progress=False, record=tmp_path / "lines.jsonl")
    first, second = moe_device.measure([bad, good], options)
    check_record(first)
    check_record(second)
    assert (first["status"], second["status"]) == ("failed", "ok")
    assert "rank 0" in first["reason"]
    assert "make hidden a multiple of 8" in first["reason"]


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(520)
@pytest.mark.usefixtures("native", "torch")
def test_what_there_is_no_time_for_is_skipped_and_said_so() -> None:
    (record,) = run("--cases", "decode", "--budget", "5", "--ranks=2")
    assert (record["status"], record["reason"]) == ("skipped", "the budget was spent")


def test_a_graph_keeps_the_tensors_of_its_work_until_it_is_dropped() -> None:
    device = Cuda.__new__(Cuda)
    device.torch = MagicMock()

    class Tensor:
        pass

    def work_of(tensor: Tensor) -> Callable[[], None]:
        def work() -> None:
            assert tensor is not None

        return work

    tensor = Tensor()
    alive = weakref.ref(tensor)
    replay = device.capture(work_of(tensor))
    del tensor
    gc.collect()
    assert alive() is not None
    replay()
    assert device.torch.cuda.CUDAGraph.return_value.replay.call_count == 1
    del replay
    gc.collect()
    assert alive() is None
