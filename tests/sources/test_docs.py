"""Names in the documentation exist. These tests need no native module."""

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def text(*names: str) -> str:
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


def makefiles() -> str:
    return text("Makefile") + text("benchmarks", "Makefile")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_index() -> None:
    index = text("docs", "README.md")
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"]({name})" in index, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_code_spans_exist(page: Path) -> None:
    roots = "benchmarks|crates|docs|examples|fuzz|python|reproductions|requirements|tests|tools"
    for path in re.findall(rf"`((?:{roots})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if "NAME" not in path and "NNNN" not in path:
            assert (ROOT / path).exists(), path


def test_generated_files_exist() -> None:
    patterns = re.findall(r"^([^#\s]+) linguist-generated$", text(".gitattributes"), re.MULTILINE)
    assert patterns
    for pattern in patterns:
        assert list(ROOT.glob(pattern)), pattern


def test_names_to_search_for_are_in_their_files() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| \[[^]]+\]\(\.?\.?/?([^)#]+)[^)]*\) \| (?:`(\w+)`)? ?\|",
        text("docs", "where.md"),
        re.MULTILINE,
    )
    assert len(rows) >= 30
    for path, name in rows:
        if name:
            assert re.search(rf"\b{name}\b", text(path)), f"{name} is not in {path}"


def test_rows_of_the_glossary_are_sorted_and_few() -> None:
    table = text("docs", "glossary.md").partition("\n## ")[0]
    terms = re.findall(r"^\| (?!term|---)([^|]+?) +\|", table, re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)
    assert 40 <= len(terms) <= 70


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", makefiles(), re.MULTILINE))
    named = re.findall(r"(?:`|^ +)make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.M)
    assert set(named) <= targets


def test_every_fault_that_is_survived_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!fault|---)(.*) \|$", text("docs", "survives.md"), re.MULTILINE)
    assert rows
    for row in rows:
        named = re.findall(r"\[`(\w+)`\]\(\.\./([^)]+)\)", row.split(" | ")[-1])
        assert named, row
        for name, file in named:
            assert re.search(rf"^ *(?:fn|def) {name}\(", text(file), re.MULTILINE), (
                f"{name}: {file}"
            )


def test_every_environment_variable_is_documented() -> None:
    page = text("docs", "environment.md")
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/weft/**/*.py")]
    kernels = [path.read_text(encoding="utf-8") for path in ROOT.glob("crates/*/kernels/**/*.cu*")]
    macros = set(re.findall(r"\bWEFT_[A-Z_]+", " ".join(kernels)))
    for source in sources:
        for name in re.findall(r"\"(WEFT_[A-Z_]+)\"", source.read_text(encoding="utf-8")):
            documented = name.startswith("WEFT_BUILD_") or f"`{name}`" in page
            assert documented or name in macros, f"{name} in {source}"


def test_announcements_of_make_have_no_quote_that_ends_their_string() -> None:
    steps = re.findall(r"\$\(call step,(.*)\)$", makefiles(), re.MULTILINE)
    assert len(steps) > 30
    assert [step for step in steps if "'" in step] == []
