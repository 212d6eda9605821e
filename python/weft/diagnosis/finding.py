"""Finding: a machine part that Weft uses, present or missing."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """Finding: a machine part that Weft uses, present or missing."""

    name: str
    found: bool
    #: Description if the part was found, or the reason why not.
    detail: str
    #: Use that Weft makes of the part, or the consequence without it.
    follows: str
    #: True if Weft requires it.
    required: bool = False
