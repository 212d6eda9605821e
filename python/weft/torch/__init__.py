"""Backend `weft` for torch.distributed, on CPU and GPU tensors; importing this registers it.

`torch.distributed.init_process_group("weft")` then makes process groups over Weft. `import weft`
registers it too if torch was imported before. The backend is a small C++ library, built for the
installed torch at the first process group and cached; `python -m weft.torch` builds it ahead of
time. torch's side is described in https://docs.pytorch.org/docs/stable/distributed.html.
"""

from weft.torch.backend import Options, abort, monitored_barrier, register
from weft.torch.operators import all_reduce_

__all__ = ["Options", "abort", "all_reduce_", "monitored_barrier", "register"]

register()
