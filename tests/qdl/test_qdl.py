"""Query dispatch without LoadGen: arrays, audits, the system description, the commands."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from weft.cli import qdl
from weft.cli.qdl_view import LiveView
from weft.errors import ConfigurationError, ListenError, SecretError, ShapeError, WeftError
from weft.qdl import (
    Accelerator,
    Counts,
    Departure,
    Outcome,
    Tensor,
    Test,
    UpTo,
    ask,
    audits,
    bench,
    description,
)
from weft.qdl.accelerator import arrays_of, bytes_of

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = Tensor("image", "float32", (2, 3))
TEXTS = Tensor("text", "int32", (2, UpTo(5)))


def test_a_batch_of_fixed_shape_is_one_array_and_one_of_varying_shape_a_list() -> None:
    data = np.arange(12, dtype=np.float32)
    images = arrays_of(IMAGES, 2, data.tobytes(), [24, 24])
    assert isinstance(images, np.ndarray)
    assert np.array_equal(images, data.reshape(2, 2, 3))
    words = np.arange(6, dtype=np.int32)
    texts = arrays_of(TEXTS, 3, words.tobytes(), [16, 0, 8])
    assert [text.shape for text in texts] == [(2, 2), (2, 0), (2, 1)]
    assert texts[2].tolist() == [[4], [5]]


def test_outputs_have_the_bytes_of_their_tensor_or_are_refused() -> None:
    data, lengths = bytes_of(TEXTS, 2, [np.ones((2, 4)), np.zeros((2, 1))])
    assert lengths == [32, 8]
    assert np.frombuffer(data, np.int32).tolist() == [1] * 8 + [0, 0]
    with pytest.raises(ShapeError, match=r"'text' of shape \(2, 6\): expected \(2, <=5\)"):
        bytes_of(TEXTS, 1, [np.ones((2, 6))])
    with pytest.raises(ShapeError, match="'image' of 3 queries: expected 2"):
        bytes_of(IMAGES, 2, np.zeros((3, 2, 3)))


def test_an_accelerator_has_an_address_and_ends() -> None:
    with Accelerator(lambda x: x, inputs=[IMAGES], outputs=[IMAGES], name="n1") as node:
        assert node.name == "n1"
        assert node.address.startswith("127.0.0.1:")
        assert node.counts() == Counts(0, 0, 0, 0)
        with pytest.raises(ListenError):
            Accelerator(lambda x: x, inputs=[IMAGES], outputs=[IMAGES], address=node.address)
    node.stop()


def test_a_deadline_of_ask_holds_for_connecting_and_for_answers() -> None:
    answered = threading.Event()

    def model(images: Any) -> Any:
        answered.wait(60)
        return images

    with Accelerator(model, inputs=[IMAGES], outputs=[IMAGES]) as node:
        try:
            queries = [[np.zeros((2, 3), np.float32)]] * 3
            began = time.monotonic()
            found = ask([node.address], queries, deadline=1)
            # Its limit without a deadline is 30 s for each step.
            assert time.monotonic() - began < 20
            assert found.answers == [None] * 3
            assert found.failed == len(found.failures) == 3
        finally:
            answered.set()
    began = time.monotonic()
    with pytest.raises(WeftError, match=r"node 127\.0\.0\.1:"):
        ask([node.address], queries, deadline=0.5)
    assert time.monotonic() - began < 20


def test_ctrl_c_ends_ask() -> None:
    with socket.socket() as bound:
        # A port without a listener.
        bound.bind(("127.0.0.1", 0))
        code = (
            "import signal, weft.qdl; signal.signal(signal.SIGINT, signal.default_int_handler);"
            f"print(flush=True); weft.qdl.ask(['127.0.0.1:{bound.getsockname()[1]}'], [[b'1']])"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.3)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert "KeyboardInterrupt" in errors
            assert time.monotonic() - began < 20


@pytest.mark.parametrize("stops", [True, False])
def test_an_accelerator_that_never_started_frees_its_address(stops: bool) -> None:
    def node(address: str) -> Accelerator:
        return Accelerator(lambda x: x, inputs=[IMAGES], outputs=[IMAGES], address=address)

    first = node("127.0.0.1:0")
    address = first.address
    if stops:
        first.stop()
    else:
        del first
        gc.collect()
    node(address).stop()


def test_a_node_that_prints_errors_or_nothing_blocks_no_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    text = "#!/bin/sh\nhead -c 1000000 /dev/zero >&2\necho '{\"address\": 1}'\nsleep 60\n"
    program.write_text(text.replace("sleep", "exec sleep"), encoding="ascii")
    program.chmod(0o755)
    with bench.accelerator([]) as found:
        assert found == {"address": 1}
    program.write_text("#!/bin/sh\nexec sleep 60\n", encoding="ascii")
    monkeypatch.setattr(bench, "PATIENCE", 0.5)
    with pytest.raises(ConfigurationError, match="no address within"), bench.accelerator([]):
        pass


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"inputs": [Tensor("x", "int16", (1,))]}, ConfigurationError, "int16"),
        ({"inputs": [Tensor("x", "int8", (UpTo(1), UpTo(1)))]}, ConfigurationError, "one variable"),
        ({"inputs": []}, ConfigurationError, "0 inputs"),
        ({"slots": 0}, ConfigurationError, "slots 0"),
        ({"provider": "copy"}, ConfigurationError, "shm, verbs, ofi or tcp"),
        ({"address": "0.0.0.0:0"}, SecretError, "secret"),
    ],
)
def test_an_accelerator_that_cannot_be_is_refused(
    arguments: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_SECRET", raising=False)
    with pytest.raises(error, match=text):
        Accelerator(lambda x: x, **({"inputs": [IMAGES], "outputs": [IMAGES]} | arguments))


def logs(folder: Path, scenario: str, result: float, valid: str = "VALID") -> Path:
    """A run's logs with a result."""
    folder.mkdir()
    entries = {
        "effective_scenario": scenario,
        audits.RESULTS[scenario][0]: result,
        "result_validity": valid,
    }
    lines = [f":::MLLOG {json.dumps({'key': key, 'value': entries[key]})}" for key in entries]
    (folder / "mlperf_log_detail.txt").write_text("\n".join(["", *lines]), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("scenario", "before", "after", "test01", "test04"),
    [
        ("Offline", 1000, 1090, True, True),
        ("Offline", 1000, 1110, False, False),
        ("Offline", 1000, 890, False, True),
        ("Server", 1000, 1000, True, True),
        ("SingleStream", 1e6, 0.92e6, True, True),
        ("SingleStream", 1e6, 0.85e6, False, False),
        ("SingleStream", 1e5, 0.85e5, True, True),
        ("MultiStream", 1e6, 0.85e6, True, True),
        ("MultiStream", 2e6, 1.7e6, False, False),
    ],
)
def test_audits_compare_results(
    tmp_path: Path, scenario: str, before: float, after: float, test01: bool, test04: bool
) -> None:
    first, second = logs(tmp_path / "1", scenario, before), logs(tmp_path / "2", scenario, after)
    assert audits.compare_rates("TEST01", first, second).passed == test01
    assert audits.compare_rates("TEST04", first, second).passed == test04


