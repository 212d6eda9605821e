"""One thing that was looked for."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    name: str
    found: bool
    #: What was found, or why it was not.
    detail: str
    #: What can be done with it, or what its absence costs.
    follows: str
    #: Whether Weft cannot work at all without it.
    required: bool = False
