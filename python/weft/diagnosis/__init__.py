"""Diagnosis for this machine: what Weft can use, what is missing, and the consequences.

Works without torch or any other library: optional parts are searched for by name.
"""

from weft.diagnosis import cuda, efa, machine, nics, ofi, verbs
from weft.diagnosis.finding import Finding

__all__ = ["Finding", "examine"]


def examine() -> list[Finding]:
    """Look for everything that Weft uses."""
    found = [look() for look in machine.LOOKS]
    found += verbs.findings(verbs.look(verbs.report()))
    libfabric = ofi.report()
    found += [*ofi.findings(libfabric), *efa.findings(efa.look(libfabric))]
    return [*found, *nics.findings(nics.report()), *cuda.findings(cuda.report())]
