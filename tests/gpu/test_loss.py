"""A rank that is killed or stopped: the others raise in time, name it, and end cleanly."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


#: The twin has one memory kind, and no graphs.
WAYS: list[Any] = [("twin", "fd", "eager")] + [
    pytest.param("cuda", memory, launches, marks=pytest.mark.gpu)
    for memory in ("fd", "ipc")
    for launches in ("eager", "graph")
]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize(("device", "memory", "launches"), WAYS)
def test_survivors_raise_in_time_and_go_on(
    device: Literal["cuda", "twin"],
    memory: Literal["fd", "ipc"],
    launches: Literal["eager", "graph"],
    how: Literal["kill", "stop"],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.gpu import loss

    ranks, times = (2, 3) if device == "cuda" else (3, 1)
    line = loss.summary(loss.Spec(device, ranks, memory, launches, how), times, seed=7)
    with capsys.disabled():
        print("\noutcome", json.dumps(line))
    assert line["survived"], line["failed"]
