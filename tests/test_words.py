"""Lint of wording: tools/words.py."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "words.py"


def findings(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", "."], cwd=folder, check=True)
    subprocess.run(["git", "add", name], cwd=folder, check=True)
    command = [sys.executable, str(TOOL), name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == bool(lines), done.stderr
    return [line.removeprefix(f"{name}:").partition(": instead")[0] for line in lines]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.rs", "// It says so.\nfn f() {}\n", ["1: 'says'"]),
        ("a.rs", 'fn f() {\n    panic!("nobody came");\n}\n', ["2: 'nobody'"]),
        ("a.rs", "/// Whether it holds.\nfn f() {}\n", ["1: 'Whether'"]),
        ("a.rs", "fn says() { let knows = 1; }\n", []),
        ("a.c", "/* One.\n * It hears. */\nint says;\n", ["2: 'hears'"]),
        ("a.cuh", "// The peer hears it.\n", ["1: 'hears'"]),
        ("a.py", '"""Lanes.\n\nNothing else."""\n', ["3: 'Nothing'"]),
        ("a.py", 'def told(): ...\n\n\nx = f"{count} learned"\n', ["4: 'learned'"]),
        ("a.py", "def f():\n    '''Lanes.'''\n    return 1  # knows\n", ["3: 'knows'"]),
        ("a.md", "A peer\nthat tells others.\n", ["2: 'tells'"]),
        ("a.md", "Call `tells` of [it](says.md).\n\n```python\nsays()\n```\n\n    says\n", []),
        ("a.md", "The learning rate is learned.\n", ["1: 'learned'"]),
        ("a.toml", "# in vain\nname = 'says'\n", ["1: 'in vain'"]),
        ("a.json", '{"says": "nobody"}\n', []),
    ],
)
def test_prose_is_searched_and_code_is_left_out(
    tmp_path: Path, name: str, text: str, expected: list[str]
) -> None:
    assert findings(tmp_path, name, text) == expected


def test_the_count_is_a_number_and_no_failure(tmp_path: Path) -> None:
    findings(tmp_path, "a.md", "It says nothing.\n")
    command = [sys.executable, str(TOOL), "--count"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
