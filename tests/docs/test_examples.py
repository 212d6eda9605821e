"""Every numbered example has its tutorial page's output and code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
#: Those that import torch have its mark.
RUNS = [
    pytest.param(
        example,
        id=example.stem,
        marks=[pytest.mark.torch] * ("import torch" in example.read_text()),
    )
    for example in EXAMPLES
]


def page_of(example: Path) -> str:
    page = ROOT / "docs" / "tutorials" / f"{example.stem.replace('_', '-')}.md"
    return page.read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def lines(code: str) -> list[str]:
    return [line for line in code.splitlines() if line.strip()]


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_the_page_shows_the_code(example: Path) -> None:
    shown = lines("".join(blocks(page_of(example), "python")))
    assert shown == lines(example.read_text(encoding="utf-8"))


@pytest.mark.parametrize("providers", ["shm,tcp", "tcp"])
@pytest.mark.parametrize("example", RUNS)
def test_the_example_prints_what_the_page_shows(
    example: Path, providers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (session,) = blocks(page_of(example), "console")
    prompt, _, shown = session.partition("\n")
    programs = {"weft": [sys.executable, "-m", "weft"], "python": [sys.executable]}
    words = shlex.split(prompt.removeprefix("$ "))
    monkeypatch.setenv("WEFT_PROVIDERS", providers)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if "TRITON_INTERPRET" in os.environ:
        pytest.importorskip("triton")
    command = [part for word in words for part in programs.get(word, [word])]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == shown


def test_the_code_of_the_front_page_runs(tmp_path: Path) -> None:
    (code,) = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    program = tmp_path / "double.py"
    program.write_text(code, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "weft", "run", "-n", "4", "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
