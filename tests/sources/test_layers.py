"""Crate, layer and `unsafe` place lists in the documents equal the sources.

Within a crate, files import in one direction.
"""

import re
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tests.sources.imports import Crate, Module, circles

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CRATES = {path.parent.name for path in ROOT.glob("crates/*/Cargo.toml")}


def dependencies(crate: str) -> set[str]:
    manifest = tomllib.loads((ROOT / "crates" / crate / "Cargo.toml").read_text(encoding="utf-8"))
    return {
        name.removeprefix("weft-")
        for name in manifest.get("dependencies", {})
        if name.startswith("weft-")
    }


def layers(text: str) -> list[str]:
    """Crates named `crates/NAME`, in order; each once."""
    return list(dict.fromkeys(re.findall(r"crates/([a-z]+)\b(?!/)", text)))


def section(text: str, heading: str) -> str:
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


LISTS = {
    "docs/architecture.md": "\n".join(re.findall(r"^\| `.*", ARCHITECTURE, re.MULTILINE)),
    "CONTRIBUTING.md": section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "Layers"),
    "docs/images/layers.svg": (ROOT / "docs/images/layers.svg").read_text(encoding="utf-8"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_layers_name_every_crate_and_arrows_point_down(name: str) -> None:
    listed = layers(LISTS[name])
    assert set(listed) == CRATES
    for position, crate in enumerate(listed):
        above = set(listed[:position])
        assert not dependencies(crate) & above, f"{name}: {crate} stands below what it imports"


def test_only_tests_import_the_scenarios() -> None:
    assert [crate for crate in CRATES if "scenarios" in dependencies(crate)] == []


def test_modules_named_on_front_pages_exist() -> None:
    """Plain code spans with a file name; rustdoc checks the links."""
    for crate in CRATES:
        source = ROOT / "crates" / crate / "src"
        page = re.match(r"(?://!.*\n)+", (source / "lib.rs").read_text(encoding="utf-8"))
        assert page is not None, crate
        for name in re.findall(r"`([a-z_/]+\.(?:rs|md|cu|cuh|pyi))`", page[0]):
            assert (source / name).exists() or (ROOT / name).exists(), f"{crate}: {name}"
        for name in re.findall(r"^//! - `([a-z_]+)`", page[0], re.MULTILINE):
            assert list(source.rglob(f"{name}.rs")) or (source / name).is_dir(), f"{crate}: {name}"


def test_rust_items_named_in_the_documents_exist() -> None:
    """Code spans such as `Engine::write`: a type in the crates, and an item with that name."""
    rust = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "crates").rglob("src/**/*.rs")
    )
    types = set(re.findall(r"\b(?:struct|enum|trait|type|union) (\w+)", rust))
    items = set(re.findall(r"\b(?:fn|const|static|mod) (\w+)", rust))
    items |= set(re.findall(r"^ *(?:pub(?:\(\w+\))? )?(\w+)(?:: |,$|\(|,? \{)", rust, re.MULTILINE))
    for page in [ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, item in re.findall(r"`([A-Z]\w+)(?:<[^`]*>)?::(\w+)", text):
            assert name in types, f"{page.name}: {name}::{item}"
            assert item in items, f"{page.name}: {name}::{item}"


def unsafe_sources(crate: str) -> list[str]:
    """Sources with `unsafe` blocks, functions or implementations outside tests."""
    source = ROOT / "crates" / crate / "src"
    found = []
    for path in source.rglob("*.rs"):
        if path.stem == "tests" or path.stem.endswith("_tests"):
            continue
        text = path.read_text(encoding="utf-8").partition("#[cfg(test)]\nmod tests {")[0]
        code = re.sub(r"//.*", "", text)
        if re.search(r"\bunsafe\s*(?:\{|fn\b|impl\b|extern\b)", code):
            found.append(str(path.relative_to(source)))
    return found


def unsafe_places() -> dict[str, list[str]]:
    """The list in docs/architecture.md: files, and folders with a slash behind them, by crate."""
    text = section(ARCHITECTURE, "Where `unsafe` and I/O are")
    rows = re.findall(r"^- (\w+): (.*(?:\n  .*)*)", text, re.MULTILINE)
    return {
        crate: [name.removesuffix("/") for name in re.findall(r"`([\w./]+(?:\.rs|/))`", row)]
        for crate, row in rows
    }


@pytest.mark.parametrize("crate", sorted(CRATES))
def test_places_of_unsafe_are_those_of_the_architecture(crate: str) -> None:
    places = unsafe_places().get(crate, [])
    sources = unsafe_sources(crate)
    for source in sources:
        listed = any(source == place or source.startswith(f"{place}/") for place in places)
        assert listed or "." in places, f"docs/architecture.md lacks crates/{crate}/src/{source}"
    for place in places:
        listed = place == "." or any(f"{source}/".startswith(f"{place}/") for source in sources)
        assert listed, f"docs/architecture.md: crates/{crate}/src/{place} has no unsafe"


@pytest.mark.parametrize("crate", sorted(CRATES))
def test_files_of_a_crate_import_in_one_direction(crate: str) -> None:
    found = Crate(ROOT / "crates" / crate / "src").imports()
    assert sum(map(len, found.values())) >= len(found) - 1, "the reader of imports found hardly any"
    assert circles(found) == []


def circles_of(folder: Path, files: dict[str, str]) -> list[set[Module]]:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return circles(Crate(folder).imports())


def test_circles_of_imports_are_found(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod error; mod inner; pub use error::Error;",
        "error.rs": "use crate::inner::{leaf::Leaf, Kind as Other};\npub enum Error {}",
        "inner/mod.rs": "mod leaf; pub use leaf::{Kind, Leaf};",
        "inner/leaf.rs": "// use crate::x;\nfn f(_: crate::Error) {}\npub struct Leaf;",
    }
    assert circles_of(tmp_path, files) == [{("error",), ("inner", "leaf")}]


def test_a_path_from_a_child_on_is_an_import(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod inner;",
        "inner/mod.rs": "mod leaf;\npub struct Kind;\nfn f() { leaf::g() }",
        "inner/leaf.rs": "use super::Kind;\npub fn g() {}",
    }
    assert circles_of(tmp_path, files) == [{("inner",), ("inner", "leaf")}]


def test_visibility_and_modules_within_a_file_import_nothing(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod inner;",
        "inner/mod.rs": "mod leaf;\npub struct Kind;\nfn f() { leaf::g() }",
        "inner/leaf.rs": "pub(in crate::inner) fn g() {}\nmod wide {\n    use super::*;\n}",
    }
    assert circles_of(tmp_path, files) == []
