"""Native module names are documented: errors, providers, fields."""

import inspect
import re

from tests import ROOT
from weft import _native, errors


def text(*names: str) -> str:
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


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


def test_the_table_of_a_domain_is_the_one_that_kernels_read() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", text("docs", "domain.md"), re.MULTILINE)
    fields = _native.table_fields()
    assert [(name, int(offset), int(size)) for name, offset, size in rows] == [
        (name, offset, width * count) for name, offset, width, count in fields
    ]
