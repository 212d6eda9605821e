"""Makefile targets: lists that fit a screen, commands that messages and pages name."""

import re
import subprocess

import pytest

from tests import ROOT

MAKEFILES = {"help": "Makefile", "help-benchmarks": "benchmarks/Makefile"}
SCREEN = 40


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def make(target: str) -> list[str]:
    command = ["make", "--no-print-directory", "--silent", target]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.mark.parametrize("target", MAKEFILES)
def test_help_names_each_target_once_and_fits_a_screen(target: str) -> None:
    lines = make(target)
    assert len(lines) <= SCREEN
    targets = re.findall(r"^\.PHONY: (\S+)$", text(MAKEFILES[target]), re.MULTILINE)
    assert [line.split()[1] for line in lines] == targets


def test_commands_in_sources_and_pages_are_targets() -> None:
    """Word for word, as users type them: `make bench-moe`, also in program messages."""
    targets = set(re.findall(r"^([a-z0-9-]+):", "".join(map(text, MAKEFILES.values())), re.M))
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.rs", "*.sh", "*.toml", "requirements/*"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    named = {
        (name, target)
        for name in listed
        if (ROOT / name).is_file()
        for target in re.findall(r"`make ([a-z][a-z0-9-]*)[`\s]", text(name))
    }
    assert len(named) > 50
    assert {(name, target) for name, target in named if target not in targets} == set()
