"""LoadGen library build: what it refuses, and that it is made once."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

import pytest

from weft.base import compile as _compile
from weft.errors import ConfigurationError
from weft.loadgen import VERSION, build

if TYPE_CHECKING:
    from pathlib import Path


def test_a_source_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    other = tmp_path / f"mlcommons_loadgen-{VERSION}.tar.gz"
    monkeypatch.setenv("WEFT_LOADGEN_SOURCE", str(other))
    with pytest.raises(ConfigurationError, match="no such file"):
        build.built()
    with tarfile.open(other, "w:gz"):
        pass
    with pytest.raises(ConfigurationError, match=f"expected the source .* {VERSION}; .*hash"):
        build.built()
    assert not list((tmp_path / "cache").glob("*.so"))


def test_sources_are_unpacked_below_their_directory(tmp_path: Path) -> None:
    archive = tmp_path / "sources.tar.gz"
    content = tmp_path / "content"
    content.write_text("int main;")
    with tarfile.open(archive, "w:gz") as file:
        for name in (
            "loadgen-1/loadgen.cc",
            "loadgen-1/generated/version.cc",
            "loadgen-1/setup.py",
        ):
            file.add(content, name)
    root = build.unpack(archive, tmp_path / "scratch")
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == ["generated/version.cc", "loadgen.cc"]


def test_a_library_is_made_once_and_appears_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    made: list[Path] = []

    def make(path: Path, scratch: Path) -> None:
        made.append(path)
        assert path.parent == scratch
        path.write_text("half")
        assert not (tmp_path / "library.so").exists()
        path.write_text("whole")

    for _ in range(2):
        assert _compile.cached("library.so", make).read_bytes().startswith(b"whole")
    assert len(made) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["library.lock", "library.so"]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)X: .*status 3: expected more\n.*the reason"):
        _compile.run(["sh", "-c", "echo the reason >&2; exit 3"], "X", "expected more")


def test_the_digest_depends_on_every_part() -> None:
    command = ["true", "-O2"]
    digests = {
        _compile.digest(command, ["a", "b"]),
        _compile.digest(command, ["ab", ""]),
        _compile.digest([*command, "-g"], ["a", "b"]),
    }
    assert len(digests) == 3
    assert _compile.digest(command, [b"a", "b"]) == _compile.digest(command, ["a", "b"])