def test_audits_refuse_logs_without_a_valid_result(tmp_path: Path) -> None:
    good, bad = logs(tmp_path / "1", "Offline", 1), logs(tmp_path / "2", "Offline", 1, "INVALID")
    with pytest.raises(ConfigurationError, match="INVALID, expected VALID"):
        audits.compare_rates("TEST01", good, bad)
    with pytest.raises(ConfigurationError, match="scenario Server, expected Offline"):
        audits.compare_rates("TEST01", good, logs(tmp_path / "3", "Server", 1))
    with pytest.raises(ConfigurationError, match="not a log"):
        audits.compare_rates("TEST01", good, tmp_path / "none")


def test_test01_compares_every_byte_of_each_answer(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("accuracy", "same", "other", "empty")]
    known = [{"qsl_idx": index, "data": f"{index:016X}"} for index in range(5)]
    other = [known[1], {"qsl_idx": 2, "data": "0000000000000003"}]
    for folder, entries in zip(folders, (known, known[3:], other, []), strict=True):
        folder.mkdir()
        (folder / "mlperf_log_accuracy.json").write_text(json.dumps(entries), encoding="utf-8")
    assert audits.compare_answers(folders[0], folders[1]).passed
    verdict = audits.compare_answers(folders[0], folders[2])
    assert (verdict.passed, verdict.detail.split(",")[0]) == (False, "1 samples have other answers")
    assert not audits.compare_answers(folders[0], folders[3]).passed


