"""`weft bench`: measure Weft on this machine, and check every result while at it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import WeftError
from weft.base.output_files import OutputFile, check_outputs
from weft.cli import bench_device
from weft.cli.arguments import PROVIDERS, natural, positive, ranks
from weft.cli.stored import Storing, file_name
from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse

    from weft.cli.arguments import Subparsers

RESULTS: Final = Path("benchmarks/results")
#: Defaults for `weft bench moe` on the CPU.
DEFAULTS: Final = {
    "ranks": 4,
    "tokens": 128,
    "hidden": 1024,
    "experts": 16,
    "top_k": 2,
    "rounds": 100,
}


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft bench` and what can be measured."""
    parser = subparsers.add_parser(
        "bench", help="benchmarks of transfers, MoE dispatch and combine"
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    add_moe_parser(benchmarks)
    add_transfer_parser(benchmarks)


def add_moe_parser(subparsers: Subparsers) -> None:
    """Declare `weft bench moe`."""
    parser = subparsers.add_parser(
        "moe",
        help="MoE dispatch and combine over local ranks",
        description="Random tokens through dispatch, experts and combine, with every result "
        "element held to the documented error bound. Under a launcher, its ranks are used.",
    )
    for name, on_gpus, what in (
        ("ranks", "one for each visible GPU", "number of ranks"),
        ("tokens", "128", "tokens per rank and round"),
        ("hidden", "7168", "elements per token"),
        ("experts", "256", "total number of experts"),
        ("top_k", "8", "experts per token"),
        ("rounds", "400", "number of measured rounds"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=ranks if name == "ranks" else positive,
            metavar="N",
            help=f"{what} (default {DEFAULTS[name]}; on GPUs {on_gpus})",
        )
    parser.add_argument("--dtype", default="bfloat16", help="token dtype (default %(default)s)")
    parser.add_argument(
        "--routing",
        default="uniform",
        metavar="uniform|zipf|incast|FILE",
        help="expert distribution over tokens; FILE is an .npz or .safetensors file with ids"
        " [tokens, top_k] and optional weights, or both for each of several layers, which rounds"
        " take in turn (default %(default)s)",
    )
    parser.add_argument("--seed", type=natural, default=0, help="random seed (default %(default)s)")
    parser.add_argument(
        "--provider", choices=PROVIDERS, help="provider (default: the best available)"
    )
    parser.add_argument("--trace", type=file_name, metavar="FILE", help="trace file for Perfetto")
    add_output(parser, "moe.jsonl", "; gpu_moe.jsonl with a device")
    bench_device.add_options(parser)
    parser.set_defaults(run=run_moe, usage_error=parser.error)


def add_transfer_parser(subparsers: Subparsers) -> None:
    """Declare `weft bench transfer`."""
    from weft.bench.sizes import DEFAULT_PAGE_SIZES, DEFAULT_SIZES, MOST_PAGES
    from weft.bench.transfer import DEVICES
    from weft.cli.arguments import up_to

    parser = subparsers.add_parser(
        "transfer",
        help="counted writes between two ranks",
        description="Write round trips between two local ranks through the Python API, with"
        " every byte checked, beside a local copy of as many bytes in the same memory.",
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help=f"sizes in bytes; 4K and 4KiB are 4096, 4kB is 4000 (default {DEFAULT_SIZES})",
    )
    parser.add_argument(
        "--pages",
        type=up_to(MOST_PAGES),
        metavar="N",
        help="pages per write, at scattered places in the source and the destination (default:"
        " writes of one contiguous range)",
    )
    parser.add_argument(
        "--page-bytes",
        metavar="SIZE,...",
        help=f"page sizes, in place of --sizes (default {DEFAULT_PAGE_SIZES})",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="memory of sources and destinations; cuda: one GPU for each rank, or both on one;"
        " twin: CPU memory in place of GPUs (default %(default)s)",
    )
    parser.add_argument(
        "--provider",
        choices=PROVIDERS,
        help="provider (default: the best available; with a device copy); over shm and tcp device"
        " memory goes through slots in host memory (WEFT_STAGED)",
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="round trips per size (default: by size)"
    )
    add_output(
        parser,
        "transfer.jsonl",
        "; transfer_pages.jsonl with --pages, gpu_ before it with a device",
    )
    parser.set_defaults(run=run_transfer, usage_error=parser.error)


def add_output(parser: argparse.ArgumentParser, name: str, more: str = "") -> None:
    """Declare how results are shown and kept."""
    parser.set_defaults(record_name=name)
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.add_argument(
        "--record",
        nargs="?",
        type=file_name,
        const=Path(),
        metavar="FILE",
        help=f"file of JSON lines to append the result to (default {RESULTS / name}{more})",
    )


def run_moe(arguments: argparse.Namespace) -> int:
    """Measure; 1 if a result was wrong."""
    if arguments.device != "cpu":
        return bench_device.run(arguments)
    bench_device.refuse_options(arguments)
    from weft.bench import moe
    from weft.bench.group import GroupError, check_provider, under_launcher
    from weft.bench.moe_workload import Workload

    given: dict[str, Any] = {
        name: getattr(arguments, name) or default for name, default in DEFAULTS.items()
    }
    fields = ("dtype", "routing", "seed")
    files = record_files(arguments)
    if arguments.trace is not None:
        files.append(OutputFile("--trace", arguments.trace, "Perfetto trace"))
    try:
        check_outputs(files, [Path(arguments.routing)])
        workload = Workload(**given, **{name: getattr(arguments, name) for name in fields})
        if not under_launcher():
            workload.check_memory()
    except ValueError as error:
        arguments.usage_error(str(error))
    options = moe.Options(arguments.provider, arguments.trace, not arguments.json)
    try:
        check_provider(arguments.provider)
        found = moe.measure(workload, options)
    except GroupError as error:
        print(f"weft bench moe: {error}", file=sys.stderr)
        return error.status
    except WeftError as error:
        print(f"weft bench moe: {error}", file=sys.stderr)
        return 1
    if found is None:
        return 0
    storing = Storing("weft bench moe")
    events = found.pop("events", None)
    if events is not None:
        found["trace"] = None
        if storing.attempt("--trace", arguments.trace, partial(moe.write_events, events)):
            found["trace"] = str(arguments.trace)
    finish(arguments, found, show_moe, storing)
    return storing.status(1 if found["wrong_rounds"] else 0)


def run_transfer(arguments: argparse.Namespace) -> int:
    """Measure; 1 if a transfer was wrong."""
    from weft.bench import transfer
    from weft.bench.group import GroupError, check_provider

    sizes, pages, device = transfer_sizes(arguments), arguments.pages or 0, arguments.device
    workload = transfer.Workload(sizes, pages, device, arguments.rounds)
    provider = transfer.provider_on(device, arguments.provider)
    named = ("gpu_" if device != "cpu" else "") + ("transfer_pages" if pages else "transfer")
    arguments.record_name = f"{named}.jsonl"
    check_record(arguments)
    try:
        check_provider(provider)
        found = transfer.measure(workload, provider, not arguments.json)
    except GroupError as error:
        print(f"weft bench transfer: {error}", file=sys.stderr)
        return error.status
    except WeftError as error:
        print(f"weft bench transfer: {error}", file=sys.stderr)
        return 1
    storing = Storing("weft bench transfer")
    finish(arguments, found, show_transfer, storing)
    return storing.status(1 if any(size["wrong"] for size in found["sizes"]) else 0)


def transfer_sizes(arguments: argparse.Namespace) -> list[int]:
    """Bytes per page, or per write without `--pages`."""
    from weft.bench.sizes import DEFAULT_PAGE_SIZES, DEFAULT_SIZES, parse_sizes

    if arguments.page_bytes is not None and arguments.pages is None:
        arguments.usage_error("--page-bytes needs --pages")
    if arguments.sizes is not None and arguments.pages is not None:
        arguments.usage_error("--sizes is of contiguous writes: pass --page-bytes with --pages")
    if arguments.pages is None:
        option, text = "--sizes", arguments.sizes or DEFAULT_SIZES
    else:
        option, text = "--page-bytes", arguments.page_bytes or DEFAULT_PAGE_SIZES
    try:
        return parse_sizes(text, arguments.pages or 1)
    except ValueError as error:
        arguments.usage_error(f"{option}: {error}")
        raise


def record_files(arguments: argparse.Namespace) -> list[OutputFile]:
    """The file for `--record`, if it is given."""
    if arguments.record is None:
        return []
    kind: Final = "JSON lines of results"
    return [OutputFile("--record", record_path(arguments), kind, makes_folders=True)]


def record_path(arguments: argparse.Namespace) -> Path:
    """The file that `--record` names; an option without a value is an empty path."""
    named: Path = arguments.record
    return named if named.name else RESULTS / arguments.record_name


def check_record(arguments: argparse.Namespace) -> None:
    """Reject a `--record` file that cannot be written, or has another kind."""
    try:
        check_outputs(record_files(arguments))
    except ValueError as error:
        arguments.usage_error(str(error))


def finish(
    arguments: argparse.Namespace, found: dict[str, Any], show: Any, storing: Storing
) -> None:
    """Show a result, and record it if requested."""
    from weft.bench.record import append_record, origin

    found = {"origin": origin()} | found
    if arguments.json:
        print(json.dumps(found))
    else:
        if found["origin"]["profile"] != "release":
            print("Debug build of Weft: its figures are not representative.\n")
        show(found)
    if arguments.record is not None:
        path = record_path(arguments)
        storing.attempt("--record", path, partial(append_record, path, found))


def show_moe(found: dict[str, Any]) -> None:
    """Print a result as text."""
    from weft.bench.group import named_routes
    from weft.cli.demo import PHASE_HEADERS

    workload = found["workload"]
    over = named_routes(found["routes"], found["provider_details"]) or "one rank"
    print(
        f"{workload['ranks']} ranks over {over}: {workload['tokens']} tokens each,"
        f" hidden {workload['hidden']}, {workload['experts']} experts, top {workload['top_k']},"
        f" {workload['dtype']}, {workload['routing']}; {workload['rounds']} rounds\n"
    )
    print(format_table(PHASE_HEADERS, [list(phase.values()) for phase in found["phases"]]) + "\n")
    ratio = found["bytes_ratio"]
    rows = [
        ("dispatch, all ranks together, GB/s", found["dispatch_gb_per_s"]),
        ("combine, all ranks together, GB/s", found["combine_gb_per_s"]),
        ("bytes moved between ranks", found["bytes_moved"]),
        ("bytes with a copy per expert", found["naive_bytes"]),
        ("moved / copy per expert", ratio),
        ("busiest expert / mean, worst layer", found["expert_imbalance"]),
        ("busiest rank / mean, worst layer", found["rank_imbalance"]),
        ("channels of a rank, bytes", found["memory_bytes_per_rank"]),
        ("results outside the error bound", found["wrong_rounds"]),
        ("largest error / bound", found["largest_share_of_bound"]),
    ]
    print(format_table(("figure", "value"), rows))
    if len(found["layers"]) > 1:
        layers = [list(layer.values()) for layer in found["layers"]]
        print(
            "\n" + format_table(("layer", "busiest expert / mean", "busiest rank / mean"), layers)
        )
    if found.get("trace") is not None:
        print(f"\nTrace (open it at https://ui.perfetto.dev)  {found['trace']}")


#: Column headers that differ from the record's names.
TRANSFER_HEADERS: Final = {
    "page_bytes": "page bytes",
    "one_way_p50_us": "p50 µs",
    "one_way_p99_us": "p99 µs",
    "gb_per_s": "GB/s",
    "memcpy_p50_us": "memcpy p50 µs",
    "memcpy_gb_per_s": "memcpy GB/s",
}


def show_transfer(found: dict[str, Any]) -> None:
    """Print a result as text."""
    from weft.bench.group import named_routes

    over = named_routes([found["route"]], found["provider_details"])
    memory = f", memory on {found['device']}" if "device" in found else ""
    staged = " through slots in host memory" if found.get("staged") else ""
    print(
        f"Two ranks over {over}{memory}{staged}, through the Python API; one way is half a round"
        " trip\n"
    )
    sizes = found["sizes"]
    headers = [TRANSFER_HEADERS.get(name, name) for name in sizes[0]]
    print(format_table(headers, [list(size.values()) for size in sizes]))
