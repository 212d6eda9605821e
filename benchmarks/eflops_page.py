"""The tables of docs/eflops.md, from results/eflops.json: `eflops_page.py --write` puts them there.

Between a line `<!-- table: NAME -->` and the next `<!-- end -->` stand the tables of that name. The
results are what `weft sim eflops --out DIRECTORY` leaves there as eflops.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.sim import eflops
from weft.sim.article import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "eflops.md"
RESULTS = ROOT / "benchmarks" / "results" / "eflops.json"
SECTION = re.compile(r"(<!-- table: ([a-z]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
#: Tables with a place of their own, by the beginning of their titles; all others stand under `all`.
OWN = {
    "comparison": "Beside what was published",
    "constants": "Constants",
    "sensitivity": "Sensitivity",
}


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    page = with_tables(PAGE.read_text(encoding="utf-8"), read())
    if arguments.write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)
    return 0


def read() -> dict[str, Any]:
    """The figures."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def with_tables(page: str, found: dict[str, Any]) -> str:
    """The page with every table made anew."""
    tables = list(eflops.tables(found))

    def section(match: re.Match[str]) -> str:
        own = OWN.get(match[2])
        if own is not None:
            parts = [
                markdown(headers, [said(headers, row) for row in rows])
                for title, headers, rows in tables
                if title.startswith(own)
            ]
        else:
            parts = [
                f"### {title}\n\n{markdown(headers, rows)}"
                for title, headers, rows in tables
                if not title.startswith(tuple(OWN.values()))
            ]
        text = "\n\n".join(parts)
        return f"{match[1]}\n{text}\n\n{match[4]}"

    return SECTION.sub(section, page)


def said(headers: Sequence[str], row: Sequence[object]) -> list[object]:
    """A row that says where nothing was published."""
    return [
        "not published" if header == "published" and cell is None else cell
        for header, cell in zip(headers, row, strict=True)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
