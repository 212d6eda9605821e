"""Options that scenarios of `weft sim` share: network, sizes, sweeps, output."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from weft.cli.arguments import natural, ranks
from weft.cli.stored import file_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_cluster", "add_output", "add_size", "add_sweep", "count"]

ROUTINGS: Final = ("unique", "static", "ecmp", "adaptive")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Declare the network, constants, faults and stragglers."""
    parser.add_argument(
        "--topology", required=True, metavar="SPEC", help="network: short form or JSON file"
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="static",
        help="path selection (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="random seed (default %(default)s)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value for a model constant, such as post_s=1e-6; repeatable",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FROM,TO,SHARE",
        help="link between two nodes at this bandwidth share, 0 if failed; repeatable",
    )
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK,SLOW[,LATE_US]",
        help="rank whose work takes SLOW times as long and starts LATE_US later; repeatable",
    )


def add_size(parser: argparse.ArgumentParser, option: str, default: str, what: str) -> None:
    """Declare a size in bytes, with a unit."""
    parser.add_argument(
        option, type=size, default=default, metavar="SIZE", help=f"{what} (default %(default)s)"
    )


def add_sweep(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Declare the sweep axes."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help=f"sweep of {', '.join(names)}: 16,32,64, or 1KiB..256MiB in steps of a factor of 2,"
        " or 1KiB..256MiB:x4; repeatable",
    )
    parser.set_defaults(swept=names)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare the result output."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--trace", type=file_name, metavar="FILE", help="Perfetto trace of a single run"
    )
    parser.add_argument(
        "--plot",
        type=file_name,
        metavar="FILE",
        help="picture, .png or .svg: times of a sweep, or the --picture of a single run",
    )
    parser.add_argument(
        "--picture",
        choices=("links", "timeline"),
        default="links",
        help="picture of a single run: heat map of link loads, or timeline of the ranks"
        " (default %(default)s)",
    )


def size(text: str) -> int:
    """Size in bytes, with a unit."""
    from weft.base.units import parse_size

    return checked(parse_size, text)


#: Rank count.
count: Final = ranks


def checked(parse: Callable[[str], int], text: str) -> int:
    """Runs `parse`; a ValueError becomes an ArgumentTypeError, so argparse prints the message."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
