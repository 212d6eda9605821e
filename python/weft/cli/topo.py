"""`weft topo`: this server's GPUs and NICs, what is wrong with them, and networks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.cli.arguments import natural, positive
from weft.cli.table import format_table
from weft.errors import WeftError

if TYPE_CHECKING:
    import argparse

    from weft.cli.arguments import Subparsers

ROUTINGS: Final = ("static", "ecmp", "unique", "adaptive")
LISTED: Final = 16
SPEC_HELP: Final = (
    "a JSON file, or a short form: bigraph:switches=16,endpoints=4;"
    " fat-tree:leaves=8,spines=8,hosts=8; fat-tree3:k=8; rail:hosts=16,gpus=8;"
    " each with ,gbps=100,latency_us=0.5"
)


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo` and what is under it."""
    parser = subparsers.add_parser(
        "topo",
        help="show a server's GPUs and NICs and what is wrong with them; plan a network",
        description="Print the PCIe tree of this server (or a recorded one), pair GPUs with NICs,"
        " and say what is wrong in the terms of EFLOPS and what it costs.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--sysfs", type=Path, metavar="ROOT", help="a copy of /sys (default: this machine's)"
    )
    source.add_argument(
        "--xml", type=Path, metavar="FILE", help="a topology that NCCL wrote (NCCL_TOPO_DUMP_FILE)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--write-xml", type=Path, metavar="FILE", help="write it as NCCL reads it (NCCL_TOPO_FILE)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there is a warning")
    parser.set_defaults(run=run_host, usage_error=parser.error)
    networks = parser.add_subparsers(title="networks", metavar="NETWORK", dest="network")
    add_bigraph_parser(networks)
    add_network_parser(networks)


