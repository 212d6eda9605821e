"""`weft doctor`'s CUDA findings: from reports, and on this machine, with or without CUDA."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft import _native
from weft.base import nvrtc
from weft.cli import main
from weft.diagnosis import cuda

if TYPE_CHECKING:
    from weft._native import CudaDevice, CudaReport
    from weft.diagnosis import Finding

MISSING = ("driver", "nvml", "nvrtc", "gdrcopy")
ABSENT = dict.fromkeys(MISSING, "not installed")


def device(ordinal: int, peers: list[int], **changes: Any) -> CudaDevice:
    found: CudaDevice = {
        "ordinal": ordinal,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{ordinal:08x}-0000-0000-0000-000000000000",
        "bus_id": f"0000:{ordinal:02x}:00.0",
        "compute_capability": (9, 0),
        "sm_count": 132,
        "memory_bytes": 80 << 30,
        "mig_slice": False,
        "mig_mode": False,
        "file_descriptors": True,
        "reaches": peers,
        "nvlink": peers,
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


def findings(*devices: CudaDevice, **changes: Any) -> dict[str, Finding]:
    found: CudaReport = {
        "driver": (13, 0),
        "devices": list(devices),
        "nvml": "580.95.05",
        "nvrtc": ((13, 0), "/usr/lib/libnvrtc.so.13"),
        "gdrcopy": True,
        "errors": {},
    }
    listed = cuda.findings({**found, **changes})  # type: ignore[typeddict-item]
    assert not any(finding.required for finding in listed)
    return {finding.name: finding for finding in listed}


def test_nothing_is_installed() -> None:
    listed = findings(driver=None, nvml=None, nvrtc=None, gdrcopy=False, errors=ABSENT)
    assert list(listed) == ["CUDA driver", "NVML", "NVRTC", "gdrcopy"]
    assert not any(found.found for found in listed.values())
    assert {found.detail for found in listed.values()} == {"not installed"}
    assert listed["CUDA driver"].follows == "regions are in the CPU's memory only"
    assert listed["gdrcopy"].follows.startswith(
        'weft.triton.Proxy(words_home="auto") has its words in pinned host memory'
    )


def test_a_server_of_whole_gpus_on_nvlink() -> None:
    listed = findings(device(0, [1, 2]), device(1, [0, 2]), device(2, [0, 1]))
    assert all(found.found for found in listed.values())
    assert listed["CUDA driver"].detail == "13.0, 3 x NVIDIA H100 80GB HBM3"
    assert listed["NVLink"].detail == "every pair"
    assert listed["whole GPUs"].detail == "MIG is off"
    assert listed["shared GPU memory"].detail == "by file descriptor"
    assert listed["NVRTC"].detail == "13.0"
    assert listed["gdrcopy"].detail == "/dev/gdrdrv"
    assert "in GPU memory" in listed["gdrcopy"].follows


@pytest.mark.parametrize("changes", [{"mig_mode": True}, {"mig_slice": True, "mig_mode": None}])
def test_slices_are_refused_and_the_reason_is_given(changes: dict[str, Any]) -> None:
    listed = findings(device(0, []), device(1, [], **changes))
    found = listed["whole GPUs"]
    assert (found.found, found.detail) == (False, "MIG is on: cuda:1")
    assert "no symmetric heap over NVLink" in found.follows
    assert "nvidia-smi -mig 0" in found.follows
    assert not listed["NVLink"].found


def test_pairs_that_nvlink_does_not_join() -> None:
    two_pairs = (
        device(0, [1], reaches=[1, 2, 3]),
        device(1, [0], reaches=[0, 2, 3]),
        device(2, [3], reaches=[0, 1, 3]),
        device(3, [2], reaches=[0, 1, 2]),
    )
    found = findings(*two_pairs)["NVLink"]
    assert (found.found, found.detail) == (True, "2 of 6 pairs")
    assert "slowly" in found.follows
    by_pci = findings(device(0, [], reaches=[1]), device(1, [], reaches=[0]))["NVLink"]
    assert (by_pci.found, by_pci.detail) == (False, "none; every pair by PCI Express")
    apart = findings(device(0, []), device(1, []))["NVLink"]
    assert (apart.found, apart.detail) == (False, "none")
    assert apart.follows == "no heap spans these GPUs"
    alone = findings(device(0, []))["NVLink"]
    assert (alone.found, alone.detail) == (False, "one device")


def test_one_way_is_no_way() -> None:
    found = findings(device(0, [1]), device(1, []))["NVLink"]
    assert (found.found, found.detail) == (False, "none")


def test_without_nvml_nvlink_is_unknown() -> None:
    devices = (device(0, [1], nvlink=None), device(1, [0], nvlink=None))
    listed = findings(*devices, nvml=None, errors={"nvml": "not installed"})
    assert not listed["NVLink"].found
    assert listed["NVLink"].detail == "unknown without NVML; every pair by some way"


def test_memory_that_descriptors_cannot_share() -> None:
    found = findings(device(0, [], file_descriptors=False))["shared GPU memory"]
    assert (found.found, found.detail) == (False, "no file descriptors: cuda:0")
    assert 'memory="ipc"' in found.follows


def test_devices_that_kernels_are_not_for() -> None:
    found = findings(device(0, [], name="NVIDIA A100", compute_capability=(8, 0)))["CUDA driver"]
    assert found.follows == "no kernels for cuda:0: they are for compute capability 9.0"


def test_a_compiler_newer_than_the_driver() -> None:
    found = findings(device(0, []), driver=(12, 8))["NVRTC"]
    assert "may not load" in found.follows


def test_a_driver_that_fails_says_why() -> None:
    error = "cuInit failed: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE, 100)"
    found = findings(driver=None, errors={"driver": error})["CUDA driver"]
    assert (found.found, found.detail) == (False, error)


def driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(driver_is_here(), reason="this machine has a CUDA driver")
def test_this_machine_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    found = _native.cuda_report()
    assert found["driver"] is None
    assert found["devices"] == []
    assert found["errors"]["driver"] == "not installed"
    assert main(["doctor", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert listed["CUDA driver"]["detail"] == "not installed"
    assert "whole GPUs" not in listed
    if not Path("/dev/gdrdrv").exists():
        assert not listed["gdrcopy"]["found"]


def test_nvrtc_is_found_in_the_folders_that_are_given() -> None:
    folders = nvrtc.nvrtc_folders()
    found = _native.cuda_report(folders)["nvrtc"]
    if not folders and found is None:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")
    assert found is not None
    (major, _), file = found
    assert major in (12, 13)
    assert f"libnvrtc.so.{major}" in file


def test_a_folder_without_nvrtc_is_no_place_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libnvrtc.so.13").touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr(nvrtc, "find_spec", lambda _: spec)
    assert nvrtc.nvrtc_folders() == [str(tmp_path / "nvidia/cu13/lib")]
