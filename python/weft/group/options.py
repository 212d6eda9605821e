"""Options of a communicator, as the native module takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.base import environment
from weft.base.arguments import expect_names, expect_text
from weft.base.nvrtc import show_nvrtc
from weft.base.timeout import seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Progress", "made_options", "show_nvrtc_to_copies"]

Progress = Literal["caller", "thread", "epoll"]


#: Device files of hosts with GPUs, as the native module reads them.
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")


def show_nvrtc_to_copies(providers: Sequence[str] | None) -> None:
    """Let copies find NVRTC if they may carry GPU memory: page lists have a kernel."""
    staged = environment.text("WEFT_STAGED")
    is_automatic = staged is None and any(Path(file).exists() for file in _GPU_FILES)
    if "copy" in (providers or ()) or staged == "1" or is_automatic:
        show_nvrtc()


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
    show_nvrtc_to_copies(names)
    return {
        "providers": names,
        "progress": expect_text(progress, "progress"),
        "spin": None if spin is None else seconds(spin, "spin"),
        "silence_timeout": None
        if silence_timeout is None
        else seconds(silence_timeout, "silence_timeout"),
        "trace_limit": trace_limit,
    }
