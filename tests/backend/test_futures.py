"""torch.distributed future callbacks that call it themselves, and wait."""

from typing import Any

import pytest

from tests.ranks import run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def results(worker: str, ranks: int, backend: str) -> list[Any]:
    return run(worker, ranks, backend=backend, quiet=False, timeout=200, with_torch=True)


@pytest.mark.parametrize("backend", ["weft", "model"])
def test_a_callback_may_wait_for_operations_of_its_group(backend: str) -> None:
    for found in results("backend.futures.chained", 2, backend):
        assert found == {
            "one deep": 2.0,
            "five deep": 2.0,
            "groups": 6.0,
            "gathered": [2.0, 3.0],
            "sibling": 4.0,
            "in order": True,
            "values": True,
            "raised": True,
            "after": 2.0,
        }


def test_communication_hooks_that_wait_give_the_parameters_of_gloo() -> None:
    by_gloo, by_weft = (
        results("backend.futures.hooks", 2, backend) for backend in ("gloo", "weft")
    )
    for found, expected in zip(by_weft, by_gloo, strict=True):
        for hook, parameters in expected.items():
            assert found[hook] == pytest.approx(parameters, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("backend", ["weft", "model"])
def test_groups_end_beside_and_by_callbacks(backend: str) -> None:
    waited, other = results("backend.futures.ended", 2, backend)
    assert len(waited["errors"]) == 1
    assert "all_reduce: " in waited["errors"][0]
    assert other["errors"] == []
    assert waited["after"] == other["after"] == 2.0
