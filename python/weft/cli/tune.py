"""`weft tune`: measure the algorithms of collectives, and keep the times for their selection."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weft.cli.arguments import PROVIDERS, positive
from weft.cli.table import format_table
from weft.errors import WeftError
from weft.units import format_bytes, parse_size

if TYPE_CHECKING:
    from weft.cli.arguments import Subparsers

#: Seconds, and batches of each case.
DEFAULT: Final = (50.0, 3)
QUICK: Final = (10.0, 2)
#: 4 B to 64 MiB, in steps of a factor of 4.
SIZES: Final = tuple(4**power for power in range(1, 14))
#: Largest default number of ranks.
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
        help="measurement of collectives, for the selection of algorithms",
        description="Times of every collective by every algorithm from 4 B to 64 MiB, and constants"
        " of the links, kept in a file by which algorithms are selected. Under a launcher, its"
        " ranks are used, on all of their hosts.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--ranks",
        type=positive,
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
        "--quick", action="store_true", help="measuring time of 10 s, with fewer repetitions"
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
        type=Path,
        metavar="FILE",
        help="file of measurements (default: WEFT_TUNING, else tuning.json in the cache directory)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="picture, .svg or .png (default: an .svg beside the file of measurements)",
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parser.set_defaults(run=run, usage_error=parser.error)


def size(text: str) -> int:
    """A size of at least the smallest measured one."""
    try:
        value = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < SIZES[0]:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {SIZES[0]} bytes")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure, write file and picture, and print the table."""
    from weft import _tuning
    from weft.bench import tuner
    from weft.bench.group import GroupError, check_provider
    from weft.sim import plot

    seconds, batches = QUICK if arguments.quick else DEFAULT
    ranks = arguments.ranks or min(MOST_RANKS, max(2, len(os.sched_getaffinity(0))))
    if ranks < 2:
        arguments.usage_error(f"--ranks {ranks}: expected at least 2")
    if arguments.plot is not None:
        try:
            plot.check_target(arguments.plot)
        except ValueError as error:
            arguments.usage_error(f"--plot {error}")
    try:
        check_provider(arguments.provider)
        found = tuner.measure(
            tuner.Options(
                ranks,
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
    file = arguments.output or _tuning.tuning_file()
    try:
        _tuning.add_entry(file, found["entry"])
        picture = draw(found, file, arguments.plot)
    except OSError as error:
        print(f"weft tune: {error}", file=sys.stderr)
        return 1
    found |= {"file": str(file), "picture": picture and str(picture)}
    if arguments.json:
        from weft.bench.record import origin

        print(json.dumps({"origin": origin()} | found))
    else:
        show(found)
    return 0


def draw(found: dict[str, Any], file: Path, named: Path | None) -> Path | None:
    """Write the picture; None without matplotlib, if no file was named for it."""
    from weft.sim import plot

    if named is None and importlib.util.find_spec("matplotlib") is None:
        return None
    from weft.report.tuning import draw_tuning

    entry = found["entry"]
    default = f"{file.stem}-{entry['provider'].replace('+', '-')}-{entry['ranks']}.svg"
    target = named or file.with_name(default)
    plot.save(draw_tuning(found), target)
    return target


def show(found: dict[str, Any]) -> None:
    """Print a result as text."""
    entry, regrets = found["entry"], found["regrets"]
    print(f"{entry['ranks']} ranks over {entry['provider']} on {entry['machine']}\n")
    constants = entry["constants"]
    rows: list[tuple[str, float]] = [
        ("step, µs", constants["step_s"] * 1e6),
        ("further write of a step, µs", constants["post_s"] * 1e6),
        ("bandwidth of a rank, GB/s", 1e-9 / constants["byte_s"]),
        ("additions of a rank, GB/s", 1e-9 / constants["add_byte_s"]),
    ]
    if constants["copy_byte_s"] > 0:
        rows.append(("copies of a rank, GB/s", 1e-9 / constants["copy_byte_s"]))
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
    print(f"\nMeasurements  {found['file']}")
    if found["picture"] is not None:
        print(f"Picture       {found['picture']}")
    else:
        print("Picture       none: needs matplotlib (pip install 'weft[plot]')")
