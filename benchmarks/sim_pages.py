"""The tables of docs/perplexity.md and docs/dlrm.md: `sim_pages.py --write` puts them there.

Between a line `<!-- table: NAME -->` and the next `<!-- end -->` stands the table whose title
begins with what `TABLES` says. The results are what `weft sim perplexity --out DIRECTORY` and
`weft sim dlrm --out DIRECTORY` leave there, kept in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.sim import dlrm, perplexity
from weft.sim.article import markdown

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ARTICLES: dict[str, ModuleType] = {"perplexity": perplexity, "dlrm": dlrm}
#: By article and name: how the title of the table begins.
TABLES = {
    "perplexity": {
        "cx7-decode": "ConnectX-7, decode",
        "cx7-prefill": "ConnectX-7, prefill",
        "efa-decode": "EFA, decode",
        "efa-prefill": "EFA, prefill",
        "constants": "Constants",
        "sensitivity": "Sensitivity",
    },
    "dlrm": {"result": "128 nodes", "assumptions": "Assumptions", "sensitivity": "Sensitivity"},
}


def main() -> int:
    """Print the pages, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    arguments = parser.parse_args()
    for name in ARTICLES:
        path = page(name)
        text = with_tables(name, path.read_text(encoding="utf-8"))
        if arguments.write:
            path.write_text(text, encoding="utf-8")
        else:
            print(text)
    return 0


def page(name: str) -> Path:
    """The page of an article."""
    return ROOT / "docs" / f"{name}.md"


def read(name: str) -> dict[str, Any]:
    """The figures of an article."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def with_tables(name: str, text: str) -> str:
    """A page with every table made anew."""
    found = read(name)
    article = ARTICLES[name]
    tables = list(article.tables(found))

    def section(match: re.Match[str]) -> str:
        if match[2] == "notes":
            made = "\n".join(f"- {note}" for note in article.notes(found))
        else:
            begins = TABLES[name][match[2]]
            made = next(
                markdown(headers, rows)
                for title, headers, rows in tables
                if title.startswith(begins)
            )
        return f"{match[1]}\n{made}\n\n{match[4]}"

    return SECTION.sub(section, text)


if __name__ == "__main__":
    raise SystemExit(main())
