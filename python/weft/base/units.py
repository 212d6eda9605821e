"""Numbers in arguments: sizes with units, lists, ranges."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["format_bytes", "format_seconds", "parse_count", "parse_range", "parse_size"]

SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?B|i)?", re.IGNORECASE)
FACTORS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DECIMAL_FACTORS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
LARGEST: Final = 1 << 50
#: More points than this on one axis are a mistake.
MOST_POINTS: Final = 1000


def parse_size(text: str) -> int:
    """Bytes from `4096`, `4K`, `4KiB`, `0.5MiB` or `1MB`.

    K, M, G and T, also written as Ki and KiB, are powers of 1024; kB, MB, GB and TB powers of 1000.
    For example, `parse_size("64KiB")` is 65536.

    Raises:
        ValueError: if it is none of these, not whole, less than 1 byte or more than 1 PiB.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r}: expected a size such as 4096, 64KiB, 256M or 1MB")
    number, unit, suffix = match.groups()
    factors = DECIMAL_FACTORS if (suffix or "").upper() == "B" else FACTORS
    factor = factors[unit.upper()]
    exact = float(number) * factor
    count = int(number) * factor if number.isdecimal() else int(exact)
    if count != exact and not number.isdecimal():
        raise ValueError(f"{text!r}: expected a whole number of bytes")
    if not 1 <= count <= LARGEST:
        raise ValueError(f"{text!r}: {count} bytes; expected 1 to {LARGEST}")
    return count


def parse_count(text: str) -> int:
    """Parse a whole number from 1 up.

    Raises:
        ValueError: if it is none.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r}: expected a whole number from 1 on")
    return int(text)


def parse_range(text: str, *, sizes: bool) -> list[int]:
    """Sweep points: `1,2,5`, or `1..8` in factor-2 steps, or `1..64:x4` with another factor.

    Args:
        text: what was written.
        sizes: whether points are sizes, with units, rather than plain numbers.

    Raises:
        ValueError: if it is none of these, or empty.
    """
    parse = parse_size if sizes else parse_count
    points: list[int] = []
    for part in text.split(","):
        first, dots, rest = part.partition("..")
        if not dots:
            points.append(parse(part))
            continue
        last, colon, step = rest.partition(":")
        factor = 2
        if colon:
            if not re.fullmatch(r"x\d+", step) or int(step[1:]) < 2:
                raise ValueError(f"{step!r}: expected a step such as x2 or x4")
            factor = int(step[1:])
        point, end = parse(first), parse(last)
        if point > end:
            raise ValueError(f"{part!r}: begins above its end")
        while point <= end:
            points.append(point)
            point *= factor
    if len(points) > MOST_POINTS:
        raise ValueError(f"{text!r}: {len(points)} points; expected at most {MOST_POINTS}")
    if len(set(points)) != len(points):
        raise ValueError(f"{text!r}: a point is given twice")
    return points


def format_bytes(count: float) -> str:
    """Bytes with a unit, as text."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = FACTORS[unit[0]]
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Time with four significant digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
