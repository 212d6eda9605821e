"""Crates and Python packages that Weft depends on: licences, hosts, the `make audit` tool."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT


def crates() -> list[dict[str, Any]]:
    """All crates that Weft compiles on its platforms, with test dependencies."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    for platform in ("x86_64", "aarch64"):
        command += ["--filter-platform", f"{platform}-unknown-linux-gnu"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)
    compiled = {node["id"] for node in metadata["resolve"]["nodes"]}
    return [crate for crate in metadata["packages"] if crate["id"] in compiled]


def permits(expression: str, allowed: set[str]) -> bool:
    """True if `allowed` licences satisfy an SPDX expression; `/` is an old form for OR."""
    expression = expression.replace("/", " OR ")
    tokens = re.findall(r"\(|\)|\bAND\b|\bOR\b|[\w.+-]+(?: WITH [\w.+-]+)?", expression)
    python = {"(": "(", ")": ")", "AND": "and", "OR": "or"}
    return bool(eval(" ".join(python.get(token, str(token in allowed)) for token in tokens)))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("GPL-3.0", False),
        ("MIT/GPL-3.0", True),
        ("MIT OR GPL-3.0", True),
        ("MIT AND GPL-3.0", False),
        ("(MIT OR GPL-3.0) AND ISC", True),
        ("Apache-2.0 WITH LLVM-exception", False),
    ],
)
def test_expressions_of_licences_are_read(expression: str, expected: bool) -> None:
    assert permits(expression, {"MIT", "ISC"}) == expected


def test_licences_and_sources_of_crates_are_those_of_deny_toml() -> None:
    policy = tomllib.loads((ROOT / "deny.toml").read_text(encoding="utf-8"))
    allowed = set(policy["licenses"]["allow"])
    found = crates()
    assert len(found) > 50
    for crate in found:
        assert permits(crate["license"], allowed), f"{crate['name']}: {crate['license']}"
        assert crate["source"] is None or crate["source"].startswith("registry+"), crate["name"]
        assert crate["name"] not in policy["bans"]["deny"]


def test_files_of_pins_have_hashes_and_name_no_host() -> None:
    files = [*ROOT.glob("requirements/*.txt"), ROOT / "benchmarks/peers/requirements.txt"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "--hash=sha256:" in text, file
        assert "://" not in text, file
        assert "index-url" not in text, file
    assert not list(ROOT.glob("uv.lock"))


@pytest.mark.parametrize(
    ("answer", "status", "line"),
    [
        ([{"name": "a", "version": "1", "vulns": []}], 0, "1 packages audited, 0 vulnerabilities"),
        (
            [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}],
            1,
            "pins.txt: a 1: CVE-1; fixed in 2",
        ),
        (
            [{"name": "a", "skip_reason": "not found"}],
            0,
            ">> skipped make audit: no vulnerability service: not found",
        ),
        (None, 0, ">> skipped make audit: no vulnerability service: no route to host"),
    ],
)
def test_an_audit_counts_packages_and_names_vulnerabilities(
    tmp_path: Path, answer: Any, status: int, line: str
) -> None:
    program = tmp_path / "pip-audit"
    text = "" if answer is None else json.dumps({"dependencies": answer, "fixes": []})
    program.write_text(f"#!/bin/sh\necho '{text}'\necho 'no route to host' >&2\nexit 1\n")
    program.chmod(0o755)
    command = [sys.executable, str(ROOT / "tools" / "audit.py"), str(program), "pins.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert line in done.stdout.splitlines()


def test_no_tracked_file_names_the_host_of_a_package_registry() -> None:
    # Brackets, since the pattern must not be found here.
    hosts = "pypi[.]org|python[h]osted[.]|registry[.]npm"
    command = ["git", "grep", "-I", "-l", "-E", hosts]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode > 1:
        pytest.skip("not a checkout by git")
    assert not done.stdout, done.stdout
