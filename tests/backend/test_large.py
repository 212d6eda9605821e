"""torch.distributed collectives on tensors over 2 and 4 GiB.

`WEFT_TEST_LARGE=1` runs them: they need 14 GiB memory and some minutes.
"""

import os

import pytest

from tests.ranks import run

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("WEFT_TEST_LARGE") != "1", reason="14 GiB of memory: set WEFT_TEST_LARGE=1"
    ),
]


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_tensors_of_more_than_4_gib_have_the_right_values(provider: str) -> None:
    pytest.importorskip("torch")
    for found in run(
        "backend.large.run",
        2,
        provider,
        provider=provider,
        quiet=False,
        timeout=800,
        with_torch=True,
    ):
        assert all(found.values()), found
        assert len(found) == 9
