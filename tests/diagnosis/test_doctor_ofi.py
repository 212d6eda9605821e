"""libfabric and EFA in `weft doctor`: on synthetic hosts, and on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from weft import diagnosis
from weft.diagnosis import efa, ofi
from weft.diagnosis.efa import Device, Host

if TYPE_CHECKING:
    from pathlib import Path

    from weft._native import OfiOffer, OfiReport
    from weft.diagnosis import Finding


def offer(domain: str, **changes: Any) -> OfiOffer:
    found: OfiOffer = {
        "domain": domain,
        "fabric": "efa",
        "max_part_bytes": 1 << 30,
        "max_ranges": 1,
        "registers_sources": True,
        "consumes_receives": False,
        "progresses_by_itself": True,
        "reaches_devices": True,
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


def libfabric(offers: dict[str, list[OfiOffer]], **changes: Any) -> OfiReport:
    found: OfiReport = {
        "library": "/opt/amazon/efa/lib/libfabric.so.1",
        "version": (2, 5),
        "error": None,
        "built_in": ["efa", "tcp", "ofi_rxm", "shm"],
        "providers": {
            name: {"offers": offers.get(name, []), "error": None} for name in ofi.PROVIDERS
        },
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


NICS = [offer("rdmap79s0-rdm"), offer("rdmap80s0-rdm")]
TCP = [offer("lo", registers_sources=False, progresses_by_itself=False, reaches_devices=False)]
NONE: OfiReport = {
    "library": None,
    "version": None,
    "error": "libfabric.so.1: cannot open it; install libfabric (Debian: libfabric1)",
    "built_in": [],
    "providers": {name: {"offers": [], "error": "no library"} for name in ofi.PROVIDERS},
}
COMPLETE = Host(
    interfaces=2,
    module="2.13.0g",
    devices=(
        Device("rdmap79s0", "/dev/infiniband/uverbs0"),
        Device("rdmap80s0", "/dev/infiniband/uverbs1"),
    ),
    libfabric=libfabric({"efa": NICS, "tcp;ofi_rxm": TCP}),
    locked_bytes=None,
    nvidia=True,
    open_nvidia=True,
    peer_memory=(),
    huge_pages=5128,
)


def rows(found: list[Finding]) -> dict[str, Finding]:
    assert not any(finding.required for finding in found)
    assert all(finding.detail and finding.follows for finding in found)
    return {finding.name: finding for finding in found}


def lacking(host: Host) -> list[str]:
    return [name for name, finding in rows(efa.findings(host)).items() if not finding.found]


def test_a_complete_host_lacks_nothing() -> None:
    assert lacking(COMPLETE) == []
    found = rows(efa.findings(COMPLETE))
    assert found["EFA"].detail == "2 interfaces"
    assert "rdmap79s0-rdm, rdmap80s0-rdm" in found["EFA library"].detail


def test_a_host_without_efa_gets_one_row() -> None:
    [only] = efa.findings(replace(COMPLETE, interfaces=0, devices=(), module=None))
    assert (only.name, only.found) == ("EFA", False)


def test_without_the_kernel_module_there_are_no_devices() -> None:
    none = libfabric({"tcp;ofi_rxm": TCP})
    host = replace(COMPLETE, module=None, devices=(), libfabric=none)
    assert lacking(host) == [
        *("EFA", "EFA module", "EFA devices", "EFA library", "EFA GPU memory"),
    ]
    found = rows(efa.findings(host))
    assert found["EFA"].detail == "2 interfaces, but lacking: module, devices, library"
    assert "modprobe efa" in found["EFA module"].follows


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (libfabric({}, version=(1, 17)), "libfabric 1.17 (/opt"),
        (libfabric({}, built_in=["tcp", "ofi_rxm"]), "has no provider efa"),
        (libfabric({}), "offers no NIC by efa"),
        (NONE, "no libfabric"),
    ],
)
def test_a_library_that_cannot_serve_is_named(report: OfiReport, message: str) -> None:
    host = replace(COMPLETE, libfabric=report, nvidia=False)
    assert lacking(host) == ["EFA", "EFA library", "EFA GPU memory"]
    assert message in rows(efa.findings(host))["EFA library"].detail


def test_low_limits_and_no_permission_have_remedies() -> None:
    closed = tuple(replace(each, error="Permission denied") for each in COMPLETE.devices)
    host = replace(COMPLETE, locked_bytes=8 << 20, devices=closed, huge_pages=0)
    assert lacking(host) == ["EFA", "EFA devices", "EFA locked memory", "EFA huge pages"]
    found = rows(efa.findings(host))
    assert found["EFA devices"].detail == "/dev/infiniband/uverbs0: Permission denied, and 1 more"
    assert "chmod" in found["EFA devices"].follows
    assert found["EFA locked memory"].detail == "at most 8.0 MiB"
    assert "ulimit -l unlimited" in found["EFA locked memory"].follows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nvidia": False}, "no NVIDIA driver"),
        ({"open_nvidia": False}, "neither dma-buf nor a module for peer memory"),
        ({"open_nvidia": False, "peer_memory": ("efa_nv_peermem",)}, "has efa_nv_peermem, but"),
        ({}, "has dma-buf, but"),
    ],
)
def test_gpu_memory_that_nics_cannot_reach_is_explained(
    changes: dict[str, Any], message: str
) -> None:
    without = libfabric({"efa": [offer("rdmap79s0-rdm", reaches_devices=False)]})
    host = replace(COMPLETE, libfabric=without, **changes)
    assert lacking(host) == ["EFA GPU memory"]
    assert message in rows(efa.findings(host))["EFA GPU memory"].detail


def test_a_host_is_read_from_its_files(tmp_path: Path) -> None:
    def write(name: str, text: str = "") -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    for number, vendor, product in ((0, "0x1d0f", "0xefa2"), (1, "0x1d0f", "0xec20")):
        write(f"sys/bus/pci/devices/0000:00:0{number}.0/vendor", vendor)
        write(f"sys/bus/pci/devices/0000:00:0{number}.0/device", product)
    write("sys/module/efa/version", "2.13.0g")
    write("sys/module/nvidia_peermem/refcnt", "0")
    write("sys/bus/pci/drivers/efa/new_id")
    pci = tmp_path / "sys/bus/pci/devices/0000:00:00.0"
    write("sys/bus/pci/devices/0000:00:00.0/infiniband_verbs/uverbs0/dev", "231:192")
    (pci / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/efa")
    infiniband = tmp_path / "sys/class/infiniband/rdmap0s0"
    infiniband.mkdir(parents=True)
    (infiniband / "device").symlink_to(pci)
    write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "5128")
    write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000")

    host = efa.look(NONE, tmp_path)
    missing = Device("rdmap0s0", "/dev/infiniband/uverbs0", os.strerror(2))
    assert host == Host(
        1, "2.13.0g", (missing,), NONE, None, False, False, ("nvidia_peermem",), 5128
    )
    write("dev/infiniband/uverbs0")
    assert efa.look(NONE, tmp_path).devices == (Device("rdmap0s0", "/dev/infiniband/uverbs0"),)
    write("sys/module/efa/version")
    assert efa.look(NONE, tmp_path).module == ""


def test_an_empty_host_has_nothing(tmp_path: Path) -> None:
    host = efa.look(NONE, tmp_path)
    assert (host.interfaces, host.module, host.devices, host.huge_pages) == (0, None, (), 0)


def test_no_library_is_one_row_with_a_remedy() -> None:
    [only] = ofi.findings(NONE)
    assert (only.name, only.found) == ("libfabric", False)
    assert only.follows == "install libfabric (Debian: libfabric1)"


def test_each_provider_of_libfabric_is_offered_or_explained() -> None:
    report = libfabric({"tcp;ofi_rxm": TCP}, version=(1, 17))
    found = rows(ofi.findings(report))
    assert [name for name, finding in found.items() if finding.found] == [
        *("libfabric", "libfabric tcp;ofi_rxm"),
    ]
    tcp = found["libfabric tcp;ofi_rxm"]
    assert tcp.detail == "lo: parts of at most 1,073,741,824 bytes"
    assert tcp.follows == "WEFT_OFI_PROVIDER='tcp;ofi_rxm'; demands a progress thread"
    assert found["libfabric efa"].detail == "libfabric 1.17: Weft needs 1.21 for it"
    assert found["libfabric verbs;ofi_rxm"].detail == "this libfabric has no provider verbs"


def test_what_an_offer_demands_is_listed() -> None:
    direct = offer("rdmap79s0-rdm", consumes_receives=True)
    assert ofi.demands([direct]) == (
        "registered sources, a receive for each arrival, reaches GPU memory"
    )
    plain = offer("eth0", registers_sources=False, reaches_devices=False)
    assert ofi.demands([plain]) == "nothing"


def test_many_nics_are_shortened() -> None:
    assert ofi.domains([offer(f"rdmap{i}") for i in range(32)]).endswith("rdmap7 and 24 more")


def test_this_machine_is_explained() -> None:
    names = [finding.name for finding in diagnosis.examine()]
    assert {"libfabric", "EFA", "provider ofi"} <= set(names)
    report = ofi.report()
    assert (report["library"] is None) == (report["error"] is not None)
    assert set(report["providers"]) == set(ofi.PROVIDERS)
