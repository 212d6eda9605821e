import tomllib

import pytest

import weft
from tests import ROOT
from weft.cli import main


def test_the_native_module_says_what_it_was_built_from() -> None:
    info = weft.build_info()
    assert info.version == weft.__version__
    assert info.target.endswith("-linux-gnu")
    assert info.profile in {"debug", "release"}
    assert info.commit in repr(info)


def test_the_version_is_the_one_of_the_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    version = manifest["workspace"]["package"]["version"]
    assert weft.__version__ == version
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"weft {version}\n"
