"""NICs by GPU in `weft doctor`: on recorded servers, and on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.topology.test_topo import make_sysfs
from weft import _native
from weft.diagnosis import nics

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from weft._native import NicReport
    from weft.diagnosis import Finding


def recorded(
    root: Path, name: str, ports: list[str] | None = None, domains: list[str] | None = None
) -> NicReport:
    """A recorded server, with these active ports and libfabric domains."""
    return _native.nic_report((str(make_sysfs(root, name)), ports or [], domains or []))


def rows(found: NicReport) -> dict[str, Finding]:
    return {finding.name: finding for finding in nics.findings(found)}


def test_each_gpu_has_a_row_with_its_nics_and_the_reason(tmp_path: Path) -> None:
    ports = [f"mlx5_{number}:1" for number in range(12)]
    found = rows(recorded(tmp_path, "dgx-a100", ports))
    assert [*found] == [*(f"verbs NICs of GPU{gpu}" for gpu in range(8)), "GPU of a rank"]
    first = found["verbs NICs of GPU0"]
    assert first.found
    assert first.detail == "mlx5_1:1: nearest to GPU0: under the same PCIe switches (PXB)"
    assert "WEFT_VERBS_DEVICES=all" in first.follows


def test_domains_of_efa_are_matched_by_name(tmp_path: Path) -> None:
    domains = ["rdmap86s0-rdm", "rdmap87s0-rdm", "rdmap85s0-rdm", "rdmap88s0-rdm"]
    found = rows(recorded(tmp_path, "p5en", domains=domains))
    first, second = found["ofi NICs of GPU0"], found["ofi NICs of GPU1"]
    assert first.detail.startswith("rdmap85s0-rdm")
    assert second.detail.startswith("rdmap86s0-rdm")
    # All other NICs are down, so that the GPUs of other switches share these.
    assert all(row.found for name, row in found.items() if name.startswith("ofi"))
    assert not any(name.startswith("verbs") for name in found)


def test_domains_without_an_rdma_device_make_no_rows(tmp_path: Path) -> None:
    found = recorded(tmp_path, "p5en", domains=["eth0"])
    assert rows(found) == {}
    _, _, chosen, reason = found["ofi"]["gpus"][0]
    assert (chosen, reason) == ([], "no RDMA device on the PCI bus has a name in eth0")


def test_a_variable_takes_precedence_over_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_VERBS_DEVICES", "all")
    found = rows(recorded(tmp_path, "eflops", ["mlx5_0:1"]))
    assert found["verbs NICs"].detail == "WEFT_VERBS_DEVICES=all"
    assert not any(name.startswith("verbs NICs of") for name in found)


def test_a_rank_whose_gpu_is_not_known_is_told_so(tmp_path: Path) -> None:
    found = recorded(tmp_path, "eflops", ["mlx5_0:1"])
    found["rank_gpu"] = (None, "8 GPUs are visible to the only rank on this host")
    row = rows(found)["GPU of a rank"]
    assert (row.found, row.detail) == (False, "8 GPUs are visible to the only rank on this host")
    assert "CUDA_VISIBLE_DEVICES" in row.follows
    found["rank_gpu"] = ("0000:1a:00.0", "the only visible GPU")
    row = rows(found)["GPU of a rank"]
    assert (row.found, row.detail) == (True, "0000:1a:00.0: the only visible GPU")


def test_this_machine_has_a_report() -> None:
    found = nics.report()
    assert all(finding.detail and finding.follows for finding in nics.findings(found))
    _, reason = found["rank_gpu"]
    assert reason
