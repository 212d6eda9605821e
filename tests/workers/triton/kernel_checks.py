"""Shared parts for Triton kernel checks: digests, peers' errors, page programs."""

from __future__ import annotations

import hashlib
import re
import textwrap
import time

import torch

import weft
from tests import ROOT
from tests.workers.cuda import device_native

__all__ = ["awaited_error", "digest_of", "program_of"]


def digest_of(*tensors: torch.Tensor) -> str:
    """Digest over tensors' bits."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def awaited_error(seconds: float = 40.0) -> tuple[str, int | None, str]:
    """The first error from `weft.check`, or the last call's once the time is over."""
    deadline = time.monotonic() + seconds
    error = device_native.named(weft.check)
    while error[0] == "None" and time.monotonic() < deadline:
        time.sleep(0.02)
        error = device_native.named(weft.check)
    return error


def program_of(page: str) -> str:
    """The program on a documentation page that begins with importing torch."""
    text = ROOT.joinpath("docs", page).read_text(encoding="utf-8")
    block = re.search(r"(?:^    .*\n|^\n)+", text[text.index("    import torch") :], re.MULTILINE)
    assert block is not None, page
    return textwrap.dedent(block[0])
