"""Options of a communicator, as the native module takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from weft.base import environment
from weft.base.arguments import expect_names, expect_text
from weft.base.nvrtc import show_nvrtc
from weft.base.timeout import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Progress", "made_options"]

Progress = Literal["caller", "thread", "epoll"]


def made_options(
    providers: Sequence[str] | None,
    progress: Progress,
    spin: float | None,
    silence_timeout: float | None,
    trace_limit: int,
) -> dict[str, Any]:
    """Arguments for the native `init`, apart from group membership."""
    environment.check_variables()
    if providers is None:
        providers = environment.providers()
    names = None if providers is None else expect_names(providers, "providers")
    if "copy" in (names or ()) or environment.text("WEFT_STAGED") == "1":
        # Page lists have a kernel.
        show_nvrtc()
    return {
        "providers": names,
        "progress": expect_text(progress, "progress"),
        "spin": None if spin is None else seconds(spin, "spin"),
        "silence_timeout": None
        if silence_timeout is None
        else seconds(silence_timeout, "silence_timeout"),
        "trace_limit": trace_limit,
    }
