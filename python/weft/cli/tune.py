"""`weft tune`: measure collective algorithms, and keep the times for selection."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.base.errors import WeftError
from weft.base.output_files import OutputFile, check_outputs, plot_file
from weft.base.units import format_bytes, parse_size
from weft.cli.arguments import PROVIDERS, positive, ranks
from weft.cli.stored import file_name
from weft.cli.table import format_table

if TYPE_CHECKING:
    from weft.cli.arguments import Subparsers

#: Seconds, and batches per case.
DEFAULT: Final = (50.0, 3)
QUICK: Final = (10.0, 2)
#: 4 B to 64 MiB, in steps by a factor of 4.
SIZES: Final = tuple(4**power for power in range(1, 14))
#: Largest default rank count.
MOST_RANKS: Final = 8
EPILOG: Final = """\
A later `init_process_group("weft")` with as many ranks over the same providers on such a machine
selects algorithms by these times. The file is the one that WEFT_TUNING names, else tuning.json in
Weft's cache directory; WEFT_LOG=tuner logs each choice.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare `weft tune`."""
    parser = subparsers.add_parser(
        "tune",
        help="measurement of collectives, for algorithm selection",
        description="Times for every collective and algorithm from 4 B to 64 MiB, and link "
        "constants, kept in a file for algorithm selection. Under a launcher, its ranks are "
        "used, on all hosts.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--ranks",
        type=ranks,
        metavar="N",
        help=f"number of ranks (default: usable cores, 2 to {MOST_RANKS})",
    )
    parser.add_argument(
        "--provider", choices=PROVIDERS, help="provider (default: the best available)"
    )
    parser.add_argument(
        "--seconds", type=positive, metavar="S", help="measuring time, about (default 50)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="10 s measuring time, with fewer repetitions"
    )
    parser.add_argument(
        "--max-size",
        type=size,
        default=max(SIZES),
        metavar="SIZE",
        help="largest vector in bytes, such as 4M (default 64M)",
    )
    parser.add_argument(
        "--output",
        type=file_name,
        metavar="FILE",
        help="measurement file (default: WEFT_TUNING, else tuning.json in the cache directory)",
    )
    parser.add_argument(
        "--plot",
        type=file_name,
        metavar="FILE",
        help="picture, .svg or .png (default: an .svg beside the measurement file)",
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run, usage_error=parser.error)


def size(text: str) -> int:
    """Size, at least the smallest measured one."""
    try:
        value = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < SIZES[0]:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {SIZES[0]} bytes")
    return value


def outputs(arguments: argparse.Namespace) -> list[OutputFile]:
    """Files that the options name."""
    files = []
    if arguments.output is not None:
        kind: Final = "measurement file"
        files.append(OutputFile("--output", Path(arguments.output), kind, makes_folders=True))
    if arguments.plot is not None:
        files.append(plot_file(arguments.plot))
    return files


def run(arguments: argparse.Namespace) -> int:
    """Measure, write file and picture, and print the table."""
    from weft.bench import tuner
    from weft.bench.group import GroupError, check_provider
    from weft.collectives import tuning
    from weft.report.figure import check_target

    seconds, batches = QUICK if arguments.quick else DEFAULT
    count = arguments.ranks or min(MOST_RANKS, max(2, len(os.sched_getaffinity(0))))
    if count < 2:
        arguments.usage_error(f"--ranks {count}: expected at least 2")
    try:
        check_outputs(outputs(arguments))
        if arguments.plot is not None:
            check_target(arguments.plot)
    except ValueError as error:
        arguments.usage_error(str(error))
    try:
        check_provider(arguments.provider)
        found = tuner.measure(
            tuner.Options(
                count,
                tuple(each for each in SIZES if each <= arguments.max_size),
                arguments.provider,
                float(arguments.seconds or seconds),
                batches,
                progress=not arguments.json,
            )
        )
    except GroupError as error:
        print(f"weft tune: {error}", file=sys.stderr)
        return error.status
    except WeftError as error:
        print(f"weft tune: {error}", file=sys.stderr)
        return 1
    if found is None:
        return 0
    status = 0
    named = arguments.output or tuning.named_file()
    file: Path | None = None
    picture = None
    try:
        file = tuning.add_entry(named, found["entry"])
        picture = draw(found, file, arguments.plot)
    except OSError as error:
        print(f"weft tune: {error}", file=sys.stderr)
        status = 1
    if file is None:
        # Keep a minute's measurements even if there is no place for the file.
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix="weft-tune-"), tuning.NAME)
            file = tuning.add_entry(aside, found["entry"])
    found |= {"file": file and str(file), "picture": picture and str(picture)}
    if arguments.json:
        from weft.bench.record import origin

        print(json.dumps({"origin": origin()} | found))
    else:
        show(found)
    return status


def draw(found: dict[str, Any], file: Path, named: Path | None) -> Path | None:
    """Write the picture; None without matplotlib, if no file was named for it."""
    if named is None and importlib.util.find_spec("matplotlib") is None:
        return None
    from weft.report.figure import save
    from weft.report.tuning import draw_tuning

    entry = found["entry"]
    default = f"{file.stem}-{entry['provider'].replace('+', '-')}-{entry['ranks']}.svg"
    target = named or file.with_name(default)
    save(draw_tuning(found), target)
    return target


def show(found: dict[str, Any]) -> None:
    """Print a result as text."""
    entry, regrets = found["entry"], found["regrets"]
    print(f"{entry['ranks']} ranks over {entry['provider']} on {entry['machine']}\n")
    constants = entry["constants"]
    rows: list[tuple[str, float]] = [
        ("step, µs", constants["step_s"] * 1e6),
        ("further write in a step, µs", constants["post_s"] * 1e6),
        ("bandwidth per rank, GB/s", 1e-9 / constants["byte_s"]),
        ("additions per rank, GB/s", 1e-9 / constants["add_byte_s"]),
    ]
    if constants["copy_byte_s"] > 0:
        rows.append(("copies per rank, GB/s", 1e-9 / constants["copy_byte_s"]))
    print(format_table(("constant", "value"), rows) + "\n")
    headers = ("collective", "bytes", "selected", "µs", "fastest", "µs of fastest", "regret")
    table = [
        (
            each["collective"],
            each["bytes"],
            each["selected"],
            each["seconds"] * 1e6,
            each["fastest"],
            each["fastest_seconds"] * 1e6,
            each["regret"],
        )
        for each in regrets
    ]
    print(format_table(headers, table))
    print("\nSelected by a first pass, timed in a second; regret: selected / fastest.")
    worst = max(regrets, key=lambda each: each["regret"])
    within = sum(each["regret"] <= 1.1 for each in regrets)
    print(
        f"Regret at most 1.1 in {within} of {len(regrets)} cases; largest {worst['regret']:.2f}:"
        f" {worst['collective']} of {worst['bytes']:,} bytes\n"
    )
    for each in found["crossovers"]:
        size = format_bytes(each["bytes"])
        print(f"{each['collective']}: {each['to']} instead of {each['from']} from {size} on")
    print(f"\nMeasurements  {found['file'] or 'none: no folder could be written'}")
    if found["picture"] is not None:
        print(f"Picture       {found['picture']}")
    elif importlib.util.find_spec("matplotlib") is None:
        print("Picture       none: needs matplotlib (pip install 'weft[plot]')")
