"""What these tests need: a GPU, or for some of them the CPU twin of the kernels."""

import os

import pytest

# Ranks of one process wait for each other on streams of their own. Streams that share a queue of
# the device would wait for what is queued behind them: as many queues as there can be, then. Both
# are read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Loading a kernel can wait for all that run, and these wait for the kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

#: The kernels themselves, and their twin, on which the same test runs without a GPU.
KINDS = [pytest.param("cuda", marks=pytest.mark.gpu), "twin"]


def missing(marked: bool) -> str | None:
    """What a test lacks here, if anything; `marked`: it needs a GPU."""
    try:
        import torch
    except ImportError:
        return "needs PyTorch, which is not installed"
    if marked and not torch.cuda.is_available():
        return "needs a GPU: torch.cuda is not available"
    from weft import _native

    if not hasattr(_native, "DeviceAllToAll"):
        return "needs a native module with DeviceAllToAll; this one was built without"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    lacking = missing(item.get_closest_marker("gpu") is not None)
    if lacking is not None:
        pytest.skip(lacking)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
