"""Generated blocks of docs/: prints, checks or writes them.

    benchmarks/pages.py [--check | --write] [PAGE ...]      default: all pages of `PAGES`

A block is the text between a line `<!-- table: NAME -->` and the next `<!-- end -->`. Each page has
a maker: a Python file with `blocks(page)`, which returns the texts by name, and optionally
`draw(page)`, which writes pictures and returns their paths. docs/benchmarks.md has the steps for a
new page.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """Page with generated blocks, and its maker; paths from the repository's root."""

    path: str
    maker: str

    def text(self) -> str:
        """Text of the page as it is."""
        return (ROOT / self.path).read_text(encoding="utf-8")


#: Registry of the pages with generated blocks.
PAGES = {
    "speed": Page("docs/speed.md", "benchmarks/speed_page.py"),
    "gpu": Page("docs/gpu.md", "benchmarks/gpu_page.py"),
    "gpu-collectives": Page("docs/gpu-collectives.md", "benchmarks/gpu_collectives_page.py"),
    "fused": Page("docs/fused.md", "benchmarks/fused_page.py"),
    "dispatch": Page("docs/dispatch.md", "benchmarks/dispatch_page.py"),
    "eflops": Page("docs/eflops.md", "reproductions/pages.py"),
    "moe-rdma": Page("docs/moe-rdma.md", "reproductions/pages.py"),
    "dlrm": Page("docs/dlrm.md", "reproductions/pages.py"),
    "lab": Page("docs/lab.md", "lab/pages.py"),
    **{
        f"algorithm-{name}": Page(f"docs/algorithms/{name}.md", "benchmarks/algorithm_pages.py")
        for name in (
            *("ring", "tree", "hd", "hdrm", "circulant", "one-shot", "two-shot", "direct"),
            *("direct-read", "hierarchical", "pairwise", "binomial", "chain"),
        )
    },
}


def main() -> int:
    """Print, check or write the pages; 1 if a checked page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help=f"{', '.join(PAGES)} (default: all)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="exit status 1 if a page is out of date"
    )
    action.add_argument("--write", action="store_true", help="write pages and pictures")
    arguments = parser.parse_args()
    unknown = set(arguments.pages) - set(PAGES)
    if unknown:
        parser.error(f"PAGE {min(unknown)}: expected one of {', '.join(PAGES)}")
    stale = []
    for name in arguments.pages or PAGES:
        made = render(name)
        if arguments.write:
            write(name, made)
        elif not arguments.check:
            print(made)
        elif made != PAGES[name].text():
            stale.append(name)
            print(f"{PAGES[name].path}: out of date; run `benchmarks/pages.py --write {name}`")
    return int(bool(stale))


def render(name: str) -> str:
    """The page's text with up-to-date blocks.

    Raises:
        ValueError: if the blocks on the page are not those of its maker.
    """
    page = PAGES[name]
    text, blocks = page.text(), maker(name).blocks(name)
    on_page = [match[2] for match in BLOCK.finditer(text)]
    if sorted(on_page) != sorted(blocks):
        odd = sorted(set(on_page) ^ set(blocks)) or on_page
        raise ValueError(f"{page.path}, {', '.join(odd)}: expected each block of {page.maker} once")
    return BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[4]}", text)


def write(name: str, text: str) -> None:
    """Write a page and the pictures of its maker."""
    (ROOT / PAGES[name].path).write_text(text, encoding="utf-8")
    draw = getattr(maker(name), "draw", None)
    for picture in draw(name) if draw else ():
        print(f"{picture.relative_to(ROOT)} is drawn")


def maker(name: str) -> ModuleType:
    """The module that makes the blocks of a page."""
    return load(PAGES[name].maker)


@cache
def load(path: str) -> ModuleType:
    """The module of a file; its imports also find the files of its folder and of this one."""
    file = ROOT / path
    for folder in (ROOT / "benchmarks", file.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