def test_the_description_has_every_key_of_the_checker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = Test(
        scenario="Offline",
        sample_bytes=10,
        log_directory=tmp_path,
        nodes=("127.0.0.1:5000", "127.0.0.2:5000"),
        provider="tcp",
    )
    found = {"summary": {"Samples per second": "100"}, "is_valid": True, "answer_bytes": 4}
    lost = {"name": "n1", "cause": "no response", "lost": True}
    found |= {"departures": [lost]}
    counts = {"issued": 1, "answered": 1, "failed": 0, "peers": 2}
    outcome = Outcome.from_json(test, found | {"loadgen": "6", "counts": counts})
    assert outcome.ingress_bytes_per_second == 1000
    assert outcome.egress_bytes_per_second == 400
    assert outcome.link_bytes_per_second is None
    assert outcome.departures == (Departure("n1", "no response", True),)
    assert outcome.to_json()["departures"] == [lost]
    qdl.show(outcome)
    assert "node n1 lost: no response\n" in capsys.readouterr().out
    keys = description.network_keys(test, outcome)
    assert tuple(keys) == description.KEYS
    assert keys["is_network"] is True
    assert (keys["nic_loadgen"], keys["network_protocol"]) == ("lo", "TCP")
    assert keys["number_connections"] == 4


def test_the_live_view_is_for_terminals_and_erases_itself() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    times = iter([0.0, 0.1, 2.0])
    stream = Terminal()
    with LiveView("nodes", stream=stream, clock=lambda: next(times)) as view:
        view.show(1, 1, 0, 1)
        assert stream.getvalue() == ""
        view.show(5000, 4000, 10, 2)
        assert "4,000 answered  2,000/s  990 under way  10 failed  2 nodes" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    file = io.StringIO()
    with LiveView("nodes", stream=file) as view:
        view.show(1, 1, 0, 1)
    assert file.getvalue() == ""


COMMAND = [sys.executable, "-m", "weft", "qdl"]


def test_a_node_of_the_command_line_ends_by_a_signal() -> None:
    node = subprocess.Popen(
        [*COMMAND, "accelerator", "--bytes", "64", "--name", "n1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdout is not None
    assert json.loads(node.stdout.readline())["name"] == "n1"
    node.send_signal(signal.SIGTERM)
    output, _ = node.communicate(timeout=30)
    assert json.loads(output) == {"arrived": 0, "answered": 0, "failed": 0, "departures": []}
    assert node.returncode == 0


def test_the_handler_of_a_signal_takes_no_lock() -> None:
    # A lock that the main thread holds while the handler runs would block both.
    program = (
        "import threading\n"
        "class Locked(threading.Event):\n"
        "    def set(self):\n"
        "        assert threading.get_ident() != main_thread\n"
        "        super().set()\n"
        "main_thread = threading.get_ident()\n"
        "threading.Event = Locked\n"
        "from weft.cli import main\n"
        "raise SystemExit(main(['qdl', 'accelerator', '--bytes', '64', '--json']))\n"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    assert node.stdout.readline()
    node.send_signal(signal.SIGINT)
    _, errors = node.communicate(timeout=30)
    assert (node.returncode, errors) == (0, "")


def test_a_front_end_without_loadgen_states_what_is_missing(tmp_path: Path) -> None:
    environment = os.environ | {
        "WEFT_CACHE_DIR": str(tmp_path),
        "WEFT_LOADGEN_SOURCE": str(tmp_path / "absent.tar.gz"),
    }
    options = ["--in-process", "--scenario", "Offline", "--bytes", "64", "--logs", str(tmp_path)]
    done = subprocess.run(
        [*COMMAND, "frontend", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("weft qdl frontend: WEFT_LOADGEN_SOURCE=")
    assert "no such file" in done.stderr
