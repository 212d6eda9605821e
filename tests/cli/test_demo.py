"""`weft demo` with real processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weft.cli import main
from weft.demo import model


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "provider"), [(4, "shm"), (3, "tcp")])
def test_processes_compute_what_one_does(tmp_path: Path, ranks: int, provider: str) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "weft", "demo", "--json", "--passes", "1"]
    command += ["--ranks", str(ranks), "--provider", provider, "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["accuracy"] == found["single_process_accuracy"]
    assert found["accuracy"] > 0.94
    assert 0 < found["largest_logit_difference"] <= 1e-5
    assert found["routes"] == [provider]
    assert sum(found["expert_load"]) == found["images"] * model.TOP_K
    assert 0 < found["bytes_moved"] < found["naive_bytes"]
    assert found["bytes_written"] > found["bytes_moved"]
    assert [phase["phase"] for phase in found["phases"]] == [
        "dispatch send",
        "dispatch recv",
        "experts",
        "combine send",
        "combine recv",
    ]

    trace = json.loads(Path(found["trace"]).read_text(encoding="utf-8"))
    kinds = [event["ph"] for event in trace["traceEvents"]]
    assert kinds.count("s") == kinds.count("f") > 0
    phases = {event["name"] for event in trace["traceEvents"] if event["tid"] == 0}
    assert {phase["phase"] for phase in found["phases"]} <= phases
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(ranks))
    assert Path(found["timeline"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    message = capsys.readouterr().err
    assert (
        message == "weft demo: sklearn and matplotlib cannot be found: pip install 'weft[demo]'\n"
    )


def test_gradients_are_the_slopes_of_the_loss() -> None:
    """Cross-entropy gradient by finite differences in float64, without balancing loss."""
    random = np.random.default_rng(1)
    parameters = model.Model(*(value.astype(np.float64) for value in model.initial(random)))
    images, digits = random.random((6, model.HIDDEN)), random.integers(0, 10, 6)

    def loss(at: model.Model) -> float:
        shares = model.softmax(at.classify(images))
        return float(-np.log(shares[np.arange(6), digits]).mean())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "BALANCE", 0.0)
        slopes = model.gradients(parameters, images, digits)
    for field, value, slope in zip(model.Model._fields, parameters, slopes, strict=True):
        step = random.standard_normal(value.shape)
        step *= 1e-5 / np.abs(step).max()
        ahead = parameters._replace(**{field: value + step})
        behind = parameters._replace(**{field: value - step})
        expected = (loss(ahead) - loss(behind)) / 2
        assert float((slope * step).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-12)
