"""Ranks in torch.distributed that are killed or stopped within each collective.

`WEFT_TEST_TORCH_LOSSES`: repetitions for each collective and signal; once by default, then
stopped within only five random ones, as a stop costs a wait.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

TIMES = int(os.environ.get("WEFT_TEST_TORCH_LOSSES", "1"))
SILENCE_SECONDS = 2.0
#: Documented detection limits for a lost process and a silent one, for the median.
NOTICED_SECONDS = {"SIGKILL": 2.0, "SIGSTOP": SILENCE_SECONDS + 10}
#: Limit for a single detection on a busy machine.
BUSY_SECONDS = SILENCE_SECONDS + 10

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120 + 200 * TIMES)]


@pytest.mark.parametrize("by", list(NOTICED_SECONDS))
def test_survivors_name_the_lost_rank_and_form_a_new_group(by: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    seed = random.randrange(2**32)
    print("seed", seed)
    # Stopped ranks cost a wait, killed ones computation.
    at_once = 2 if by == "SIGKILL" else 5
    count = 5 if by == "SIGSTOP" and TIMES == 1 else 13
    arguments = {"by": by, "times": TIMES, "seed": seed, "at_once": at_once, "count": count}
    process = subprocess.run(
        [sys.executable, "-m", "tests.workers", "backend.deaths.run", json.dumps(arguments)],
        cwd=ROOT,
        env=os.environ
        | {
            "TEST_RESULTS": str(tmp_path),
            "RANK": "0",
            "WEFT_SILENCE_TIMEOUT": str(SILENCE_SECONDS),
        },
        capture_output=True,
        text=True,
        timeout=100 + 200 * TIMES,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    rounds: list[dict[str, Any]] = json.loads((tmp_path / "0").read_text(encoding="utf-8"))
    wrong = [each for each in rounds if "wrong" in each]
    assert not wrong, f"seed {seed}: {wrong}"
    assert len(rounds) == count * TIMES
    noticed = sorted(seconds for each in rounds for seconds in each["noticed"])
    assert noticed[len(noticed) // 2] < NOTICED_SECONDS[by], f"seed {seed}: {rounds}"
    assert noticed[-1] < BUSY_SECONDS, f"seed {seed}: {rounds}"
    outcome = {"test": by, "collectives": count, "times": TIMES, "failed": 0, "seed": seed}
    outcome["noticed_s"] = {"median": noticed[len(noticed) // 2], "most": noticed[-1]}
    print("\noutcome", json.dumps(outcome))
