"""Servers and networks as they are described, drawn and written to files.

What is computed is in the native module; here is what touches the machine (NVML) and what draws.
"""

from weft.topology.nvml import nvml_gpus
from weft.topology.picture import draw_bigraph
from weft.topology.placement import hdrm_hosts, hdrm_ranks

__all__ = ["draw_bigraph", "hdrm_hosts", "hdrm_ranks", "nvml_gpus"]
