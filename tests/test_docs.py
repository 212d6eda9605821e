"""Names in the documentation exist, and public names are documented."""

import inspect
import re
from pathlib import Path

import pytest

from weft import _native, errors

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def text(*names: str) -> str:
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


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
    terms = re.findall(r"^\| (?!term|---)([^|]+?) +\|", text("docs", "glossary.md"), re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert len(set(terms)) == len(terms)
    assert 40 <= len(terms) <= 70


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    named = re.findall(r"(?:`|^ +)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
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


def test_every_error_is_documented() -> None:
    page = text("docs", "errors.md")
    for name, _ in inspect.getmembers(errors, inspect.isclass):
        assert f"`{name}`" in page, name
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows)), "a class has several rows"


def test_the_providers_are_those_of_the_registry() -> None:
    table = text("docs", "architecture.md").partition("## Providers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*) \|$", table, re.MULTILINE)
    listed = [
        f"{name}` | {reaches} | {how} | {'yes' if is_default else 'no'} | "
        + ", ".join(f"`{each}`" for each in names)
        for name, reaches, how, is_default, names in _native.providers()
    ]
    assert [row.rstrip() for row in rows] == [row.rstrip() for row in listed]
    front_page = re.search(r"^.*\[`providers`\].*$", text("crates/fabric/src/lib.rs"), re.MULTILINE)
    assert front_page is not None
    for name, *_ in _native.providers():
        assert re.search(rf"\b{name}\b", front_page[0]), f"crates/fabric/src/lib.rs: {name}"
    variable = re.search(r"^\| `WEFT_PROVIDERS` .*$", text("docs", "environment.md"), re.MULTILINE)
    assert variable is not None
    for *_, names in _native.providers():
        assert all(f"`{name}`" in variable[0] for name in names)


def test_every_environment_variable_is_documented() -> None:
    page = text("docs", "environment.md")
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/weft/**/*.py")]
    kernels = [path.read_text(encoding="utf-8") for path in ROOT.glob("crates/*/kernels/**/*.cu*")]
    macros = set(re.findall(r"\bWEFT_[A-Z_]+", " ".join(kernels)))
    for source in sources:
        for name in re.findall(r"\"(WEFT_[A-Z_]+)\"", source.read_text(encoding="utf-8")):
            documented = name.startswith("WEFT_BUILD_") or f"`{name}`" in page
            assert documented or name in macros, f"{name} in {source}"


def test_the_table_of_a_domain_is_the_one_that_kernels_read() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", text("docs", "domain.md"), re.MULTILINE)
    fields = _native.table_fields()
    assert [(name, int(offset), int(size)) for name, offset, size in rows] == [
        (name, offset, width * count) for name, offset, width, count in fields
    ]


def test_announcements_of_make_have_no_quote_that_ends_their_string() -> None:
    steps = re.findall(r"\$\(call step,(.*)\)$", text("Makefile"), re.MULTILINE)
    assert len(steps) > 30
    assert [step for step in steps if "'" in step] == []
