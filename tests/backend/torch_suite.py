"""torch's own tests for torch.distributed, run with the backend `weft`.

    python -m tests.backend.torch_suite [--ranks 2,4] [--only TEST,...]

They are `torch.testing._internal.distributed.distributed_test` from the installed torch, written
for any backend. They skip backends that their tables lack: `register` adds Weft to the tables.
Fails if a test fails, or if fewer tests pass than `FLOOR`. Prints the skipped tests by reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from typing import Any

from tests import stacks

#: Tests that pass, by world size. docs/torch.md has the same numbers.
FLOOR = {2: 100, 4: 125}
#: A test's seconds.
LIMIT = 60
#: Reasons for skipped tests that name backends but hold for Weft on the CPU too.
INCLUDED = (
    "Test requires backend weft to be one of",
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "get_future is only supported on",
    "Only gloo backend supports timeouts",
    "Only Nccl & Gloo backend support DistributedDataParallel",
    "GLOO Batch Send Recv CPU",
)
#: `BACKEND` in tests that list backends in their bodies.
NAMES = {
    "test_accumulate_gradients_no_sync": "gloo",
    "test_accumulate_gradients_no_sync_allreduce_hook": "gloo",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": "gloo",
    "test_accumulate_gradients_no_sync_grad_is_view": "gloo",
}
#: Tests that fail for every backend outside torch, with the reason.
EXCLUDED = {"test_ddp_logging_data_cpu": 'torch logs every plugin as "custom"'}
#: gloo's error patterns, and Weft's in their place.
ERRORS = (
    (r"^ \(Timed out\|closed\|timeout\) $", "timed out after 1000 ms|timed out after 5000 ms"),
    (r"^Rank (\d+) failed to pass monitoredBarrier$", r"rank \1 did not arrive within"),
    (r"^Ranks ([\d, ]+) failed to pass monitoredBarrier$", r"ranks \1 did not arrive within"),
    (r"^Rank 2$", r"rank 2 did not arrive within"),
    (r"^Rank 0 timed out in monitoredBarrier$", "did not arrive within 0 ms"),
    (r"^Rank \d+ successfully reached monitoredBarrier, .*$", "did not arrive within"),
)


def main() -> int:
    """All tests with each rank count; 1 if one failed or fewer than the floor passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="world sizes (default %(default)s)")
    parser.add_argument("--only", default="", help="names of tests (default: all)")
    parser.add_argument("--results", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.results:
        with open(arguments.results, "w", encoding="utf-8") as file:
            json.dump(run(arguments.only), file)
        return 0
    sizes = [int(each) for each in arguments.ranks.split(",")]
    # World sizes run side by side: most of a test's time is fixed-length waits.
    with tempfile.TemporaryDirectory() as directory:
        processes = [start(size, arguments.only, directory) for size in sizes]
        wrong = 0
        for size, process in zip(sizes, processes, strict=True):
            _, output = process.communicate()
            if process.returncode:
                print(f"{size} ranks: status {process.returncode}\n{output[-4000:]}")
                wrong += 1
                continue
            with open(os.path.join(directory, f"{size}.json"), encoding="utf-8") as file:
                wrong += report(size, json.load(file), 0 if arguments.only else FLOOR[size])
    return int(wrong > 0)


def start(size: int, only: str, directory: str) -> subprocess.Popen[str]:
    """Process that runs the tests with one world size."""
    place = os.path.join(directory, str(size))
    os.mkdir(place)
    environment = os.environ | {
        "BACKEND": "weft",
        "WORLD_SIZE": str(size),
        "TEMP_DIR": place,
        "INIT_METHOD": f"file://{place}/shared",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.backend.torch_suite", "--only", only]
    return subprocess.Popen(
        [*command, "--results", f"{place}.json"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def report(size: int, outcomes: dict[str, list[str]], floor: int) -> bool:
    """Print a world size's outcomes; true if tests failed or too few passed."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    ran = counts["passed"] + counts["failed"]
    print(
        f"{size} ranks: {ran} run, {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped; at least {floor} have to pass"
    )
    reasons = Counter(text for outcome, text in outcomes.values() if outcome == "skipped")
    for reason, count in reasons.most_common():
        print(f"  {count:3} skipped: {reason}")
    for name, (outcome, text) in outcomes.items():
        if outcome == "failed":
            print(f"failed: {name}\n{text}")
    return counts["failed"] > 0 or counts["passed"] < floor


def run(only: str) -> dict[str, list[str]]:
    """Each test's outcome, and the reason or the error."""
    case = made_case()
    every = [name for name in dir(case) if name.startswith("test_")]
    outcomes = {}
    for name in only.split(",") if only else every:
        result = unittest.TestResult()
        case(name).run(result)
        wrong = result.errors + result.failures
        if wrong:
            outcomes[name] = ["failed", wrong[0][1]]
        elif result.skipped:
            outcomes[name] = ["skipped", result.skipped[0][1]]
        else:
            outcomes[name] = ["passed", ""]
    return outcomes


def made_case() -> Any:
    """Torch's test class whose ranks are forked from this process, which has all imports."""
    import torch.testing._internal.common_distributed as common

    # Before the tests are imported: their decorators read these tables.
    for feature in ("ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature] |= {"weft"}
    import torch.testing._internal.distributed.distributed_test as suite

    import weft.torch
    import weft.torch.build

    weft.torch.build.load()
    suite.PROFILING_SUPPORTED_BACKENDS.append("weft")
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("weft")
    # torch's own function rejects all backends but gloo.
    suite.dist.monitored_barrier = weft.torch.monitored_barrier
    show_stacks_of_late_ranks(suite.Barrier)

    class WeftCase(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            stacks.arm(os.environ["TEMP_DIR"], rank)
            super()._run(rank, *args, **kwargs)

        def _get_timedout_process_traceback(self) -> None:
            # For ranks that are killed next; shown with the error.
            stacks.shared(os.environ["TEMP_DIR"])

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            suite.BACKEND = NAMES.get(test_name, "weft")
            # Groups with ranks 1 and 2 need three ranks; only for "mpi" torch lets four do.
            if int(self.world_size) > 2:
                os.environ["BACKEND"] = "mpi"
            super().run_test(test_name, parent_pipe)

        def assertRaisesRegex(self, error: Any, pattern: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
            for theirs, ours in ERRORS:
                if re.fullmatch(theirs, pattern):
                    pattern = re.sub(theirs, ours, pattern)
            return super().assertRaisesRegex(error, pattern, *args, **kwargs)  # noqa: PT027

        def _check_return_codes(self, *args: Any) -> None:
            try:
                self.check_statuses(*args)
            except (AssertionError, RuntimeError) as error:
                text = stacks.found(os.environ["TEMP_DIR"])
                raise AssertionError(f"{error}\n{text}") from error

        def check_statuses(self, *args: Any) -> None:
            # torch's own check reads only rank 0's status, and shows ranks' errors, after
            # which the others are killed.
            codes = [each.exitcode for each in self.processes]
            has_error = self.TEST_ERROR_EXIT_CODE in codes
            if not has_error and any(code is not None and code < 0 for code in codes):
                raise AssertionError(f"statuses of the ranks {codes}: expected no signal")
            super()._check_return_codes(*args)

    for name in dir(WeftCase):
        test = getattr(WeftCase, name)
        if getattr(test, "__unittest_skip_why__", "").startswith(INCLUDED):
            test.__unittest_skip__ = False
        if name in EXCLUDED:
            test.__unittest_skip__, test.__unittest_skip_why__ = True, EXCLUDED[name]
    return WeftCase


def show_stacks_of_late_ranks(barrier: Any) -> None:
    """Collect stacks on all ranks before the tests' file barrier ends them with an error."""
    sync = barrier.sync.__func__

    def synced(cls: Any, *args: Any, **kwargs: Any) -> None:
        try:
            sync(cls, *args, **kwargs)
        except RuntimeError:
            # The pipe to the test is too short for them.
            stacks.shared(os.environ["TEMP_DIR"])
            raise

    barrier.sync = classmethod(synced)


if __name__ == "__main__":
    sys.exit(main())
