"""Options that several scenarios of `weft sim` take: the network, sizes, sweeps, output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.cli.arguments import natural

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_cluster", "add_out", "add_output", "add_size", "add_sweep", "count"]

ROUTINGS: Final = ("unique", "static", "ecmp", "adaptive")


def add_cluster(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare what the network is and what is wrong with it."""
    parser.add_argument("--topology", required=required, metavar="SPEC", help="the network")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        help="how routes are chosen (default: static)",
        default="static",
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="of all chance")
    parser.add_argument(
        "--preset", default="ideal", help="constants to start from: ideal or eflops"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value for a constant, such as post_s=1e-6; may be repeated",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FROM,TO,SHARE",
        help="the link between two nodes keeps this share of its bandwidth, 0 if it has failed",
    )
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK,SLOW[,LATE_US]",
        help="a rank takes so many times as long, and starts so much later",
    )


def add_size(parser: argparse.ArgumentParser, option: str, default: str, what: str) -> None:
    """Declare a size."""
    parser.add_argument(
        option, type=size, default=default, metavar="SIZE", help=f"{what} (default %(default)s)"
    )


def add_sweep(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Declare what may be swept."""
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help=f"run for each of several values of {', '.join(names)}: 16,32,64, or 1KiB..256MiB in"
        " steps of a factor of 2, or 1KiB..256MiB:x4; may be repeated",
    )
    parser.set_defaults(swept=names)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare how results are shown."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a .png or .svg: of a sweep time against what is swept, of a single run what"
        " --picture says",
    )
    parser.add_argument(
        "--picture",
        choices=("links", "timeline"),
        default="links",
        help="of a single run: a heat map of link loads, or when each rank did what (default"
        " %(default)s)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare where tables and pictures go."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write tables, JSON and pictures to a directory"
    )


def size(text: str) -> int:
    """A size with a unit."""
    from weft.units import parse_size

    return checked(parse_size, text)


def count(text: str) -> int:
    """A number of ranks."""
    from weft.units import parse_count

    return checked(parse_count, text)


def checked(parse: Callable[[str], int], text: str) -> int:
    """What `parse` makes of it; argparse shows the message only of its own errors."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
