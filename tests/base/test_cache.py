"""The cache: what another user can have written, damage, and folders that cannot be used."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.base import cache
from weft.base import compile as _compile
from weft.collectives import tuning
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

#: A user that is neither this one nor root.
OTHER = 65_534
#: Random test cases; `WEFT_SEEDS=500` runs more.
SEEDS = int(os.environ.get("WEFT_SEEDS", "60"))
FIRST = int(os.environ.get("WEFT_FIRST_SEED", "0"))
NAME = "library-0123.so"
CONTENT = bytes(range(256)) * 16
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet; temporary files are beside it."""
    (tmp_path / "temporary").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_own", {})
    monkeypatch.delenv("WEFT_TUNING", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def library() -> tuple[Path, int]:
    """A library's path from the cache, and how often it was made."""
    made = 0

    def make(path: Path, _: Path) -> None:
        nonlocal made
        made += 1
        path.write_bytes(CONTENT)

    path = _compile.cached(NAME, make)
    assert path.read_bytes() == cache.sealed(NAME, CONTENT)
    return path, made


@needs_root
def test_a_library_that_another_user_left_is_never_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = cache.sealed(NAME, b"constructor of another user")
    folder.mkdir()
    for mode, owner in ((0o1777, 0), (0o700, OTHER), (0o770, 0)):
        (folder / NAME).write_bytes(foreign)
        os.chown(folder / NAME, OTHER, OTHER)
        os.chown(folder, owner, owner)
        folder.chmod(mode)
        caplog.clear()
        cache._warned.clear()
        path, _ = library()
        assert path.parent == Path(tempfile.gettempdir(), "weft-0")
        assert str(folder) in caplog.text
        assert "WEFT_CACHE_DIR" in caplog.text
    # In this user's folder the file is replaced, here by the copy among the temporary files.
    os.chown(folder, 0, 0)
    folder.chmod(0o700)
    assert library() == (folder / NAME, 0)
    assert library() == (folder / NAME, 0)


@needs_root
def test_a_folder_below_one_that_others_write_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    above = folder.parent
    above.chmod(0o777)
    assert library()[0].parent != folder
    # Only their owners rename entries in a sticky folder.
    above.chmod(0o1777)
    assert library()[0].parent == folder
    os.chown(above, OTHER, OTHER)
    assert library()[0].parent != folder
    os.chown(above, 0, 0)


def test_without_a_folder_that_can_be_written_the_library_is_kept_among_temporary_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file in place of the folder")
    path, made = library()
    assert (path.parent, made) == (Path(tempfile.gettempdir(), f"weft-{os.geteuid()}"), 1)
    assert library() == (path, 0)
    assert caplog.text.count("it is not a folder") == 1
    monkeypatch.setenv("WEFT_CACHE_DIR", "/proc/weft")
    assert library() == (path, 0)
    for name in ("WEFT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    assert cache.cache_directory() is None
    assert library() == (path, 0)
    # The predictable name is taken: this process uses its own folder instead.
    path.unlink()
    path.parent.chmod(0o777)
    private, made = library()
    assert made == 1
    assert private.parent.name.startswith("weft-")
    assert private.parent != path.parent
    assert library() == (private, 0)


def test_a_full_disk_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep = cache.keep

    disks = {folder}

    def full(path: Path, data: bytes) -> Path:
        if path.parent in disks:
            raise OSError(errno.ENOSPC, "No space left on device")
        return keep(path, data)

    monkeypatch.setattr(cache, "keep", full)
    path, made = library()
    assert path.parent.name == f"weft-{os.geteuid()}"
    assert made == 1
    assert "No space left on device" in caplog.text
    disks |= {path.parent, cache.own_folder()}
    with pytest.raises(ConfigurationError, match=r"No space left.*WEFT_CACHE_DIR or TMPDIR"):
        _compile.cached("other.so", lambda path, _: path.touch())


def link(path: Path, _: random.Random) -> None:
    """A symbolic link to itself."""
    path.unlink()
    path.symlink_to(path.name)


def aside(path: Path, generator: random.Random) -> None:
    """A symbolic link to the file."""
    path.rename(path.with_name("aside"))
    path.symlink_to(generator.choice([path.with_name("aside"), Path("/dev/zero")]))


def pipe(path: Path, _: random.Random) -> None:
    """A FIFO without a writer."""
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, generator: random.Random) -> None:
    """A directory, with or without an entry."""
    path.unlink()
    path.mkdir()
    if generator.random() < 0.5:
        (path / "entry").touch()


def cut(path: Path, generator: random.Random) -> None:
    """A shorter file."""
    os.truncate(path, generator.randrange(path.stat().st_size))


def flip(path: Path, generator: random.Random) -> None:
    """One bit changed."""
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def replace(path: Path, generator: random.Random) -> None:
    """Other bytes."""
    path.write_bytes(generator.choice([b"", b"[" * 200_000, generator.randbytes(5000)]))


def give(path: Path, _: random.Random) -> None:
    """Another user's file."""
    os.chown(path, OTHER, OTHER)


def open_up(path: Path, generator: random.Random) -> None:
    """A file that others can write."""
    path.chmod(generator.choice([0o666, 0o620, 0o602]))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    *(link, aside, pipe, directory, cut, flip, replace, open_up),
    *([give] if os.geteuid() == 0 else []),
]


