"""Servers and networks as they are described, drawn and written to files.

What is computed is in the native module; here is what touches the machine (NVML) and what draws.
"""

from weft.topology.nvml import nvml_gpus
from weft.topology.picture import draw_bigraph

__all__ = ["draw_bigraph", "nvml_gpus"]
