"""The backend `weft` of torch.distributed."""

from typing import Any

import pytest

from ranks import run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
#: "model": the C++ library alone, over a model of the C table.
BACKENDS = ["model"]


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_equal_those_of_gloo(backend: str, ranks: int) -> None:
    results = run(
        "conformance.compare", ranks, backend=backend, repeats=1, seed="0", quiet=False, timeout=300
    )
    for result in results:
        assert result["wrong"] == []
        assert result["cases"] > 200
