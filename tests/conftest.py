import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from device_group import group

# Machines are shared and busy: the duration of an example is not significant.
hypothesis.settings.register_profile("weft", deadline=None, print_blob=True)
hypothesis.settings.load_profile("weft")


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one twin."""
    (rank,) = group(1)
    yield rank
    rank.close()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of the benchmarks of GPUs by name."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks" / "gpu")
    return importlib.import_module


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of Triton's of its own: kernels are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with an authority and its certificate for 127.0.0.1."""
    script = Path(__file__).parent.parent / "benchmarks" / "certificates.sh"
    subprocess.run([script, tmp_path], check=True)
    return tmp_path
