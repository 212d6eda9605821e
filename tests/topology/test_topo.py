import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from weft import _native
from weft.cli import main
from weft.errors import ConfigurationError, SizeError
from weft.topology import nvml_gpus
from weft.topology.nvml import PciInfo

DATA = ROOT / "crates" / "topology" / "tests" / "data"
CLASSES = {
    "port": "0x060400",
    "gpu": "0x030200",
    "ib": "0x020700",
    "net": "0x020000",
    "nvswitch": "0x068000",
}


def make_sysfs(root: Path, name: str) -> Path:
    """A directory like `/sys` from a description in `DATA`; its README describes the format."""
    above: list[Path] = []
    numa = "-1"
    for line in (DATA / f"{name}.sysfs").read_text(encoding="utf-8").splitlines():
        first, *words = line.split()
        depth = (len(line) - len(line.lstrip())) // 2
        if first == "node":
            write(root / f"devices/system/node/node{words[0]}/cpulist", words[1])
            continue
        if first == "bridge":
            above = [root / "devices" / words[0]]
            numa = words[1].removeprefix("numa=")
            continue
        above = [*above[:depth], above[depth - 1] / first]
        write(above[-1] / "numa_node", numa)
        for word in words:
            write_device(above[-1], *word.partition("=")[::2])
    return root


def write_device(path: Path, word: str, value: str) -> None:
    if word in CLASSES:
        write(path / "class", CLASSES[word])
        name, _, rate = value.partition(":")
        vendors = {"gpu": f"0x{name}", "nvswitch": "0x10de"}
        write(path / "vendor", vendors.get(word, "0x15b3"))
        if word == "ib":
            write(path / f"infiniband/{name}/ports/1/rate", f"{rate} Gb/sec (4X HDR)")
        if word == "net":
            write(path / f"net/{name}/speed", rate)
        return
    speed, _, width = value.partition("*")
    for which in ("max", "current") if word == "link" else ("current",):
        write(path / f"{which}_link_speed", f"{speed} GT/s PCIe")
        write(path / f"{which}_link_width", width)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n", encoding="utf-8")


def test_this_machine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] or found["notes"]
    assert main(["topo"]) == 0


def test_a_recorded_server_is_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_sysfs(tmp_path, "eflops")
    assert main(["topo", "--sysfs", str(root), "--strict"]) == 0
    shown = capsys.readouterr().out
    assert "NUMA node 1  CPUs 24-47" in shown
    assert "GPU0  mlx5_0  PIX" in shown
    assert "advice: a ring of all GPUs runs at 10.0 GB/s over PCIe" in shown
    assert "Assumed: pcie_payload 0.8, root_complex_slowdown 1.2" in shown


