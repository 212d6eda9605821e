"""MLPerf's LoadGen as a shared library with C functions (`shim/shim.h`), for `crates/loadgen`."""

from weft.loadgen.build import VERSION, built

__all__ = ["VERSION", "built"]
