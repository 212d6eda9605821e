"""Public Rust items: docs/api/rust.txt equals the sources."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

sys.path.append(str(ROOT / "tools"))

from rust_api import Crate  # type: ignore[import-not-found]


def lines(folder: Path, **files: str) -> list[str]:
    """A crate `a`'s lines in these files; a double underscore in a name is a slash."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.rs"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found: list[str] = Crate(folder, "a").lines()
    return found


def test_the_snapshot_is_that_of_the_sources() -> None:
    command = [sys.executable, str(ROOT / "tools" / "rust_api.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`make api` renews docs/api/rust.txt:\n{done.stdout}"


def test_names_that_front_pages_export_are_in_the_snapshot() -> None:
    """Reads lib.rs independently and more simply."""
    snapshot = (ROOT / "docs" / "api" / "rust.txt").read_text(encoding="utf-8")
    checked = 0
    for source in ROOT.glob("crates/*/src/lib.rs"):
        crate = f"weft_{source.parent.parent.name}"
        code = re.sub(r"//[^\n]*", "", source.read_text(encoding="utf-8"))
        for tree in re.findall(r"^pub use ([^;]+);", code, re.MULTILINE):
            for name in re.findall(r"(\w+)\s*(?:[,}]|$)", tree):
                listed = re.search(rf"\b{crate}::{name}\b", snapshot)
                assert listed or "fuzz" in name, f"{crate}::{name}"
                checked += 1
    assert checked > 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pub fn f(x: u32) -> u32 {\n    x\n}", ["pub fn a::f(x: u32) -> u32"]),
        ("fn f() {}\npub(crate) struct S;\n// pub fn g() {}", []),
        (
            "pub struct S {\n    /// Bytes.\n    pub x: u8,\n    y: u8,\n}",
            ["pub a::S::x: u8", "pub struct a::S"],
        ),
        ("pub struct S(pub u8, u16);", ["pub struct a::S(pub u8, _)"]),
        (
            "pub enum E { A, B(u8), #[doc(hidden)] C }",
            ["pub a::E::A", "pub a::E::B(u8)", "pub enum a::E"],
        ),
        ("pub const N: [u8; 2] = [1, 2];", ["pub const a::N: [u8; 2]"]),
        ("#[cfg(test)]\npub mod tests { pub fn f() {} }", []),
        (
            "pub struct S<T>(T);\nimpl<T: Fn() -> u8> S<T> { pub const fn f(&self) {} fn g() {} }",
            ["pub const fn a::S::f(&self)", "pub struct a::S<T>(_)"],
        ),
        (
            'pub trait T: Send {\n    fn f(&self) -> &str { "};" }\n}',
            ["pub fn a::T::f(&self) -> &str", "pub trait a::T: Send"],
        ),
        (
            "pub use other::{X, y::Z as W};",
            ["pub use other::X as a::X", "pub use other::y::Z as a::W"],
        ),
    ],
)
def test_items_have_a_line_each(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert lines(tmp_path, lib=text) == expected


def test_exports_are_followed_to_their_definitions(tmp_path: Path) -> None:
    assert lines(
        tmp_path,
        lib="mod inner;\npub mod open;\npub use inner::{Leaf, leaf::g};\npub use open::Door;",
        inner__mod="pub mod leaf;\nmod more;\npub use leaf::Leaf;",
        inner__leaf="pub struct Leaf;\npub fn g() {}\npub fn unreached() {}",
        inner__more="impl super::Leaf {\n    pub fn grow(&mut self) {}\n}",
        open="pub struct Door { pub width: u8 }",
    ) == [
        "pub a::open::Door::width: u8",
        "pub fn a::Leaf::grow(&mut self)",
        "pub fn a::g()",
        "pub mod a::open",
        "pub struct a::Leaf",
        "pub struct a::open::Door",
        "pub use a::open::Door as a::Door",
    ]
