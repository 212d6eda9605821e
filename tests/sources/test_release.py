"""A release: its version, its CHANGELOG.md section, its toolchains."""

import re
import tomllib
from datetime import date
from typing import Any

from tests import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def toml(name: str) -> dict[str, Any]:
    return tomllib.loads(text(name))


def test_the_toolchain_is_stable_and_the_oldest_that_compiles_is_named() -> None:
    oldest = toml("Cargo.toml")["workspace"]["package"]["rust-version"]
    assert toml("rust-toolchain.toml")["toolchain"] == {"channel": "stable"}
    assert f"Rust {oldest} or later" in text("README.md")


def test_every_crate_has_the_version_of_the_workspace() -> None:
    manifests = [*ROOT.glob("crates/*/Cargo.toml"), *ROOT.glob("benchmarks/*/Cargo.toml")]
    assert len(manifests) > 10
    for manifest in manifests:
        package = tomllib.loads(manifest.read_text(encoding="utf-8"))["package"]
        assert package["version"] == {"workspace": True}, manifest
        assert package["rust-version"] == {"workspace": True}, manifest


def test_the_package_takes_its_version_from_the_workspace() -> None:
    project = toml("pyproject.toml")["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]


def test_the_newest_dated_section_of_the_changelog_is_the_version() -> None:
    sections = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == "Unreleased"
    dated = [section.split(" - ") for section in sections[1:]]
    assert dated[0][0] == toml("Cargo.toml")["workspace"]["package"]["version"]
    days = [date.fromisoformat(day) for _, day in dated]
    assert days == sorted(days, reverse=True)