def add_bigraph_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo bigraph`."""
    parser = subparsers.add_parser(
        "bigraph",
        help="cabling list, HDRM rank map and picture of a BiGraph",
        description="Plan a BiGraph: what is plugged into what, which rank goes where so that no"
        " two connections of a step of halving-doubling share a link, and a picture.",
    )
    needed = {"switches": "switches of both halves together", "endpoints": "endpoints on a switch"}
    for name, what in needed.items():
        parser.add_argument(f"--{name}", type=positive, required=True, metavar="N", help=what)
    parser.add_argument(
        "--physical", type=positive, metavar="N", help="boxes that the switches are cut from"
    )
    parser.add_argument(
        "--trunks", type=positive, default=1, metavar="N", help="cables for each pair of switches"
    )
    parser.add_argument(
        "--nics", type=positive, default=1, metavar="N", help="NICs of a host (default %(default)s)"
    )
    parser.add_argument(
        "--gbps", type=float, default=100, metavar="N", help="of a cable (default %(default)s)"
    )
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="names of hosts, a line each: in the order of ports (U0.0, U0.1, ...), or with several"
        " NICs each in the order of ranks",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write all files into DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_bigraph)


def add_network_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo network`."""
    parser = subparsers.add_parser(
        "network",
        help="check a network's description, turn it into JSON, find a path",
        description="Read a network, say what is wrong with it or what it has, and find paths.",
    )
    parser.add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    parser.add_argument(
        "--path", nargs=2, metavar=("FROM", "TO"), help="endpoints, by name or number"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="static", help="of the path")
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of ECMP (default %(default)s)"
    )
    parser.add_argument(
        "--flow", type=natural, default=0, metavar="N", help="which connection of the pair"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the network as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_network)


def refuse_server(arguments: argparse.Namespace) -> None:
    """Refuse a recorded server where a network is asked for: nothing would be read from it."""
    for option in ("sysfs", "xml"):
        if getattr(arguments, option) is not None:
            arguments.usage_error(
                f"argument --{option}: not allowed with {arguments.network}, which reads no server"
            )


def failed(error: Exception) -> int:
    """Say what went wrong."""
    print(f"weft topo: {error}", file=sys.stderr)
    return 1


def run_host(arguments: argparse.Namespace) -> int:
    """Show a server; 1 if it cannot be read, or if there is a warning and that matters."""
    from weft import _native
    from weft.topology import nvml_gpus

    recorded = arguments.sysfs is not None or arguments.xml is not None
    gpus = None if recorded else nvml_gpus()
    try:
        xml = None if arguments.xml is None else arguments.xml.read_text(encoding="utf-8")
        if arguments.sysfs is not None and not arguments.sysfs.is_dir():
            raise NotADirectoryError(f"{arguments.sysfs} is not a directory")
        nvml = None if gpus is None else json.dumps(gpus)
        root = str(arguments.sysfs or "/sys")
        found: dict[str, Any] = json.loads(_native.topology_host(root, xml, nvml))
        if arguments.write_xml is not None:
            arguments.write_xml.write_text(found["xml"], encoding="utf-8")
    except (WeftError, OSError, UnicodeDecodeError) as error:
        return failed(error)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show_host(found)
    warned = any(finding["severity"] == "warning" for finding in found["findings"])
    return 1 if arguments.strict and warned else 0


def show_host(found: dict[str, Any]) -> None:
    """Print a server for people."""
    if found["tree"]:
        print(found["tree"])
    if found["pairs"]:
        rows = [
            (pair["gpu"], pair["nic"], pair["distance"], "further" if pair["further"] else "")
            for pair in found["pairs"]
        ]
        print(format_table(("GPU", "NIC", "distance", ""), rows) + "\n")
    for finding in found["findings"]:
        print(f"{finding['severity']}: {finding['what']} [{finding['rule']}]")
        have, could = finding["have_gb_per_s"], finding["could_gb_per_s"]
        if have is not None and could is not None:
            print(f"  {have:.1f} GB/s of {could:.1f} GB/s: {finding['formula']}")
    if found["findings"]:
        assumed = ", ".join(f"{name} {value:g}" for name, value in found["assumptions"].items())
        print(f"\nAssumed: {assumed}")
    elif found["pairs"]:
        print("Nothing is wrong with this server.")
    for note in found["notes"]:
        print(f"note: {note}")


def run_bigraph(arguments: argparse.Namespace) -> int:
    """Plan a BiGraph; 1 if there is none of that form."""
    from weft import _native

    refuse_server(arguments)
    options = {
        "switches": arguments.switches,
        "endpoints": arguments.endpoints,
        "trunks": arguments.trunks,
        "nics": arguments.nics,
        "gbps": arguments.gbps,
    }
    if arguments.physical is not None:
        options["physical"] = arguments.physical
    spec = "bigraph:" + ",".join(f"{name}={value}" for name, value in options.items())
    try:
        hosts = None
        if arguments.hosts is not None:
            lines = arguments.hosts.read_text(encoding="utf-8").splitlines()
            hosts = [line.strip() for line in lines if line.strip()]
        report: dict[str, Any] = json.loads(_native.topology_bigraph(spec, hosts))
        written = [] if arguments.out is None else write_plan(report, arguments.out)
    except (WeftError, OSError, UnicodeDecodeError) as error:
        return failed(error)
    if arguments.json:
        print(json.dumps(report | {"written": [str(path) for path in written]}, indent=2))
    else:
        show_bigraph(report, written)
    return 0


def write_plan(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write a plan's files, and pictures if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in report["files"].items():
        (folder / name).write_text(content, encoding="utf-8")
        written.append(folder / name)
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: pip install 'weft[plot]' brings matplotlib.", file=sys.stderr)
        return written
    from weft.topology import draw_bigraph

    pictures = [folder / "bigraph.svg", folder / "bigraph.png"]
    draw_bigraph(report, *pictures)
    return written + pictures


def show_bigraph(report: dict[str, Any], written: list[Path]) -> None:
    """Print a plan for people."""
    physical = report["physical"]
    boxes = "" if physical is None else f" cut from {physical} boxes"
    print(
        f"BiGraph of 2 x {report['half']} switches{boxes}, {report['endpoints']} endpoints on each:"
        f" {report['cables']:,} cables\n"
    )
    if report["places"] is not None:
        ranks: dict[str, list[str]] = {}
        for place in report["places"]["ranks"]:
            ranks.setdefault(place["switch"], []).append(str(place["rank"]))
        order = sorted(ranks, key=lambda name: (name[0] == "L", int(name[1:])))
        rows = [(name, shortened(ranks[name])) for name in order]
        print(format_table(("switch", "ranks of HDRM"), rows))
    if report["reason"] is not None:
        print(f"\n{report['left_out']:,} endpoints have no rank: {report['reason']}")
    for name, reason in report["unavailable"].items():
        print(f"\nNo {name}: {reason}")
    for path in written:
        print(f"\nWritten: {path}" if path == written[0] else f"         {path}")


def shortened(ranks: list[str]) -> str:
    """Ranks in their order, no more than a line holds."""
    listed = sorted(ranks, key=int)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return " ".join(listed[:LISTED]) + more


def run_network(arguments: argparse.Namespace) -> int:
    """Show a network, or a path on it; 1 if there is something wrong with it."""
    from weft import _native

    refuse_server(arguments)
    try:
        found: dict[str, Any] = json.loads(_native.topology_network(arguments.spec))
        path = None
        if arguments.path is not None:
            source, target = arguments.path
            how = {name: getattr(arguments, name) for name in ("routing", "seed", "flow")}
            path = json.loads(_native.topology_path(arguments.spec, source, target, **how))
        if arguments.out is not None:
            arguments.out.write_text(found["json"], encoding="utf-8")
    except (WeftError, OSError) as error:
        return failed(error)
    if arguments.json:
        network = json.loads(found.pop("json"))
        print(json.dumps(found | {"network": network, "path": path}, indent=2))
        return 0
    show_network(found)
    if path is not None:
        route = " ".join(path["links"]) or "(to itself)"
        print(
            f"\n{route}\n{path['latency_s'] * 1e6:g} µs, {path['shortest_paths']} shortest path(s)"
        )
    return 0


def show_network(found: dict[str, Any]) -> None:
    """Print a network for people."""
    print(found["name"] or "A network")
    least, most = found["least_gbps"], found["most_gbps"]
    rows = [
        ("endpoints", found["endpoints"]),
        ("switches", found["switches"]),
        ("switches inside hosts", found["hosts"]),
        ("directed links", found["links"]),
        ("Gb/s of a link", f"{least:g}" if least == most else f"{least:g} to {most:g}"),
        ("explicit routes", found["routes"]),
        ("rank map of its own", found["rank_map"]),
    ]
    print(format_table(("what", "value"), rows))
