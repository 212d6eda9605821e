"""Fused operators refuse calls whose arguments differ between ranks, on GPUs."""

import pytest

from tests import ranks
from tests.fused import test_fused_agreement as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(300)]

pytest.importorskip("triton")


def test_a_rank_with_other_arguments_is_named() -> None:
    interpreted.check(
        ranks.run("fused.agreement_calls.differ", 2, timeout=280, quiet=False, device="cuda")
    )