def damage_folder(folder: Path, generator: random.Random) -> None:
    """Change the cache folder itself."""
    kind = generator.randrange(4)
    if kind == 0:
        folder.chmod(generator.choice([0o777, 0o1777, 0o720, 0o2775]))
    elif kind == 1 and os.geteuid() == 0:
        os.chown(folder, OTHER, OTHER)
    else:
        folder.rename(folder.with_name("before"))
        if kind == 2:
            folder.symlink_to(folder)
        else:
            folder.touch()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_damage_is_repaired_or_avoided(folder: Path, seed: int) -> None:
    generator = random.Random(seed)
    own = {"provider": "shm", "ranks": 2, "machine": f"machine {seed}"}
    assert library() == (folder / NAME, 1)
    tuning.add_entry(None, own)
    for path in (folder / NAME, folder / "library-0123.lock", folder / tuning.NAME):
        if generator.random() < 0.6:
            # A lock has no content.
            kinds = DAMAGES[:4] if path.suffix == ".lock" else DAMAGES
            generator.choice(kinds)(path, generator)
    if generator.random() < 0.3:
        damage_folder(folder, generator)
    found = tuning.source()
    assert found is None or isinstance(found[1], str)
    library()
    assert library()[1] == 0
    entry = own | {"ranks": 3}
    written = tuning.add_entry(None, entry)
    again = tuning.source()
    assert again is not None
    assert again[0] == str(written)
    assert entry in json.loads(again[1])["entries"]


def test_a_tuning_result_that_cannot_be_stored_is_printed_and_kept_aside(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.bench import group, tuner
    from weft.cli import tune

    names = ("step_s", "post_s", "byte_s", "add_byte_s", "copy_byte_s")
    case = {"collective": "broadcast", "bytes": 64, "selected": "chain", "seconds": 2e-6}
    found: dict[str, Any] = {
        "entry": {"provider": "shm", "ranks": 2, "machine": "this", "times": []}
        | {"constants": dict.fromkeys(names, 1e-9)},
        "regrets": [case | {"fastest": "chain", "fastest_seconds": 2e-6, "regret": 1.0}],
        "crossovers": [],
    }
    monkeypatch.setattr(group, "check_provider", lambda _: None)
    monkeypatch.setattr(tuner, "measure", lambda _: dict(found))
    options = {"ranks": 2, "quick": True, "provider": None, "seconds": None, "max_size": 64}
    output = Path("/proc/weft/times.json")
    arguments = Namespace(**options, output=output, plot=None, json=False)
    assert tune.run(arguments) == 1
    printed = capsys.readouterr()
    assert "broadcast" in printed.out
    assert "/proc/weft" in printed.err
    (line,) = [line for line in printed.out.splitlines() if line.startswith("Measurements")]
    kept = Path(line.split()[1])
    assert json.loads(kept.read_text("utf-8"))["entries"] == [found["entry"]]
    assert kept.is_relative_to(tempfile.gettempdir())


def test_damage_is_warned_of_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    library()
    (folder / NAME).write_bytes(b"short")
    assert library() == (folder / NAME, 1)
    assert caplog.text.count("its digest does not match; it is made anew") == 1
