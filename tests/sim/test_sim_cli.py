"""`weft sim`: options, output, files and errors."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft import errors
from weft.cli import main
from weft.sim import schedule, simulate
from weft.sim.sweep import parse_axes
from weft.units import format_bytes, format_seconds, parse_range, parse_size

BIGRAPH = "bigraph:switches=8,endpoints=2,gbps=100,latency_us=0.5"
FAT_TREE = "fat-tree:leaves=4,spines=4,hosts=4,gbps=100,latency_us=0.5"
ALWAYS = {"time_s", "max_link_load", "cpu_s", "constants"}


def sim(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["sim", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == "", "JSON alone is written"
    found: dict[str, Any] = json.loads(output.out)
    assert set(found) >= ALWAYS
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err.splitlines()[-1]


def test_an_all_reduce_takes_the_time_of_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("allreduce", "--topology", BIGRAPH, "--algorithm", "hdrm", "--bytes", "1MiB")
    found = sim(capsys, *arguments, "--set", "message_latency_s=1e-6")
    assert found["scenario"] == "collective"
    assert found["results"]["ranks"] == 16
    assert found["max_link_load"] == 1
    # 8 steps over three links each; twice 15/16 of the bytes at 12.5 GB/s.
    expected = 8 * (1e-6 + 3 * 0.5e-6) + 2 * 15 / 16 * (1 << 20) / 12.5e9
    assert found["time_s"] == pytest.approx(expected, rel=1e-6)
    assert found["constants"]["message_latency_s"] == 1e-6
    assert len(found["links"]) <= 8


def test_equal_seeds_give_equal_results(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("allreduce", "--topology", FAT_TREE, "--algorithm", "hd", "--routing", "ecmp")
    runs = [sim(capsys, *arguments, "--seed", seed) for seed in ("1", "1", "2", "3", "4")]
    for run in runs:
        del run["cpu_s"]
    assert runs[0] == runs[1]
    assert len({run["time_s"] for run in runs}) > 1


def test_a_sweep_has_every_point(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    found = sim(
        capsys,
        *("allreduce", "--topology", BIGRAPH, "--algorithm", "ring,hdrm"),
        *("--sweep", "bytes=1KiB..1MiB:x32", "--sweep", "ranks=8,16", "--plot", str(plot)),
    )
    places = {tuple(point["at"].values()) for point in found["points"]}
    assert len(places) == len(found["points"]) == 12
    assert ("hdrm", 1024, 16) in places
    for point in found["points"]:
        assert set(point) >= ALWAYS
        assert point["results"]["bytes"] == point["at"]["bytes"]
    assert found["plot"] == str(plot)
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("picture", ["links", "timeline"])
def test_pictures_and_traces_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str, picture: str
) -> None:
    plot, trace = tmp_path / f"run.{suffix}", tmp_path / "trace.json"
    found = sim(
        capsys,
        *("moe", "--topology", FAT_TREE, "--ranks", "8", "--tokens", "16", "--experts", "16"),
        *("--plot", str(plot), "--picture", picture, "--trace", str(trace)),
    )
    assert "trace" in found
    assert plot.stat().st_size > 5000
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(8))
    assert {event["name"].split()[0] for event in slices} == {"dispatch", "combine"}
    assert all(event["dur"] > 0 for event in slices)


def test_the_same_picture_is_the_same_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("allreduce", "--topology", BIGRAPH, "--plot")
    for name in ("a.svg", "b.svg"):
        sim(capsys, *arguments, str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_json_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "allreduce", "--topology", BIGRAPH, "--algorithm", "ring,tree"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["algorithm", "time"]
    assert [line.split()[0] for line in lines[2:4]] == ["ring", "tree"]
    assert main(["sim", "query", "--topology", FAT_TREE, "--rate", "1000", "--queries", "50"]) == 0
    assert "Busiest links" in capsys.readouterr().out


def test_moe_has_the_rows_of_the_planner(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = ["moe", "--topology", FAT_TREE, "--experts", "16", "--top-k", "2", "--hidden", "64"]
    shape += ["--ranks", "8", "--tokens", "4", "--rounds", "1"]
    # All tokens choose rank 0's two experts, as a distribution and as a file.
    incast = sim(capsys, *shape, "--token-routing", "incast")
    file = tmp_path / "routing.npz"
    np.savez(file, ids=np.array([[0, 1]] * 3))
    traced = sim(capsys, *shape, "--token-routing", str(file))
    for found in (incast, traced):
        rows = found["results"]["rows_per_rank"]
        assert rows == {"nic": 7 * 4 / 8, "nvlink": 0, "kept": 4 / 8}
        assert found["results"]["rank_imbalance"] == 8
    assert incast["results"] == traced["results"]
    by_expert = sim(capsys, *shape, "--token-routing", "incast", "--copies", "expert")
    assert by_expert["results"]["rows_per_rank"]["nic"] == 7
    within = sim(capsys, *shape, "--nvlink", "8:300:1")
    assert within["results"]["rows_per_rank"]["nic"] == 0
    assert within["max_link_load"] == 0
    zipf = sim(capsys, *shape, "--token-routing", "zipf:2", "--sweep", "seed=1,2")
    assert len(zipf["points"]) == 2


def test_fusing_gains_at_most_the_overlapped_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = sim(capsys, "dlrm", "--topology", FAT_TREE, "--ranks", "16")["results"]
    hidden = min(found["pooling_s"], found["forward_exchange_s"]["unfused"])
    assert 0 < found["gain"] < 1
    assert found["unfused_s"] - found["fused_s"] <= hidden * 1.001
    assert found["forward_exchange_s"]["fused"] < found["forward_exchange_s"]["unfused"]
    alone = sim(capsys, "dlrm", "--topology", FAT_TREE, "--ranks", "16", "--variant", "fused")
    assert alone["results"]["gain"] is None
    assert alone["results"]["fused_s"] == found["fused_s"]


def test_the_throughput_of_queries_is_bounded_by_the_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["query", "--topology", FAT_TREE, "--front-ends", "1", "--accelerators", "8"]
    arguments += ["--queries", "2000", "--service-us", "100"]
    slow = sim(capsys, *arguments, "--arrivals", "offline", "--bytes", "1MiB")["results"]
    # A 12.5 GB/s NIC carries 11,921 queries a second, eight accelerators take 80,000.
    assert slow["throughput_without_network_per_s"] == pytest.approx(80_000, rel=0.01)
    assert slow["throughput_per_s"] == pytest.approx(12.5e9 / (1 << 20), rel=0.02)
    assert slow["throughput_loss"] == pytest.approx(0.85, abs=0.01)
    calm = sim(capsys, *arguments, "--rate", "1000")["results"]
    assert calm["throughput_loss"] == pytest.approx(0, abs=0.01)
    assert calm["latency"]["min_s"] > 100e-6
    assert calm["latency"]["p50_s"] <= calm["latency"]["p99_s"] <= calm["latency"]["max_s"]


def test_training_overlaps_gradients_with_compute(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("train", "--topology", FAT_TREE, "--model", "resnet50", "--algorithm", "ring")
    overlapped = sim(capsys, *arguments)
    waiting = sim(capsys, *arguments, "--no-overlap")
    assert overlapped["time_s"] < waiting["time_s"]


def test_a_scenario_may_come_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("allreduce", "--topology", BIGRAPH, "--algorithm", "ring")
    found = sim(capsys, *arguments)
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(found["spec"]), encoding="utf-8")
    assert sim(capsys, "run", str(file))["time_s"] == found["time_s"]


def test_jobs_on_one_network_slow_each_other_down(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    collective = {"algorithm": "ring", "bytes": 1 << 24}
    moe = {"ranks": 16, "tokens": 128, "rounds": 2, "nvlink": {"ranks": 4, "bytes_per_s": 3e11}}
    query = {"front_ends": 2, "accelerators": 4, "queries": 500, "rate_per_s": 1e5}
    cluster = {"topology": FAT_TREE, "routing": "ecmp", "seed": 3}
    times = []
    for jobs in (
        [{"collective": collective}],
        [{"collective": collective}, {"moe": moe}, {"query": query}],
    ):
        file = tmp_path / "mixture.json"
        mixture = {"scenario": "mixture", "cluster": cluster, "jobs": jobs}
        file.write_text(json.dumps(mixture), encoding="utf-8")
        found = sim(capsys, "run", str(file))
        times.append(found["results"]["jobs"][0]["time_s"])
    assert times[1] > 1.05 * times[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("allreduce", "--topology", "ring:nodes=3"), "ring"),
        (("allreduce", "--topology", "bigraph:switches=0,endpoints=4"), "switches"),
        (("allreduce", "--topology", "no-such-file.json"), "no-such-file.json"),
        (("allreduce", "--topology", BIGRAPH, "--algorithm", "magic"), "magic"),
        (("allreduce", "--topology", BIGRAPH, "--algorithm", "ring,ring"), "--algorithm"),
        (("allreduce", "--topology", BIGRAPH, "--ranks", "17"), "16"),
        (("allreduce", "--topology", BIGRAPH, "--ranks", "0"), "at least 1"),
        (("allreduce", "--topology", BIGRAPH, "--bytes", "1.5"), "whole number of bytes"),
        (("allreduce", "--topology", BIGRAPH, "--bytes", "lots"), "lots"),
        (("allreduce", "--topology", BIGRAPH, "--sweep", "time=1"), "bytes=..., ranks=..."),
        (("allreduce", "--topology", BIGRAPH, "--sweep", "bytes=2..1"), "above its end"),
        (("allreduce", "--topology", BIGRAPH, "--set", "speed=9"), "speed"),
        (("allreduce", "--topology", BIGRAPH, "--set", "post_s=-1"), "post_s"),
        (("allreduce", "--topology", BIGRAPH, "--set", "post_s=nan"), "finite"),
        (("allreduce", "--topology", BIGRAPH, "--fault", "U0,L9,0"), "L9"),
        (("allreduce", "--topology", BIGRAPH, "--straggler", "99,2"), "99"),
        (("allreduce", "--topology", BIGRAPH, "--plot", "picture.gif"), ".svg"),
        (
            ("allreduce", "--topology", BIGRAPH, "--trace", "/no-such-directory/t.json"),
            "/no-such-directory",
        ),
        (("moe", "--topology", FAT_TREE, "--ranks", "17"), "endpoints"),
        (("moe", "--topology", FAT_TREE, "--dtype", "int4"), "int4"),
        (("moe", "--topology", FAT_TREE, "--token-routing", "x.csv"), "x.csv"),
        (("moe", "--topology", FAT_TREE, "--nvlink", "8"), "--nvlink"),
        (("moe", "--topology", FAT_TREE, "--tokens", "99999999"), "tokens times top_k"),
        (("query", "--topology", FAT_TREE), "rate_per_s"),
        (("query", "--topology", FAT_TREE, "--rate", "0"), "rate_per_s"),
        (("train", "--topology", FAT_TREE, "--model", "gpt"), "gpt"),
        (("dlrm", "--ranks", "8"), "--topology"),
        (("run", "no-such-file.json"), "no-such-file.json: no such file"),
        (("run", "no-such-file.json", "--seed", "1"), "--seed"),
        (("query", "--topology", FAT_TREE, "--seed", "-1"), "--seed"),
        (("query", "--topology", FAT_TREE, "--sweep", "seed=-1"), "-1"),
    ],
)
def test_invalid_options_are_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    message = refusal(capsys, *arguments)
    assert expected in message


def test_a_trace_of_a_sweep_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "t.json")
    arguments = ("allreduce", "--topology", BIGRAPH, "--sweep", "ranks=8,16", "--trace", trace)
    assert "single run" in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON at line 1, column 2"),
        ("[1]", "expected a JSON object"),
        ("{}", 'expected a field "scenario"'),
        ('{"scenario": "nonsense"}', "nonsense"),
        ('{"scenario": "collective", "cluster": {"topology": "x"}}', "job"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(text, encoding="utf-8")
    assert expected in refusal(capsys, "run", str(file))


def test_a_failed_link_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "allreduce", "--topology", BIGRAPH, "--algorithm", "hdrm"]
    assert main([*arguments, "--fault", "U0,L0,0", "--json"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "U0" in output.err
    assert "L0" in output.err


def test_sizes_and_ranges_are_parsed() -> None:
    assert parse_size("1KiB") == parse_size("1k") == 1024
    assert parse_size("0.5 MiB") == 1 << 19
    assert parse_size("3") == 3
    assert parse_size("1MB") == parse_size("1000 kB") == 10**6
    assert parse_size("1M") == parse_size("1Mi") == parse_size("1MiB") == 1 << 20
    assert parse_size("4B") == 4
    assert parse_range("1KiB..8KiB", sizes=True) == [1024, 2048, 4096, 8192]
    assert parse_range("16,32", sizes=False) == [16, 32]
    assert parse_range("1..100:x10", sizes=False) == [1, 10, 100]
    assert [axis.name for axis in parse_axes(["ranks=1,2"], ("ranks",))] == ["ranks"]
    for wrong in ("", "1..", "1..8:y2", "1..8:x1", "1,1", "0", "1..2000000:x1"):
        with pytest.raises(ValueError, match=r"."):
            parse_range(wrong, sizes=False)
    assert format_bytes(1536) == "1.5 KiB"
    assert format_seconds(2.5e-6) == "2.5 µs"


def test_control_c_ends_the_planning_of_moe_rounds() -> None:
    # Without its own handler it would ignore the signal if the tests run in the background.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from weft.cli import main\n"
        f"sys.exit(main(['sim', 'moe', '--topology', {FAT_TREE!r}, '--tokens', '500000',"
        " '--rounds', '64', '--json']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with process:
        time.sleep(3)
        assert process.poll() is None, "planning takes minutes"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=20) == 128 + signal.SIGINT
        finally:
            process.kill()


def test_progress_is_reported_to_the_calling_thread_and_can_end_a_run() -> None:
    spec = {"scenario": "collective", "cluster": {"topology": BIGRAPH}, "job": {"bytes": 1 << 20}}
    threads = []

    def report(*_: object) -> bool:
        threads.append(threading.get_ident())
        return True

    simulate(spec, report)
    assert set(threads) == {threading.get_ident()}
    with pytest.raises(errors.SimulationError, match="cancelled"):
        simulate(spec, lambda *_: False)
    with pytest.raises(ZeroDivisionError):
        simulate(spec, lambda *_: 1 // 0 > 0)


def test_without_matplotlib_the_error_names_the_package() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from weft.cli import main\n"
        f"main(['sim', 'allreduce', '--topology', {BIGRAPH!r}, '--json'])\n"
        f"main(['sim', 'allreduce', '--topology', {BIGRAPH!r}, '--plot', 'x.svg'])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 2
    assert "time_s" in json.loads(result.stdout)
    assert "pip install 'weft[plot]'" in result.stderr


def test_a_schedule_as_json_takes_the_time_of_its_algorithm() -> None:
    job = {"algorithm": "hd", "ranks": 12, "bytes": 1 << 20}
    cluster = {"topology": "bigraph:switches=4,endpoints=3"}
    times = [
        simulate({"scenario": "collective", "cluster": cluster, "job": each})["time_s"]
        for each in (job, {"program": schedule(job), "bytes": 1 << 20})
    ]
    assert times[0] == times[1]
    with pytest.raises(errors.ConfigurationError, match="operations"):
        schedule({"algorithm": "ring", "ranks": 4096, "bytes": 4})
