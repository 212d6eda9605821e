"""`weft bench moe --device`: dispatch and combine between GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.output_files import OutputFile, check_outputs
from weft.cli.stored import Storing
from weft.cli.table import format_table

if TYPE_CHECKING:
    import argparse

    from weft.bench.device.cases import Case

RECORD: Final = Path("benchmarks/results/gpu_moe.jsonl")
DEVICES: Final = ("cpu", "cuda", "twin")
#: Options that only a device has, and what argparse leaves where they are not given.
OWN: Final = ("cases", "budget", "wire", "layout", "num_sms", "path", "memory")
#: Options that a case list settles.
OF_A_WORKLOAD: Final = (
    *("tokens", "hidden", "experts", "top_k", "rounds"),
    *("wire", "layout", "num_sms", "path"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the device options for `weft bench moe`."""
    from weft.cli.arguments import positive

    group = parser.add_argument_group("on GPUs of one host")
    group.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="device of the ranks; twin: the protocol of GPUs on the CPU, with short tokens if"
        " --cases is given (default %(default)s)",
    )
    group.add_argument(
        "--cases",
        metavar="NAME,...",
        help="benchmark cases in place of one workload, or `all`, the most important first",
    )
    group.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="time limit: cases that exceed it are skipped",
    )
    group.add_argument(
        "--wire", help="dtype on the wire: same as --dtype, or float8_e4m3fn, cast by the kernel"
    )
    group.add_argument("--layout", choices=("contiguous", "indexed", "padded", "dense"))
    group.add_argument("--num-sms", type=positive, metavar="N", help="thread blocks per launch")
    group.add_argument("--path", choices=("packets", "latency", "bandwidth"))
    group.add_argument("--memory", choices=("fd", "ipc"), help="kind of GPU memory sharing")


def refuse_options(arguments: argparse.Namespace) -> None:
    """Reject device options without `--device`."""
    for name in OWN:
        if getattr(arguments, name) is not None:
            arguments.usage_error(f"--{name.replace('_', '-')} needs --device cuda or twin")


def run(arguments: argparse.Namespace) -> int:
    """Measure; 1 if a result was wrong or a case failed."""
    from weft.bench import moe_device
    from weft.bench.group import GroupError
    from weft.bench.record import append_records

    if arguments.trace is not None:
        arguments.usage_error("--trace is of counted writes: there are none on a device")
    if arguments.budget is not None and not arguments.budget > 0:
        arguments.usage_error(f"--budget {arguments.budget}: expected more than 0 seconds")
    try:
        cases = cases_of(arguments)
    except ValueError as error:
        arguments.usage_error(str(error))
    record = arguments.record
    if record is not None and not record.name:
        record = RECORD
    try:
        if record is not None:
            kind: Final = "JSON lines of results"
            file = OutputFile("--record", record, kind, makes_folders=True)
            check_outputs([file], [Path(arguments.routing)])
    except ValueError as error:
        arguments.usage_error(str(error))
    options = moe_device.Options(
        arguments.device,
        ranks=arguments.ranks,
        budget=arguments.budget,
        memory=arguments.memory,
        provider=arguments.provider,
        record=record,
        progress=not arguments.json,
    )
    try:
        records = moe_device.measure(cases, options)
    except moe_device.DeviceError as error:
        print(f"weft bench moe: {error}", file=sys.stderr)
        return 1
    except GroupError as error:
        print(f"weft bench moe: {error}", file=sys.stderr)
        return error.status
    if arguments.json:
        if records:
            print(json.dumps({"cases": records}))
    else:
        show(records)
    storing = Storing("weft bench moe")
    if record is not None and not moe_device.is_appended(record):
        storing.attempt("--record", record, lambda: append_records(record, records))
    return storing.status(int(any(each["status"] in ("wrong", "failed") for each in records)))


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Cases that the options select.

    Raises:
        ValueError: if the options contradict each other.
    """
    from weft.bench.device.cases import CASES, Case, choose, small

    if arguments.cases is not None:
        for name in OF_A_WORKLOAD:
            if getattr(arguments, name) is not None:
                raise ValueError(f"--cases settles --{name.replace('_', '-')}: give one of them")
        chosen = choose(arguments.cases, CASES)
        return [small(case) for case in chosen] if arguments.device == "twin" else chosen
    names = ("tokens", "hidden", "experts", "top_k", "layout", "num_sms", "path")
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    wire = arguments.wire or ("float8_e4m3fn" if arguments.dtype == "bfloat16" else arguments.dtype)
    tokens = given.get("tokens", Case.tokens)
    slots = 8 if tokens <= 1024 else 2
    case = Case(
        "workload",
        **given,
        dtype=arguments.dtype,
        wire=wire,
        routing=arguments.routing,
        seed=arguments.seed,
        slots=slots,
        samples=-(-(arguments.rounds or 400) // slots),
        halves=True,
        seconds=1,
        limit=600,
    )
    from weft.bench.moe_workload import Workload

    # A routing file is looked at before anything is started.
    Workload(
        ranks=1,
        tokens=case.tokens,
        hidden=1,
        experts=case.experts,
        top_k=case.top_k,
        dtype="float32",
        routing=case.routing,
        rounds=1,
    )
    return [case]


def show(records: list[dict[str, Any]]) -> None:
    """Print a result as text."""
    if not records:
        return
    about = next((r["origin"] for r in records if "device" in r["origin"]), None)
    if about is not None:
        where = (
            ", ".join(sorted(set(about["gpus"]))) or "the CPU twin: times are not representative"
        )
        print(f"{about['ranks']} ranks on {len(about['gpus']) or 'no'} GPUs ({where})\n")
    if any(record["origin"]["profile"] != "release" for record in records):
        print("Debug build of Weft: its figures are not representative.\n")
    for record in records:
        result = record["result"]
        print(f"{record['case']}: {record['status']}")
        if record["reason"]:
            print(f"  {record['reason']}")
        if not result or "times" not in result:
            continue
        rows = [
            (name, time["p50_us"], time["p99_us"], time["slowest_rank"], time["slowest_p50_us"])
            for name, time in result["times"].items()
        ]
        headers = ("", "p50 µs", "p99 µs", "slowest rank", "its p50")
        print(format_table(headers, rows) + "\n")
        print(format_table(("figure", "value"), figures(result)) + "\n")


def figures(result: dict[str, Any]) -> list[tuple[str, object]]:
    """Figures other than times."""
    rows: list[tuple[str, object]] = []
    if "bytes" in result:
        moved = result["bytes"]
        for operation in ("dispatch", "combine"):
            rows.append((f"{operation}, bytes a rank sends", moved[f"{operation}_per_rank"]))
            rows.append((f"{operation}, GB/s", moved[f"{operation}_gb_per_s"]))
    beside = result.get("beside", {})
    for operation, time in beside.get("times", {}).items():
        rows.append(
            (f"{beside['backend']}, as many bytes, {operation}, µs", time["slowest_p50_us"])
        )
    if "unable" in beside:
        rows.append((beside["backend"], beside["unable"]))
    for call, time in result.get("host_us", {}).items():
        rows.append((f"host, {call}, µs a call", time))
    seconds = ("compile_seconds", "constructor_seconds", "first_round_seconds")
    rows.extend((name.replace("_", " "), max(result[name])) for name in seconds if name in result)
    if result.get("compile_error"):
        rows.append(("torch.compile failed", result["compile_error"]))
    rows.append(("symmetric memory of a rank, bytes", result["heap_bytes"]))
    rows.append(("rounds with wrong results", result["wrong"]))
    rows.append(("largest error / bound", result["largest_share_of_bound"]))
    return rows
