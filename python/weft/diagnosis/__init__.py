"""What this machine has that Weft uses, what it lacks, and what that costs.

Nothing here imports torch or needs any library: what may be absent is looked for by name.
"""

from weft.diagnosis import cuda, efa, libraries, machine, ofi
from weft.diagnosis.finding import Finding

__all__ = ["Finding", "examine"]


def examine() -> list[Finding]:
    """Look for everything that Weft uses."""
    found = [look() for look in (*machine.LOOKS, *libraries.LOOKS)]
    libfabric = ofi.report()
    found += [*ofi.findings(libfabric), *efa.findings(efa.look(libfabric))]
    return [*found, *cuda.findings(cuda.report())]
