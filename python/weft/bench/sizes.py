"""Transfer benchmark sizes."""

from typing import Final

from weft.base.units import parse_size

__all__ = ["DEFAULT_PAGE_SIZES", "DEFAULT_SIZES", "MOST_PAGES", "parse_sizes"]

DEFAULT_SIZES: Final = "8,64,512,4K,32K,256K,2M,16M,64M"
DEFAULT_PAGE_SIZES: Final = "512,4K,16K,64K"
LARGEST: Final = 1 << 30
MOST_PAGES: Final = 1 << 16


def parse_sizes(text: str, pages: int = 1) -> list[int]:
    """Sizes with commas, as `parse_size` takes them, for writes with as many pages.

    Raises:
        ValueError: that names a wrong one.
    """
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
        if size * pages > LARGEST:
            raise ValueError(
                f"{pages} pages of {word.strip()}: expected at most 1G bytes per write"
            )
        sizes.append(size)
    return sizes
