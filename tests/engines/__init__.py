"""Stand-ins for inference engines: their interfaces, and as little behind them as a layer needs.

Written from the engines' public signatures. `install` puts one in place of the engine's modules,
and `removed` takes them out again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def removed() -> Iterator[None]:
    """After the block neither stand-ins nor adaptors over them are imported."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "sglang", "weft.adapters")):
                del sys.modules[name]
