"""Torch process groups for tests: gloo as the reference, and a tested backend beside it."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from tests.workers.backend.table import StoreGroup
from weft.torch import build, device

TIMEOUT = timedelta(seconds=20)
#: Models stay alive: the library has their addresses.
models: list[StoreGroup] = []


def register_model() -> None:
    """Make the backend "model": the C++ library over the C table model."""

    def create(options: Any, _: Any) -> Any:
        models.append(StoreGroup(options.store, options.group_rank, options.group_size))
        return build.load().create(models[-1].address, 0, options.timeout, "")

    # A library thread inside a model call would abort the interpreter as it ends.
    atexit.register(build.load().close_all)
    distributed.Backend.register_backend("model", create, extended_api=True, devices=["cpu"])


def named(backend: str) -> str:
    """Torch's name for a tested backend; "twin": weft with its kernels' twin for tensors."""
    if backend == "twin":
        device.kind = "twin"
        return "weft"
    return backend


def start(backend: str, timeout: timedelta = TIMEOUT, options: Any = None) -> tuple[int, int]:
    """Make the default process group over a store in a file; this rank and the rank count."""
    register_model()
    rank, ranks = int(os.environ["WEFT_RANK"]), int(os.environ["WEFT_WORLD_SIZE"])
    store = distributed.FileStore(os.path.join(os.environ["TEST_RESULTS"], "store"), ranks)
    distributed.init_process_group(
        named(backend),
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timeout,
        pg_options=options,
    )
    return rank, ranks


@contextmanager
def beside_gloo(backend: str) -> Iterator[Any]:
    """A group with all ranks on this backend, while the default group uses gloo."""
    start("gloo")
    yield distributed.new_group(backend=named(backend), timeout=TIMEOUT)
    distributed.destroy_process_group()
