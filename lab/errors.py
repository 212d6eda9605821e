"""Lab errors."""

__all__ = ["LabError"]


class LabError(Exception):
    """The lab cannot run here, or a run has failed; the text has the reason and a remedy."""
