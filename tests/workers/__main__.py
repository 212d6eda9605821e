"""`python -m workers MODULE.FUNCTION ARGUMENTS`: a rank that writes its result to a file."""

import importlib
import json
import os
import sys
from pathlib import Path

module, _, function = sys.argv[1].partition(".")
worker = getattr(importlib.import_module(f"workers.{module}"), function)
result = worker(**json.loads(sys.argv[2]))
rank = os.environ.get("WEFT_RANK") or os.environ["RANK"]
path = Path(os.environ["TEST_RESULTS"], rank)
path.write_text(json.dumps(result), encoding="utf-8")
