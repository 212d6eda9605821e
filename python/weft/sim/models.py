"""Models that training can be simulated with."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["MODELS"]

#: By name; what `weft sim train --model FILE` reads has the same form.
MODELS: Final[dict[str, dict[str, Any]]] = {}
