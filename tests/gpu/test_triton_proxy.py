"""Puts of Triton kernels by a proxy of the host, on GPUs, one process for each rank."""

import pytest

import ranks
import test_triton_proxy as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]

pytest.importorskip("triton")


@pytest.mark.parametrize("transport", ["shm", "mixed"])
def test_a_ring_carries_each_round(transport: str) -> None:
    interpreted.check_ring(
        ranks.run(
            "triton_proxy.rings",
            2,
            transport,
            timeout=170,
            quiet=False,
            rounds=20,
            device="cuda",
        )
    )
