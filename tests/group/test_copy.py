"""The copy provider from Python, with host memory in place of GPUs."""

import json
import os
import subprocess
import sys

import pytest

import weft
from tests import ROOT, ranks
from weft.group.devices import device_number

CHECK = ROOT / "tests" / "gpu" / "copy_check.py"


@pytest.mark.parametrize("over", ["copy", "shm", "tcp"])
def test_the_check_for_gpus_finds_every_byte_with_a_twin(over: str) -> None:
    arguments = ["--twin", "--rounds", "20", "--sizes", "65536", "1048576"]
    arguments += [] if over == "copy" else ["--over", over]
    process = subprocess.run(
        [sys.executable, str(CHECK), *arguments],
        env={name: value for name, value in os.environ.items() if name != "WEFT_RANK"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout)
    assert result["ok"]
    assert result["right"] == [20, 20]
    assert result["routes"] == [None, over]
    assert len(result["bandwidth"]) == 6


@pytest.mark.parametrize("transport", ["copy", "shm"])
def test_memory_of_a_device_is_had_over_copy_alone(transport: str) -> None:
    results = ranks.run("group.copies.memory", 2, transport)
    if transport == "shm":
        assert all("WEFT_PROVIDERS" in each["refused"] for each in results)
        return
    for each in results:
        assert each == {
            "refused": "",
            "device": "cuda:3",
            "length": 1000,
            "interface": [[1000], "|u1", False, 3],
            "same": True,
            "bytes": "RegionError",
            "cuda": "RegionError",
            "strange": "ConfigurationError",
            "no such": "ProviderError",
        }


@pytest.mark.parametrize(
    ("device", "number"), [("cuda:7", ("cuda", 7)), ("twin:1", ("twin", 1)), ("cuda", ("cuda", 0))]
)
def test_devices_are_named_as_torch_names_them(device: str, number: tuple[str, int]) -> None:
    assert device_number(device) == number


@pytest.mark.parametrize("device", ["cuda:x", "xpu:0", "cuda:-1", 3])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(weft.errors.ConfigurationError, match='expected "cuda"'):
        device_number(device)
