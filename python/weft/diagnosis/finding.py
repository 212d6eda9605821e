"""Finding: a part of the machine that Weft uses, present or missing."""

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """Finding: a part of the machine that Weft uses, present or missing."""

    name: str
    found: bool
    #: Description of the part found, or the reason for its absence.
    detail: str
    #: Use of the part, or the consequence of its absence.
    follows: str
    #: True if Weft requires it.
    required: bool = False
