"""Sizes as people write them."""

from typing import Final

__all__ = ["DEFAULT_SIZES", "parse_sizes"]

DEFAULT_SIZES: Final = "8,64,512,4K,32K,256K,2M,16M,64M"
LARGEST: Final = 1 << 30
UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str) -> list[int]:
    """Sizes with commas, in bytes or with K, M or G; raises `ValueError` that names a wrong one."""
    sizes = []
    for word in text.split(","):
        number = word.strip().upper().removesuffix("B").removesuffix("I")
        unit = UNITS.get(number[-1:], 1)
        digits = number if unit == 1 else number[:-1]
        if not digits.isdecimal() or not 1 <= int(digits) * unit <= LARGEST:
            raise ValueError(
                f"{word.strip()!r} is no size from 1 to 1G bytes, such as 8, 64K or 2M"
            )
        sizes.append(int(digits) * unit)
    return sizes
