"""The switch between the CPU and devices, without a device's requirements."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import weft
from weft import _native

SHAPE: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}


def run(text: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=50, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_weft_does_not_import_torch() -> None:
    assert run("import sys, weft, weft.moe; weft.check(); print('torch' in sys.modules)") == (
        "False\n"
    )


def test_a_device_without_torch_says_what_to_install() -> None:
    message = run(
        "import sys, weft\n"
        "sys.modules['torch'] = None\n"
        "try:\n"
        "    weft.moe.AllToAll(None, device='cuda')\n"
        "except weft.errors.ConfigurationError as error:\n"
        "    print(error)\n"
    )
    assert message == "device 'cuda' needs PyTorch: pip install 'weft[torch]'\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_sms": 8, "path": "latency"}, "num_sms, path is for devices"),
        ({"layout": "padded"}, "layout='padded' is for devices"),
    ],
)
def test_arguments_of_devices_are_refused_on_the_cpu(options: dict[str, Any], named: str) -> None:
    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.ConfigurationError, match=named),
    ):
        weft.moe.AllToAll(communicator, **SHAPE, **options)


def test_a_class_made_from_the_cpus_stays_there() -> None:
    class Mine(weft.moe.AllToAll):
        pass

    with (
        weft.init(rank=0, world_size=1) as communicator,
        pytest.raises(weft.errors.ConfigurationError, match=r"derive from weft\.cuda\.AllToAll"),
    ):
        Mine(communicator, **SHAPE, device="cuda")


@pytest.mark.torch
def test_the_options_of_python_are_those_of_the_native_module() -> None:
    config = pytest.importorskip("weft.moe.device.config")
    names = [field.name for field in dataclasses.fields(config.Config)]
    assert names == _native.device_options()
    plain = set(config.Plain.__annotations__)
    assert plain <= set(names)
