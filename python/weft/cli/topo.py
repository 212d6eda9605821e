"""`weft topo`: this server's GPUs and NICs, what is wrong with them, and networks."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import WeftError
from weft.base.files import read_text
from weft.base.output_files import Kind, OutputFile, check_outputs, write_output
from weft.cli.arguments import natural, positive
from weft.cli.stored import Storing, file_name
from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from weft.cli.arguments import Subparsers

ROUTINGS: Final = ("static", "ecmp", "unique", "adaptive")
LISTED: Final = 16
#: Plan files, with kinds.
PLAN_FILES: Final[dict[str, Kind]] = {
    "cabling.csv": "cabling list",
    "network.json": "network",
    "rank_map.csv": "rank map",
    "rankfile.txt": "rank file",
    "hostfile.txt": "host file",
    "torchrun.txt": "node ranks",
    "bigraph.svg": ".svg",
    "bigraph.png": ".png",
}
SPEC_HELP: Final = (
    "JSON file, or a short form: bigraph:switches=16,endpoints=4;"
    " fat-tree:leaves=8,spines=8,hosts=8; fat-tree3:k=8; rail:hosts=16,gpus=8;"
    " each with ,gbps=100,latency_us=0.5"
)


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo` and what is under it."""
    parser = subparsers.add_parser(
        "topo",
        help="GPUs and NICs of a server with its bottlenecks; plans of networks",
        description="PCIe tree of this server (or a recorded one), GPU and NIC pairs, and "
        "bottlenecks in EFLOPS terms with costs.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--sysfs", type=Path, metavar="ROOT", help="copy of /sys (default: this machine's)"
    )
    source.add_argument(
        "--xml", type=Path, metavar="FILE", help="NCCL topology file (NCCL_TOPO_DUMP_FILE)"
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument(
        "--write-xml",
        type=file_name,
        metavar="FILE",
        help="topology file to write for NCCL (NCCL_TOPO_FILE)",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 for a warning")
    parser.set_defaults(run=run_host, usage_error=parser.error, server_error=parser.error)
    networks = parser.add_subparsers(title="networks", metavar="NETWORK", dest="network")
    add_bigraph_parser(networks)
    add_network_parser(networks)


def add_bigraph_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo bigraph`."""
    parser = subparsers.add_parser(
        "bigraph",
        help="cabling list, HDRM rank map and picture for a BiGraph",
        description="BiGraph plan: cables, a rank placement for which no two connections in a "
        "halving-doubling step share a link, and a picture.",
    )
    needed = {
        "switches": "total switches in both halves",
        "endpoints": "endpoints per switch",
    }
    for name, what in needed.items():
        parser.add_argument(f"--{name}", type=positive, required=True, metavar="N", help=what)
    parser.add_argument(
        "--physical",
        type=positive,
        metavar="N",
        help="physical switches, each divided into logical ones",
    )
    parser.add_argument(
        "--trunks",
        type=positive,
        default=1,
        metavar="N",
        help="cables per switch pair",
    )
    parser.add_argument(
        "--nics", type=positive, default=1, metavar="N", help="NICs per host (default %(default)s)"
    )
    parser.add_argument(
        "--gbps", type=float, default=100, metavar="N", help="Gb/s per cable (default %(default)s)"
    )
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="file with a host name per line: in port order (U0.0, U0.1, ...), or in rank order "
        "with several NICs per host",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for all files")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run_bigraph, usage_error=parser.error)


def add_network_parser(subparsers: Subparsers) -> None:
    """Declare `weft topo network`."""
    parser = subparsers.add_parser(
        "network",
        help="check, JSON form and paths of a network",
        description="Contents of a network, or the error in its description; paths between"
        " endpoints.",
    )
    parser.add_argument("spec", metavar="SPEC", help=SPEC_HELP)
    parser.add_argument(
        "--path", nargs=2, metavar=("FROM", "TO"), help="path endpoints, by name or number"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="static", help="path routing")
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="S",
        help="ECMP random seed (default %(default)s)",
    )
    parser.add_argument(
        "--flow",
        type=natural,
        default=0,
        metavar="N",
        help="connection number between the pair (default 0)",
    )
    parser.add_argument("--out", type=file_name, metavar="FILE", help="network as a JSON file")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run_network, usage_error=parser.error)


def refuse_server(arguments: argparse.Namespace) -> None:
    """Reject a recorded server together with a network, which reads none and writes none."""
    for name, does in (("sysfs", "reads"), ("xml", "reads"), ("write_xml", "writes")):
        if getattr(arguments, name) is not None:
            option = name.replace("_", "-")
            arguments.server_error(
                f"argument --{option}: not allowed with {arguments.network}, which {does} no server"
            )


def check(
    arguments: argparse.Namespace, outputs: Iterable[OutputFile], inputs: Iterable[Path | None]
) -> None:
    """Reject output files that cannot be written, or must not be replaced."""
    try:
        check_outputs(outputs, [path for path in inputs if path is not None])
    except ValueError as error:
        arguments.usage_error(str(error))


def failed(error: Exception) -> int:
    """Print an error; the exit status."""
    print(f"weft topo: {error}", file=sys.stderr)
    return 1


def run_host(arguments: argparse.Namespace) -> int:
    """Show a server; 1 if it cannot be read, or if there is a warning and that matters."""
    from weft import _native
    from weft.topology import nvml_gpus

    recorded = arguments.sysfs is not None or arguments.xml is not None
    if arguments.write_xml is not None:
        file = OutputFile("--write-xml", arguments.write_xml, "NCCL topology file")
        check(arguments, [file], [arguments.xml])
    gpus = None if recorded else nvml_gpus()
    storing = Storing("weft topo")
    try:
        xml = None if arguments.xml is None else read_text(arguments.xml)
        if arguments.sysfs is not None and not arguments.sysfs.is_dir():
            raise NotADirectoryError(f"{arguments.sysfs} is not a directory")
        nvml = None if gpus is None else json.dumps(gpus)
        root = str(arguments.sysfs or "/sys")
        found: dict[str, Any] = json.loads(_native.topology_host(root, xml, nvml))
    except (WeftError, OSError, UnicodeDecodeError) as error:
        return failed(error)
    if arguments.write_xml is not None:
        path = arguments.write_xml
        storing.attempt("--write-xml", path, lambda: write_output(path, found["xml"]))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show_host(found)
    warned = any(finding["severity"] == "warning" for finding in found["findings"])
    return storing.status(1 if arguments.strict and warned else 0)


def show_host(found: dict[str, Any]) -> None:
    """Print a server as text."""
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
        print("No bottleneck found.")
    for note in found["notes"]:
        print(f"note: {note}")


def run_bigraph(arguments: argparse.Namespace) -> int:
    """Plan a BiGraph; 1 if no BiGraph has that form."""
    from weft import _native

    refuse_server(arguments)
    if arguments.out is not None:
        check(arguments, plan_files(arguments.out), [arguments.hosts])
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
            lines = read_text(arguments.hosts).splitlines()
            hosts = [line.strip() for line in lines if line.strip()]
        report: dict[str, Any] = json.loads(_native.topology_bigraph(spec, hosts))
    except (WeftError, OSError, UnicodeDecodeError) as error:
        return failed(error)
    storing = Storing("weft topo")
    written = [] if arguments.out is None else write_plan(report, arguments.out, storing)
    if arguments.json:
        print(json.dumps(report | {"written": [str(path) for path in written]}, indent=2))
    else:
        show_bigraph(report, written)
    return storing.status()


def plan_files(folder: Path) -> list[OutputFile]:
    """Files that make up a plan."""
    return [
        OutputFile("--out", folder / name, kind, makes_folders=True)
        for name, kind in PLAN_FILES.items()
    ]


def write_plan(report: dict[str, Any], folder: Path, storing: Storing) -> list[Path]:
    """Write a plan's files, and pictures if matplotlib is there; those that were stored."""
    if not storing.attempt("--out", folder, lambda: folder.mkdir(parents=True, exist_ok=True)):
        return []
    written = [
        folder / name
        for name, content in report["files"].items()
        if storing.attempt("--out", folder / name, partial(write_output, folder / name, content))
    ]
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: pip install 'weft[plot]' brings matplotlib.", file=sys.stderr)
        return written
    from weft.topology import draw_bigraph

    pictures = [folder / "bigraph.svg", folder / "bigraph.png"]
    drawn = storing.attempt("--out", folder, lambda: draw_bigraph(report, *pictures))
    return written + (pictures if drawn else [])


def show_bigraph(report: dict[str, Any], written: list[Path]) -> None:
    """Print a plan as text."""
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
    """Ranks in order, no more than a line holds."""
    listed = sorted(ranks, key=int)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return " ".join(listed[:LISTED]) + more


def run_network(arguments: argparse.Namespace) -> int:
    """Show a network, or a path on it; 1 if there is something wrong with it."""
    from weft import _native

    refuse_server(arguments)
    if arguments.out is not None:
        check(arguments, [OutputFile("--out", arguments.out, "network")], [Path(arguments.spec)])
    storing = Storing("weft topo")
    try:
        found: dict[str, Any] = json.loads(_native.topology_network(arguments.spec))
        path = None
        if arguments.path is not None:
            source, target = arguments.path
            how = {name: getattr(arguments, name) for name in ("routing", "seed", "flow")}
            path = json.loads(_native.topology_path(arguments.spec, source, target, **how))
    except (WeftError, OSError) as error:
        return failed(error)
    if arguments.out is not None:
        text = found["json"]
        storing.attempt("--out", arguments.out, lambda: write_output(arguments.out, text))
    if arguments.json:
        network = json.loads(found.pop("json"))
        print(json.dumps(found | {"network": network, "path": path}, indent=2))
        return storing.status()
    show_network(found)
    if path is not None:
        route = " ".join(path["links"]) or "(to itself)"
        print(
            f"\n{route}\n{path['latency_s'] * 1e6:g} µs, {path['shortest_paths']} shortest path(s)"
        )
    return storing.status()


def show_network(found: dict[str, Any]) -> None:
    """Print a network as text."""
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
    for warning in found.get("warnings", ()):
        print(f"warning: {warning}")
