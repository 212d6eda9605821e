"""libibverbs and RDMA NICs in `weft doctor`: on synthetic hosts, and on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from weft import diagnosis
from weft.diagnosis import rdma, verbs
from weft.diagnosis.verbs import Host, Nic, Slot

if TYPE_CHECKING:
    from pathlib import Path

    from weft._native import VerbsPort, VerbsReport
    from weft.diagnosis import Finding


def port(name: str, **changes: Any) -> VerbsPort:
    found: VerbsPort = {
        "name": name,
        "device": name.partition(":")[0],
        "unusable": None,
        "state": "ACTIVE",
        "link_layer": "Ethernet",
        "gigabits": 200.0,
        "gid": ("::ffff:10.0.0.1", 3),
        "gid_entries": 4,
        "mtu": 4096,
        "max_message": 1 << 30,
        "firmware": "28.39.1002",
        "max_completions": 1 << 22,
        "max_requests": 1 << 15,
        "max_receives": (1 << 15) - 1,
        "on_demand_paging": True,
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


def unusable(name: str, why: str, **changes: Any) -> VerbsPort:
    return port(name, unusable=why, gid=None, mtu=0, **changes)


def libibverbs(*ports: VerbsPort, **changes: Any) -> VerbsReport:
    found: VerbsReport = {
        "library": "/lib/libibverbs.so.1",
        "error": None,
        "dma_buf": True,
        "ports": [*ports],
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


NONE: VerbsReport = {
    "library": None,
    "error": "libibverbs.so.1: cannot open it; install libibverbs (Debian: libibverbs1)",
    "dma_buf": False,
    "ports": [],
}
#: A library before rdma-core 34.
OLD = libibverbs(port("mlx5_0:1"), dma_buf=False)
SLOT = Slot(width=16, max_width=16, speed=32.0, max_speed=32.0)
NICS = tuple(
    Nic(rdma.Device(f"mlx5_{index}", f"/dev/infiniband/uverbs{index}"), SLOT, index)
    for index in range(2)
)
COMPLETE = Host(
    has_uverbs=True,
    nics=NICS,
    unbound=(),
    efa=(),
    verbs=libibverbs(port("mlx5_0:1"), port("mlx5_1:1")),
    locked_bytes=None,
    nvidia=True,
    open_nvidia=True,
    peer_memory=(),
)
#: Rows that no host has.
ALWAYS = ["RDMA relaxed ordering"]


def rows(found: list[Finding]) -> dict[str, Finding]:
    assert not any(finding.required for finding in found)
    assert all(finding.detail and finding.follows for finding in found)
    names = [finding.name for finding in found]
    assert len(names) == len(set(names))
    return {finding.name: finding for finding in found}


def lacking(host: Host) -> list[str]:
    found = rows(verbs.findings(host))
    assert [name for name in ALWAYS if found[name].found] == []
    return [name for name, row in found.items() if not row.found and name not in ALWAYS]


def test_a_complete_host_lacks_only_what_is_unknown() -> None:
    assert lacking(COMPLETE) == []
    found = rows(verbs.findings(COMPLETE))
    assert found["libibverbs"].detail == "/lib/libibverbs.so.1"
    assert found["RDMA devices"].detail == "mlx5_0, mlx5_1"
    assert found["RDMA mlx5_0:1"].detail == (
        "Ethernet, 200 Gb/s, GID ::ffff:10.0.0.1 (index 3, 4 in use), MTU 4096, firmware 28.39.1002"
    )
    assert found["RDMA mlx5_0:1"].follows == "messages of at most 1,073,741,824 bytes"
    assert found["RDMA mlx5_1 PCIe"].detail == "x16, 32 GT/s, NUMA node 1"
    expected = "at most 504 Gb/s each way; ranks on NUMA node 1 are nearest"
    assert found["RDMA mlx5_1 PCIe"].follows == expected
    gpu_memory = found["RDMA GPU memory"]
    assert (gpu_memory.found, gpu_memory.detail) == (True, "dma-buf")
    assert "simulated NICs only" in gpu_memory.follows


@pytest.mark.parametrize(
    ("report", "is_found", "message"),
    [
        (NONE, False, "libibverbs.so.1: cannot open it"),
        (libibverbs(), True, "/lib/libibverbs.so.1, no RDMA device"),
        (libibverbs(error="ibv_get_device_list: no"), False, "ibv_get_device_list: no"),
    ],
)
def test_a_host_without_rdma_gets_one_row(
    report: VerbsReport, is_found: bool, message: str
) -> None:
    [only] = verbs.findings(replace(COMPLETE, nics=(), verbs=report))
    assert (only.name, only.found) == ("libibverbs", is_found)
    assert message in only.detail
    assert only.follows


def test_devices_of_efa_have_rows_of_their_own() -> None:
    report = libibverbs(unusable("rdmap0s0:1", "no shared receive queues"))
    [only] = verbs.findings(replace(COMPLETE, nics=(), efa=("rdmap0s0",), verbs=report))
    assert (only.name, only.found) == ("libibverbs", True)


def test_without_the_library_devices_are_listed_but_no_ports() -> None:
    host = replace(COMPLETE, verbs=NONE)
    assert lacking(host) == ["libibverbs", "RDMA on-demand paging", "RDMA GPU memory"]
    found = rows(verbs.findings(host))
    assert found["libibverbs"].follows == "install libibverbs (Debian: libibverbs1)"
    assert found["RDMA devices"].found


@pytest.mark.parametrize(
    ("why", "detail", "follows"),
    [
        (
            "state of the port DOWN: expected ACTIVE; connect its cable",
            "Ethernet, 200 Gb/s, state of the port DOWN: expected ACTIVE",
            "connect its cable",
        ),
        (
            "mlx5_1: ibv_open_device: Permission denied",
            "Ethernet, 200 Gb/s, ibv_open_device: Permission denied",
            "the row RDMA devices has the cause",
        ),
    ],
)
def test_a_port_that_cannot_be_used_has_reason_and_remedy(
    why: str, detail: str, follows: str
) -> None:
    host = replace(COMPLETE, verbs=libibverbs(port("mlx5_0:1"), unusable("mlx5_1:1", why)))
    assert lacking(host) == ["RDMA mlx5_1:1"]
    row = rows(verbs.findings(host))["RDMA mlx5_1:1"]
    assert (row.detail, row.follows) == (detail, follows)


def test_small_packets_are_explained_for_each_link_layer() -> None:
    ports = port("mlx5_0:1", mtu=1024), port("mlx5_1:1", mtu=2048, link_layer="InfiniBand")
    found = rows(verbs.findings(replace(COMPLETE, verbs=libibverbs(*ports))))
    assert "`ip link set NAME mtu 9000`" in found["RDMA mlx5_0:1"].follows
    assert found["RDMA mlx5_1:1"].follows.endswith("; MTU 4096 costs less per byte")


def test_a_nic_that_libibverbs_does_not_list_is_named() -> None:
    host = replace(COMPLETE, verbs=libibverbs(port("mlx5_0:1")))
    assert lacking(host) == ["RDMA mlx5_1"]
    assert "ibverbs-providers" in rows(verbs.findings(host))["RDMA mlx5_1"].follows


def test_low_limits_and_no_permission_have_remedies() -> None:
    closed = tuple(
        replace(nic, device=replace(nic.device, error="Permission denied")) for nic in NICS
    )
    host = replace(COMPLETE, locked_bytes=8 << 20, nics=closed, verbs=libibverbs())
    assert lacking(host) == [
        *("RDMA devices", "RDMA mlx5_0", "RDMA mlx5_1", "RDMA locked memory"),
        "RDMA on-demand paging",
    ]
    found = rows(verbs.findings(host))
    assert found["RDMA devices"].detail == "/dev/infiniband/uverbs0: Permission denied, and 1 more"
    assert "--device=/dev/infiniband" in found["RDMA devices"].follows
    assert found["RDMA mlx5_0"].follows == "the row RDMA devices has the cause"
    assert found["RDMA locked memory"].detail == "at most 8.0 MiB"
    assert "ulimit -l unlimited" in found["RDMA locked memory"].follows


def test_regions_beyond_the_limit_are_paged_where_all_nics_do_that() -> None:
    host = replace(COMPLETE, locked_bytes=8 << 20)
    assert lacking(host) == ["RDMA locked memory"]
    found = rows(verbs.findings(host))
    assert found["RDMA locked memory"].follows.startswith("larger regions are paged on demand: ")
    assert found["RDMA on-demand paging"].detail == "RDMA writes"
    assert "WEFT_VERBS_ON_DEMAND_PAGING" in found["RDMA on-demand paging"].follows
    without = [port(f"mlx5_1:{number}", on_demand_paging=False) for number in (1, 2)]
    host = replace(host, verbs=libibverbs(port("mlx5_0:1"), *without))
    found = rows(verbs.findings(host))
    assert found["RDMA locked memory"].follows.startswith("larger regions fail: ")
    assert found["RDMA on-demand paging"].detail == "none: mlx5_1"
    assert not found["RDMA on-demand paging"].found


def test_only_ports_that_can_be_used_count_for_on_demand_paging() -> None:
    down = unusable("mlx5_1:1", "state of the port DOWN", on_demand_paging=False)
    host = replace(COMPLETE, locked_bytes=8 << 20, verbs=libibverbs(port("mlx5_0:1"), down))
    found = rows(verbs.findings(host))
    assert found["RDMA on-demand paging"].found
    assert found["RDMA locked memory"].follows.startswith("larger regions are paged on demand: ")
    found = rows(verbs.findings(replace(host, verbs=libibverbs(down))))
    assert found["RDMA on-demand paging"].detail == "unknown: no port can be used"
    assert "unless the NIC pages them" in found["RDMA locked memory"].follows


@pytest.mark.parametrize(
    ("paging", "has_paging", "detail", "follows", "locked"),
    [
        (
            "never",
            True,
            "off: WEFT_VERBS_ON_DEMAND_PAGING=never",
            "is locked",
            "larger regions fail:",
        ),
        ("never", False, "none: mlx5_0", "is locked", "larger regions fail:"),
        ("auto", True, "RDMA writes", "used for regions that cannot be locked", "are paged"),
        ("always", True, "RDMA writes", "used for all regions in host memory", "are paged"),
        ("always", False, "none: mlx5_0", "=always refuses them: set auto", "larger regions fail:"),
    ],
)
def test_the_choice_of_on_demand_paging_counts(
    paging: str, has_paging: bool, detail: str, follows: str, locked: str
) -> None:
    report = libibverbs(port("mlx5_0:1", on_demand_paging=has_paging))
    host = replace(COMPLETE, locked_bytes=8 << 20, verbs=report, paging=paging)
    found = rows(verbs.findings(host))
    row = found["RDMA on-demand paging"]
    assert (row.detail, row.found) == (detail, detail == "RDMA writes")
    assert follows in row.follows
    assert locked in found["RDMA locked memory"].follows
    assert found["RDMA locked memory"].found == (paging == "always" and has_paging)


@pytest.mark.parametrize(
    ("changes", "detail", "remedy"),
    [
        ({"has_uverbs": False}, "the kernel module ib_uverbs is not loaded", "modprobe ib_uverbs"),
        ({"unbound": ("0000:17:00.0",)}, "no RDMA device of 0000:17:00.0", "modprobe mlx5_ib"),
    ],
)
def test_kernel_modules_that_are_missing_are_named(
    changes: dict[str, Any], detail: str, remedy: str
) -> None:
    host = replace(COMPLETE, **changes)
    assert lacking(host) == ["RDMA modules"]
    row = rows(verbs.findings(host))["RDMA modules"]
    assert row.detail == detail
    assert remedy in row.follows


@pytest.mark.parametrize(
    ("slot", "detail", "follows"),
    [
        (replace(SLOT, width=8), "x8 of x16, 32 GT/s, NUMA node 0", "at most 252 Gb/s each way:"),
        (
            replace(SLOT, speed=8.0),
            "x16, 8 of 32 GT/s, NUMA node 0",
            "at most 126 Gb/s each way, less than the 200 Gb/s of a port:",
        ),
        (
            Slot(8, 8, 5.0, 5.0),
            "x8, 5 GT/s, NUMA node 0",
            "at most 32 Gb/s each way, less than the 200 Gb/s of a port:",
        ),
        (
            Slot(None, None, None, None, is_virtual=True),
            "virtual function: width and speed unknown, NUMA node 0",
            "its bandwidth is that of the physical slot",
        ),
        (None, "not a PCI device", "RDMA in software"),
    ],
)
def test_a_slot_below_its_nic_is_explained(slot: Slot | None, detail: str, follows: str) -> None:
    host = replace(COMPLETE, nics=(replace(NICS[0], slot=slot), NICS[1]))
    assert lacking(host) == ["RDMA mlx5_0 PCIe"]
    row = rows(verbs.findings(host))["RDMA mlx5_0 PCIe"]
    assert row.detail == detail
    assert row.follows.startswith(follows)


@pytest.mark.parametrize(
    ("changes", "is_found", "message"),
    [
        ({"nvidia": False}, False, "no NVIDIA driver"),
        ({"open_nvidia": False}, False, "the kernel has neither dma-buf nor nvidia_peermem"),
        ({"verbs": NONE}, False, "no libibverbs"),
        ({"verbs": OLD}, False, "libibverbs has no ibv_reg_dmabuf_mr"),
        ({"open_nvidia": False, "peer_memory": ("nvidia_peermem",)}, True, "nvidia_peermem"),
        ({"verbs": OLD, "peer_memory": ("nv_peer_mem",)}, True, "nv_peer_mem"),
    ],
)
def test_ways_to_gpu_memory_and_what_is_missing_are_named(
    changes: dict[str, Any], is_found: bool, message: str
) -> None:
    row = rows(verbs.findings(replace(COMPLETE, **changes)))["RDMA GPU memory"]
    assert row.found == is_found
    assert message in row.detail


def test_a_host_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verbs.PAGING, "never")

    def write(name: str, text: str = "") -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add(name: str, address: str | None, driver: str, uverbs: str) -> None:
        infiniband = tmp_path / "sys/class/infiniband" / name
        infiniband.mkdir(parents=True)
        write(f"sys/class/infiniband_verbs/{uverbs}/ibdev", name)
        if address is not None:
            write(f"sys/bus/pci/drivers/{driver}/new_id")
            pci = tmp_path / "sys/bus/pci/devices" / address
            (pci / "infiniband").mkdir(parents=True, exist_ok=True)
            (pci / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
            (infiniband / "device").symlink_to(pci)

    for address, vendor, kind in (
        ("0000:17:00.0", "0x15b3", "0x020000"),
        ("0000:18:00.0", "0x15b3", "0x020700"),
        ("0000:19:00.0", "0x15b3", "0x060400"),
        ("0000:20:00.0", "0x1d0f", "0x020000"),
    ):
        write(f"sys/bus/pci/devices/{address}/vendor", vendor)
        write(f"sys/bus/pci/devices/{address}/class", kind)
    slot = "sys/bus/pci/devices/0000:17:00.0"
    write(f"{slot}/current_link_width", "8")
    write(f"{slot}/max_link_width", "16")
    write(f"{slot}/current_link_speed", "16.0 GT/s PCIe")
    write(f"{slot}/max_link_speed", "Unknown")
    write(f"{slot}/numa_node", "1")
    add("mlx5_0", "0000:17:00.0", "mlx5_core", "uverbs1")
    add("rdmap0s0", "0000:20:00.0", "efa", "uverbs0")
    add("rxe0", None, "", "uverbs2")
    write("sys/module/nvidia/refcnt", "0")
    write("sys/module/nvidia_peermem/refcnt", "0")
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64")
    write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000")
    write("dev/infiniband/uverbs1")

    absent = os.strerror(2)
    assert verbs.look(NONE, tmp_path) == Host(
        has_uverbs=True,
        nics=(
            Nic(
                rdma.Device("mlx5_0", "/dev/infiniband/uverbs1"),
                Slot(width=8, max_width=16, speed=16.0, max_speed=None),
                numa_node=1,
            ),
            Nic(rdma.Device("rxe0", "/dev/infiniband/uverbs2", absent), None, None),
        ),
        unbound=("0000:18:00.0",),
        efa=("rdmap0s0",),
        verbs=NONE,
        locked_bytes=None,
        nvidia=True,
        open_nvidia=True,
        peer_memory=("nvidia_peermem",),
        paging="never",
    )
    write(f"{slot}/numa_node", "-1")
    write(f"{slot}/current_link_width", "255")
    (tmp_path / slot / "physfn").symlink_to(tmp_path / slot)
    nic, _ = verbs.look(NONE, tmp_path).nics
    assert (nic.slot, nic.numa_node) == (Slot(None, 16, 16.0, None, is_virtual=True), None)


def test_an_empty_host_has_no_rdma(tmp_path: Path) -> None:
    host = verbs.look(NONE, tmp_path)
    assert (host.has_uverbs, host.nics, host.unbound, host.efa) == (False, (), (), ())
    assert [finding.name for finding in verbs.findings(host)] == ["libibverbs"]


def test_this_machine_is_explained() -> None:
    found = {finding.name: finding for finding in diagnosis.examine()}
    report = verbs.report()
    assert {"libibverbs", "provider verbs"} <= set(found)
    assert report["library"] is not None or report["error"] is not None
    usable = [each for each in report["ports"] if each["unusable"] is None]
    assert all(each["gid"] and each["mtu"] for each in usable)
    if not usable:
        assert not found["provider verbs"].found
        assert found["provider verbs"].follows
