"""Triton kernels' puts by a proxy on the host, on GPUs, one process for each rank."""

import pytest

from tests import ranks
from tests.triton import test_triton_proxy as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]

pytest.importorskip("triton")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("over", ["shm", "tcp"])
def test_a_ring_carries_each_round(over: str, graph: bool) -> None:
    found = ranks.run(
        "triton.proxy.rings",
        2,
        timeout=170,
        quiet=False,
        environment={"WEFT_PROVIDERS": over, "WEFT_STAGED": "1"},
        rounds=50 if not graph else 1000,
        device="cuda",
        graph=graph,
    )
    interpreted.check_ring(found)


def test_waits_end_by_their_limit_and_wrong_commands_are_rejected() -> None:
    interpreted.check_failures(
        ranks.run(
            "triton.proxy.failures",
            2,
            timeout=170,
            quiet=False,
            environment={"WEFT_PROVIDERS": "shm", "WEFT_STAGED": "1"},
            device="cuda",
        )
    )
