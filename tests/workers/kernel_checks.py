"""Parts that checks of Triton kernels share: digests, errors of peers, programs of pages."""

from __future__ import annotations

import hashlib
import re
import textwrap
import time
from pathlib import Path

import torch

import weft
from workers import device_native

__all__ = ["awaited_error", "digest_of", "program_of"]


def digest_of(*tensors: torch.Tensor) -> str:
    """Digest of the bits of tensors."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def awaited_error(seconds: float = 40.0) -> tuple[str, int | None, str]:
    """The first error of `weft.check`, or that of the last call once the time is over."""
    deadline = time.monotonic() + seconds
    error = device_native.named(weft.check)
    while error[0] == "None" and time.monotonic() < deadline:
        time.sleep(0.02)
        error = device_native.named(weft.check)
    return error


def program_of(page: str) -> str:
    """The program of a page of the documents that begins with an import of torch."""
    text = Path(__file__).parents[2].joinpath("docs", page).read_text(encoding="utf-8")
    block = re.search(r"(?:^    .*\n|^\n)+", text[text.index("    import torch") :], re.MULTILINE)
    assert block is not None, page
    return textwrap.dedent(block[0])
