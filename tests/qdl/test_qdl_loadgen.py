"""LoadGen over accelerator nodes; `make test-loadgen` builds LoadGen's library first."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from weft.qdl import Accelerator, Counts, Tensor, Test, bench, description

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    "TEST_LOADGEN" not in os.environ,
    reason="TEST_LOADGEN is not set; `make test-loadgen` builds LoadGen's library and sets it",
)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes from `bench.accelerator` have the secret of this process; front ends need it too."""
    monkeypatch.setenv("WEFT_SECRET", bench.own_secret())


COMMAND = [sys.executable, "-m", "weft", "qdl"]
BYTES = 256


def run(*options: str, status: int = 0) -> dict[str, Any]:
    """A command's JSON output."""
    done = subprocess.run(
        [*COMMAND, *options, "--json"], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    assert done.returncode == status, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def nodes(*each: str) -> Iterator[list[str]]:
    """Options for nodes with these options, in separate processes."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for index, options in enumerate(each):
            named = ["--bytes", str(BYTES), "--name", f"n{index}", *options.split()]
            addresses.append(stack.enter_context(bench.accelerator(named))["address"])
        yield [option for address in addresses for option in ("--node", address)]


def checksum(sample: bytes) -> str:
    """The checksum model's answer, as LoadGen logs it."""
    weighted = np.frombuffer(sample, np.uint8).astype(np.uint64) * np.arange(1, len(sample) + 1)
    return int(weighted.sum()).to_bytes(8, "little").hex().upper()


def accuracy_log(logs: Path) -> dict[int, str]:
    """An accuracy run's answers by sample."""
    entries = json.loads((logs / "mlperf_log_accuracy.json").read_text(encoding="utf-8"))
    return {entry["qsl_idx"]: entry["data"] for entry in entries}


def test_every_answer_of_two_nodes_is_that_of_its_sample(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).bytes(BYTES * 300)
    (tmp_path / "samples").write_bytes(samples)
    with nodes("--model checksum --provider tcp", "--model checksum --provider shm") as options:
        found = run(
            *("frontend", *options, "--scenario", "Offline", "--mode", "accuracy", "--checksum"),
            *("--bytes", str(BYTES), "--samples", "300", "--performance-samples", "50"),
            *("--data", str(tmp_path / "samples"), "--logs", str(tmp_path / "logs")),
        )
    assert (found["valid"], found["counts"]["failed"]) == (None, 0)
    assert found["counts"]["answered"] == found["counts"]["issued"] >= 300
    expected = {at: checksum(samples[at * BYTES : (at + 1) * BYTES]) for at in range(300)}
    assert accuracy_log(tmp_path / "logs") == expected


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_the_bench_measures_both_ways(provider: str) -> None:
    options = ("--model", "noop", "--bytes", "1024", "--duration", "0.2", "--provider", provider)
    found = run("bench", *options, "--scenario", "SingleStream")
    network = found["network"]
    assert network["sut_name"].startswith("Weft Network SUT: 127.0.0.1:")
    assert found["in_process"]["sut_name"] == "Weft in process"
    rate = network["samples_per_second"]
    assert found["ratio"] == pytest.approx(rate / found["in_process"]["samples_per_second"])
    assert network["ingress_bytes_per_second"] == pytest.approx(rate * 1024)
    assert network["egress_bytes_per_second"] == pytest.approx(rate * 8)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_queries_pass_with_tls_of_payloads(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {
        "WEFT_TLS_CERT": str(certificate / "node.pem"),
        "WEFT_TLS_KEY": str(certificate / "node.key"),
        "WEFT_TLS_CA": str(certificate / "ca.pem"),
        "WEFT_TLS_PAYLOADS": "1",
    }.items():
        monkeypatch.setenv(variable, value)
    command = ("frontend", "--scenario", "Offline", "--mode", "accuracy", "--bytes", str(BYTES))
    with nodes("--model checksum --provider tcp") as options:
        found = run(*command, *options, "--checksum", "--logs", str(tmp_path / "logs"))
        monkeypatch.delenv("WEFT_TLS_PAYLOADS")
        refused = subprocess.run(
            [*COMMAND, *command, *options, "--logs", str(tmp_path / "refused")],
            capture_output=True,
            text=True,
            check=False,
        )
    assert found["counts"]["failed"] == 0
    assert found["counts"]["answered"] == found["counts"]["issued"] > 0
    assert refused.returncode == 1
    assert "WEFT_TLS_PAYLOADS=1" in refused.stderr


def test_a_server_test_names_all_nodes_and_writes_the_description(tmp_path: Path) -> None:
    with nodes("", "") as options:
        found = run(
            *("frontend", *options, "--scenario", "Server", "--target-qps", "1000", "--coalesce"),
            *("--target-latency", "1", "--duration", "0.8", "--min-queries", "600"),
            *("--bytes", str(BYTES), "--logs", str(tmp_path)),
        )
    assert found["sut_name"] == "Weft Network SUT: n0, n1"
    assert found["valid"] is True
    keys = json.loads((tmp_path / description.FILE).read_text(encoding="utf-8"))
    assert tuple(keys) == description.KEYS
    detail = (tmp_path / "mlperf_log_detail.txt").read_text(encoding="utf-8")
    assert '"requested_server_coalesce_queries", "value": true' in detail


def test_a_user_conf_comes_before_options(tmp_path: Path) -> None:
    conf = tmp_path / "user.conf"
    conf.write_text("*.Offline.target_qps = 777\n*.Offline.min_duration = 50\n", encoding="utf-8")
    found = run(
        *("frontend", "--in-process", "--scenario", "Offline", "--target-qps", "5"),
        *("--bytes", "64", "--user-conf", str(conf), "--logs", str(tmp_path / "logs")),
        status=1,
    )
    assert float(found["summary"]["target_qps"]) == 777


#: The model takes 300 µs a query, so that answers without it are far faster.
AUDITED = "--model checksum --work 0.0003"


def audit(name: str, tmp_path: Path, *more: str, status: int) -> list[str]:
    """Audit verdict details."""
    with nodes(AUDITED) as options:
        found = run(
            *("audit", name, *options, "--scenario", "SingleStream", "--target-qps", "1000000"),
            *("--duration", "0.3", "--min-queries", "100", "--bytes", str(BYTES)),
            *("--samples", "512", "--logs", str(tmp_path), *more),
            status=status,
        )
    assert found["passed"] == (status == 0)
    details: list[str] = found["details"]
    return details


def test_test01_passes(tmp_path: Path) -> None:
    with nodes("--model checksum --work 0.001") as options:
        done = subprocess.run(
            [
                *(*COMMAND, "audit", "TEST01", *options, "--scenario", "Offline", "--json"),
                *("--target-qps", "1000", "--duration", "0.5", "--min-queries", "100"),
                *("--bytes", str(BYTES), "--samples", "512", "--logs", str(tmp_path)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    # Two runs' rates on a busy machine may differ by more than the audit permits.
    assert done.stdout, done.stderr
    answers = json.loads(done.stdout)["details"][1]
    assert answers.endswith("answers equal those of the accuracy run"), answers


def test_test04_detects_kept_answers(tmp_path: Path) -> None:
    (detail,) = audit("TEST04", tmp_path, "--kept-answers", "16", status=1)
    assert float(detail.rpartition("speed ")[2].split()[0]) > 2, detail


def test_a_python_model_answers_and_its_exceptions_fail_their_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    batches: list[int] = []

    def model(x: np.ndarray[Any, Any]) -> Any:
        batches.append(len(x))
        if len(batches) == 2:
            raise ValueError("no answer")
        return x.sum(axis=1, dtype=np.int32, keepdims=True)

    samples = np.random.default_rng(2).integers(0, 256, (64, 16), np.uint8)
    (tmp_path / "samples").write_bytes(samples.tobytes())
    inputs, outputs = [Tensor("x", "uint8", (16,))], [Tensor("y", "int32", (1,))]
    with Accelerator(model, inputs=inputs, outputs=outputs, max_batch=8) as node:
        test = Test(
            scenario="Offline",
            mode="accuracy",
            sample_bytes=16,
            samples=64,
            sample_file=tmp_path / "samples",
            log_directory=tmp_path / "logs",
            nodes=(node.address,),
        )
        outcome = test.run()
        assert node.counts().failed == outcome.counts.failed
    assert 1 <= outcome.counts.failed <= 8
    assert [str(each.exc_value) for each in raised] == ["no answer"]
    assert max(batches) <= 8
    answers = accuracy_log(tmp_path / "logs")
    expected = samples.sum(axis=1, dtype=np.int32)
    right = [at for at, data in answers.items() if bytes.fromhex(data) == expected[at].tobytes()]
    assert len(right) == 64 - outcome.counts.failed
    assert all(answers[at] == "" for at in answers if at not in right)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends_under_load_costs_no_query(tmp_path: Path, number: int) -> None:
    command = [*COMMAND, "accelerator", "--bytes", str(BYTES), "--json"]
    each = [
        subprocess.Popen([*command, "--name", f"k{index}"], stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    addresses = [json.loads(node.stdout.readline())["address"] for node in each if node.stdout]
    seen: list[Counts] = []

    def progress(counts: Counts) -> None:
        if counts.answered and not seen:
            each[0].send_signal(number)
            seen.append(counts)

    test = Test(
        scenario="Server",
        sample_bytes=BYTES,
        log_directory=tmp_path,
        nodes=tuple(addresses),
        target_qps=500,
        target_latency=5,
        min_duration=2.5,
        min_queries=100,
    )
    outcome = test.run(progress)
    status = each[0].wait(timeout=30)
    each[1].kill()
    for node in each:
        node.communicate()
    assert status == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert seen
    assert outcome.counts.failed == 0
    assert outcome.counts.answered == outcome.counts.issued
    assert outcome.counts.peers == 1
    (departure,) = outcome.departures
    assert departure.name == "k0"
    assert departure.lost or number == signal.SIGTERM
    assert departure.cause


@pytest.mark.parametrize("scenario", ["Server", "Offline"])
def test_loadgen_takes_first_tokens_and_numbers_of_tokens(tmp_path: Path, scenario: str) -> None:
    conf = tmp_path / "user.conf"
    lines = ("use_token_latencies = 1", "min_duration = 300", "min_query_count = 50")
    texts = (*lines, "target_qps = 100", "ttft_latency = 5000", "tpot_latency = 5000")
    conf.write_text("".join(f"*.{scenario}.{text}\n" for text in texts), encoding="utf-8")
    with nodes("--model tokens --tokens 6 --work 0.0002") as options:
        done = subprocess.run(
            [
                *(*COMMAND, "frontend", *options, "--scenario", scenario, "--user-conf", str(conf)),
                *("--bytes", str(BYTES), "--logs", str(tmp_path / "logs"), "--json"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    found = json.loads(done.stdout)
    assert found["counts"]["failed"] == 0
    detail = (tmp_path / "logs" / "mlperf_log_detail.txt").read_text(encoding="utf-8")
    errors = [line for line in detail.splitlines() if '"error_runtime"' in line]
    assert not [line for line in errors if "token" in line or "sample" in line]
    assert any("token" in key.lower() for key in found["summary"]), found["summary"]


def test_samples_stay_in_memory_until_nodes_have_returned_them(tmp_path: Path) -> None:
    gate = threading.Event()

    def model(x: np.ndarray[Any, Any]) -> Any:
        gate.wait(60)
        return x[:, :1]

    inputs, outputs = [Tensor("x", "uint8", (16,))], [Tensor("y", "uint8", (1,))]
    with Accelerator(model, inputs=inputs, outputs=outputs, max_batch=64) as node:
        test = Test(
            scenario="Offline",
            mode="accuracy",
            sample_bytes=16,
            samples=128,
            performance_samples=64,
            log_directory=tmp_path / "logs",
            nodes=(node.address,),
            deadline=1.5,
        )
        seen: list[tuple[float, int]] = []

        def progress(counts: Counts) -> None:
            if counts.failed:
                seen.append((time.monotonic(), counts.issued))
            # LoadGen has all answers from the first set, and the node still reads samples.
            if seen and time.monotonic() > seen[0][0] + 0.7:
                gate.set()

        outcome = test.run(progress)
    before = [issued for at, issued in seen if at < seen[0][0] + 0.6]
    assert len(before) > 1
    assert max(before) < outcome.counts.issued
    assert outcome.counts.issued == outcome.counts.failed + outcome.counts.answered


def test_queries_that_are_late_fail_and_are_counted(tmp_path: Path) -> None:
    with nodes("--work 0.1 --max-batch 1") as options:
        found = run(
            *("frontend", *options, "--scenario", "Offline", "--target-qps", "50"),
            *("--duration", "0.4", "--min-queries", "20", "--deadline", "1"),
            *("--bytes", str(BYTES), "--logs", str(tmp_path)),
            status=1,
        )
    counts = found["counts"]
    assert 0 < counts["failed"] < counts["issued"]
    assert counts["answered"] + counts["failed"] == counts["issued"]
