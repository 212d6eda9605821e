"""Fixtures and requirements: a GPU, or for some tests the kernels' CPU twin."""

import os

import pytest

# Ranks in one process wait for each other on separate streams. Streams that share a hardware queue
# would wait for work queued behind them: hence the maximum queue count. CUDA reads both
# variables at initialisation.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Lazy kernel loading can wait for running kernels, and these wait for that kernel.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

#: The kernels, and their twin, on which the same test runs without a GPU.
KINDS = [pytest.param("cuda", marks=pytest.mark.gpu), "twin"]


def missing(marked: bool) -> str | None:
    """A test's missing requirement, or empty; `marked`: it needs a GPU."""
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


@pytest.fixture
def own_context(request: pytest.FixtureRequest) -> None:
    """Skip if ranks on threads would share one GPU's context.

    Their calls on the host wait for each other there: while a copy to pageable memory waits for a
    kernel on one rank, the driver holds up `cudaEventRecord` on the other, on which that kernel
    depends (seen with driver 580.159.04).
    """
    import torch

    twin = request.getfixturevalue("kind") == "twin" if "kind" in request.fixturenames else False
    if not twin and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs: ranks on threads of one process share the context of one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
