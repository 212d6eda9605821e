"""Transfer benchmark sizes."""

from typing import Final

from weft.base.units import parse_size

__all__ = ["DEFAULT_SIZES", "parse_sizes"]

DEFAULT_SIZES: Final = "8,64,512,4K,32K,256K,2M,16M,64M"
LARGEST: Final = 1 << 30


def parse_sizes(text: str) -> list[int]:
    """Sizes with commas, as `parse_size` takes them; raises `ValueError` that names a wrong one."""
    sizes = []
    for word in text.split(","):
        try:
            size = parse_size(word)
        except ValueError:
            size = 0
        if not 1 <= size <= LARGEST:
            raise ValueError(
                f"{word.strip()!r}: expected a size from 1 to 1G bytes, such as 8, 64K or 2M"
            )
        sizes.append(size)
    return sizes