def test_a_bad_server_costs_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_sysfs(tmp_path, "bad")
    assert main(["topo", "--sysfs", str(root), "--strict", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rules = {finding["rule"] for finding in found["findings"]}
    assert rules == {
        "pair-not-under-one-switch",
        "pairs-share-root-port",
        "gpus-share-nic",
        "gpu-to-gpu",
        "narrow-link",
    }
    for finding in found["findings"]:
        assert finding["have_gb_per_s"] <= finding["could_gb_per_s"]


def test_xml_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = make_sysfs(tmp_path / "sys", "dgx-a100"), tmp_path / "dgx.xml"
    assert main(["topo", "--sysfs", str(root), "--write-xml", str(file), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["topo", "--xml", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["pairs"] == first["pairs"]
    assert len(again["pairs"]) == 8
    assert again["xml"] == file.read_text(encoding="utf-8")


def test_xml_of_nccl_is_written_back_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:01:00.0" class="0x030200" vendor="0x10de" device="0x2330">
      <gpu dev="0" sm="90" rank="0" gdr="1"/>
    </pci>
    <nic>
      <net name="aws" dev="0" latency="75.0" speed="100000" port="1" maxconn="1" coll="1" gdr="1"/>
    </nic>
  </cpu>
</system>
"""
    source, target = tmp_path / "source.xml", tmp_path / "target.xml"
    source.write_text(text, encoding="utf-8")
    assert main(["topo", "--xml", str(source), "--write-xml", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == text
    with pytest.raises(SystemExit):
        main(["topo", "--xml", str(source), "--write-xml", str(source)])
    assert "an input of this command; choose another name" in capsys.readouterr().err


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.xml"
    file.write_text("<system>\n<cpu>\n<pci/></cpu></system>", encoding="utf-8")
    assert main(["topo", "--xml", str(file)]) == 1
    assert capsys.readouterr().err == "weft topo: line 3: <pci> has no busid\n"
    assert main(["topo", "--sysfs", str(tmp_path / "nothing")]) == 1
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sysfs", "--xml"])
@pytest.mark.parametrize(
    "network",
    [
        ["bigraph", "--switches", "4", "--endpoints", "2"],
        ["network", "bigraph:switches=4,endpoints=2"],
    ],
)
def test_a_recorded_server_is_refused_where_a_network_is_asked_for(
    option: str, network: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["topo", option, str(tmp_path), *network])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    message = f"argument {option}: not allowed with {network[0]}, which reads no server"
    assert output.err.endswith(f"weft topo: error: {message}\n")
    assert main(["topo", *network]) == 0


def test_a_bigraph_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan"
    arguments = ["topo", "bigraph", "--switches", "16", "--endpoints", "4", "--physical", "8"]
    assert main([*arguments, "--nics", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "BiGraph of 2 x 8 switches cut from 8 boxes, 4 endpoints on each: 128 cables" in shown
    assert {path.name for path in out.iterdir()} == {
        "bigraph.png",
        "bigraph.svg",
        "cabling.csv",
        "hostfile.txt",
        "network.json",
        "rank_map.csv",
        "rankfile.txt",
        "torchrun.txt",
    }
    cables = (out / "cabling.csv").read_text(encoding="utf-8").splitlines()
    assert cables[0] == "cable,from_device,from_port,from_node,to_device,to_port,to_node,gbps"
    assert cables[1] == "1,host0,1,U0.0,switch0,1,U0,100"
    assert len(cables) == 1 + 64 + 64
    # No port on a box is used twice.
    ports = [tuple(line.split(",")[4:6]) for line in cables[1:]]
    ports += [tuple(line.split(",")[1:3]) for line in cables[65:]]
    assert len(set(ports)) == len(ports)
    assert "--nnodes=16 --nproc-per-node=4" in (out / "torchrun.txt").read_text(encoding="utf-8")
    assert main(["topo", "network", str(out / "network.json")]) == 0
    assert "rank map of its own    yes" in capsys.readouterr().out


def test_the_published_rank_map_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "bigraph", "--switches", "8", "--endpoints", "2"]) == 0
    rows = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("U", "L"))
    )
    assert rows == {
        "U0": "0 15",
        "U1": "3 9",
        "U2": "5 10",
        "U3": "6 12",
        "L0": "1 8",
        "L1": "2 11",
        "L2": "4 13",
        "L3": "7 14",
    }


def test_hosts_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, out = tmp_path / "hosts", tmp_path / "out"
    names.write_text("".join(f"node{host}\n" for host in range(8)), encoding="utf-8")
    arguments = ["topo", "bigraph", "--switches", "4", "--endpoints", "2"]
    assert main([*arguments, "--hosts", str(names), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 8
    hostfile = (out / "hostfile.txt").read_text(encoding="utf-8").splitlines()
    assert hostfile[:2] == ["node0 slots=1", "node4 slots=1"]
    names.write_text("only one\n", encoding="utf-8")
    assert main([*arguments, "--hosts", str(names)]) == 1
    assert "1 host names: expected 8, one per host" in capsys.readouterr().err


def test_a_bigraph_of_another_size_is_embedded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "bigraph", "--switches", "12", "--endpoints", "5"]) == 0
    shown = capsys.readouterr().out
    assert "28 endpoints have no rank: 6 switches of each half is not a power of two" in shown
    assert main(["topo", "bigraph", "--switches", "7", "--endpoints", "5"]) == 1
    assert "switches 7: expected an even number" in capsys.readouterr().err


def test_a_network_is_checked_and_has_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, file = "fat-tree:leaves=2,spines=2,hosts=2,latency_us=1", tmp_path / "network.json"
    arguments = ["topo", "network", spec, "--path", "leaf0.0", "3", "--out", str(file)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    path = "leaf0.0->leaf0 leaf0->spine1 spine1->leaf1 leaf1->leaf1.1"
    assert f"{path}\n4 µs, 2 shortest path(s)\n" in shown
    assert main(["topo", "network", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["endpoints"] == 4
    unique = ["topo", "network", spec, "--path", "0", "3", "--routing", "unique"]
    assert main(unique) == 1
    assert "there are 2 shortest paths" in capsys.readouterr().err
    assert main(["topo", "network", "fat-tree:leafs=2,spines=2,hosts=2"]) == 1
    assert 'leaves is missing; did you mean it by "leafs"?' in capsys.readouterr().err


def test_nics_as_near_as_nvlink_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "network.json"
    links = [["gpu[0-1]", "leaf"], ["gpu[0-1]", "nvlink"]]
    gpus = {"name": "gpu[0-1]", "host": "box"}
    network = {"switches": ["leaf"], "hosts": ["nvlink"], "endpoints": [gpus], "links": links}
    file.write_text(json.dumps(network), encoding="utf-8")
    assert main(["topo", "network", str(file), "--path", "0", "1"]) == 0
    shown = capsys.readouterr().out
    warning = "warning: gpu0 to gpu1: 2 links inside host box, 2 through switches: routing stays"
    assert warning in shown
    assert "gpu0->nvlink nvlink->gpu1" in shown
    assert main(["sim", "allreduce", "--topology", str(file), "--bytes", "1KiB"]) == 0
    assert f"weft sim: {warning}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("-1", "'-1': expected a whole number from 0 on"),
        ("x", "'x': expected a whole number from 0 on"),
        ("99999999999999999999", "99999999999999999999: expected at most"),
    ],
)
def test_a_seed_that_cannot_be_is_refused(
    seed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = "fat-tree:leaves=2,spines=2,hosts=2"
    for option in ("--seed", "--flow"):
        with pytest.raises(SystemExit):
            main(["topo", "network", spec, "--path", "0", "3", f"{option}={seed}"])
        assert f"argument {option}: {message}" in capsys.readouterr().err


def test_the_examples_of_the_page_are_understood(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "topology.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        assert example.count("\n") <= 11
        (tmp_path / "network.json").write_text(example, encoding="utf-8")
        found = json.loads(_native.topology_network(str(tmp_path / "network.json")))
        assert found["endpoints"] == 8
    forms = re.findall(r"`((?:bigraph|fat-tree|fat-tree3|rail):[^`]+)`", page)
    assert len(forms) == 5
    for form in forms:
        assert json.loads(_native.topology_network(form))["endpoints"] > 0


def test_errors_have_classes() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth -"):
        _native.topology_network("bigraph:switches=2,endpoints=1,gbps=-1")
    with pytest.raises(SizeError, match="1048576 allowed"):
        _native.topology_network("bigraph:switches=2,endpoints=4000000000")


class FakeNvml:
    """NVML with two GPUs connected by two links; the second returns errors for NVLink queries."""

    def __init__(self) -> None:
        self.open = False

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open = True
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = 100 + index
        return 0

    def nvmlDeviceGetPciInfo_v3(self, device: ctypes.c_void_p, info: Any) -> int:  # noqa: N802
        info._obj.bus_id = b"00000000:1A:00.0" if device.value == 100 else b"00000000:3D:00.0"
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> int:  # noqa: N802
        assert length == len(name)
        name.value = b"A GPU"
        return 0

    def nvmlDeviceGetCudaComputeCapability(  # noqa: N802
        self, device: Any, major: Any, minor: Any
    ) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, now: Any, pending: Any) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetNvLinkState(  # noqa: N802
        self, device: ctypes.c_void_p, link: int, state: Any
    ) -> int:
        state._obj.value = 1
        return 0 if device.value == 100 and link < 2 else 3

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(  # noqa: N802
        self, device: Any, link: int, info: Any
    ) -> int:
        info._obj.bus_id = b"00000000:3D:00.0"
        return 0


def test_nvml_tells_of_nvlinks(tmp_path: Path) -> None:
    library = FakeNvml()
    gpus = nvml_gpus(library)
    assert not library.open
    assert gpus == [
        {
            "bus_id": "00000000:1A:00.0",
            "index": 0,
            "nvlinks": ["00000000:3D:00.0"] * 2,
            "name": "A GPU",
            "sm": 90,
        },
        {"bus_id": "00000000:3D:00.0", "index": 1, "nvlinks": [], "name": "A GPU", "sm": 90},
    ]
    root = make_sysfs(tmp_path, "eflops")
    found = json.loads(_native.topology_host(str(root), None, json.dumps(gpus)))
    assert found["nvlinks"] == [
        {"gpu": "0000:1a:00.0", "target": "0000:3d:00.0", "count": 2, "to_switch": False}
    ]
    assert "GPU1 0000:3d:00.0  A GPU  PCIe 3 x16 15.8 GB/s" in found["tree"]


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.topology.nvml.load", lambda *_: None)
    assert nvml_gpus() is None
    # Header layout: two strings and five numbers.
    assert ctypes.sizeof(PciInfo) == 16 + 5 * 4 + 32
