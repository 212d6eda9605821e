"""Stand-ins for inference engines: their interfaces with a minimal layer implementation.

Written from the engines' public signatures. `install` replaces the engine's modules by one, and
`removed` removes it again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def removed() -> Iterator[None]:
    """Context whose end removes stand-ins, and adapters over them, from the imported modules."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "sglang", "weft.adapters")):
                del sys.modules[name]
