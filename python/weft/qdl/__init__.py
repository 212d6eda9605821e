"""Query dispatch for MLPerf Inference's Network division: accelerator nodes, and LoadGen tests.

- `Accelerator`: an accelerator node whose model is a Python callable on batches
- `ask`: queries to accelerator nodes, and answers, without LoadGen
- `onnx.OnnxModel`: an ONNX Runtime model for it
- `Test`: a LoadGen test over accelerator nodes, or in this process
- `audits`: MLPerf's audits TEST01 and TEST04
"""

from weft.qdl.accelerator import Accelerator
from weft.qdl.ask import Answers, ask
from weft.qdl.tensors import Tensor, UpTo
from weft.qdl.test import Counts, Departure, Outcome, Test

__all__ = [
    "Accelerator",
    "Answers",
    "Counts",
    "Departure",
    "Outcome",
    "Tensor",
    "Test",
    "UpTo",
    "ask",
]
