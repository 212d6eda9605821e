"""A rank that writes its result to a file.

Run it as `python -m tests.workers FOLDER.MODULE.FUNCTION ARGUMENTS`.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from tests import stacks

rank = os.environ.get("WEFT_RANK") or os.environ["RANK"]
directory = os.environ["TEST_RESULTS"]
stacks.arm(directory, rank)
module, _, function = sys.argv[1].rpartition(".")
worker = getattr(importlib.import_module(f"tests.workers.{module}"), function)
try:
    result = worker(**json.loads(sys.argv[2]))
except Exception as error:
    if stacks.is_late(error):
        sys.stderr.write(stacks.shared(directory))
    raise
path = Path(directory, rank)
path.write_text(json.dumps(result), encoding="utf-8")
