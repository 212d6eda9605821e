"""Torch tensors on GPUs, registered in place and written by peers."""

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_of_the_user_are_reached_where_they_lie(count: int) -> None:
    for result in ranks.run("cuda.symmetric.registered_on_gpus", count, timeout=100, quiet=False):
        assert result == {
            "right": True,
            "read": True,
            "still": True,
            "closed": "ClosedError",
            "refused": "ConfigurationError",
            "remedy": True,
            # The communicator was closed before the second tensor.
            "kept": int(count > 1),
        }


@pytest.mark.parametrize(("count", "seed"), [(2, 12), (4, 14)])
def test_direct_collectives_access_registered_tensors(count: int, seed: int) -> None:
    found = ranks.run(
        "backend.registered_collectives.results",
        count,
        timeout=170,
        quiet=False,
        seed=seed,
        calls=16,
        device="cuda",
    )
    assert found == [16 * 5] * count
