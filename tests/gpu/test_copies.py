"""Counted writes by copy engines: pairs, symmetric memory and page lists; on GPUs, and on twins."""

import json
import subprocess
import sys

import pytest

import weft
from tests import ROOT, ranks
from tests.gpu.conftest import KINDS
from tests.workers.group import copy_pairs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


@pytest.mark.parametrize("device", KINDS)
def test_a_pair_moves_page_lists_between_devices(device: str) -> None:
    provider = copy_pairs.PROVIDERS[device]
    with weft.listen(providers=[provider]) as listener:
        code = (
            "from tests.workers.group import copy_pairs;"
            f"copy_pairs.dial({listener.address!r}, {device!r})"
        )
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            with listener.accept(timeout=100) as pair:
                assert pair.routes() == [None, "copy"]
                assert copy_pairs.right_rounds(pair, device) == copy_pairs.ROUNDS
            assert process.wait(100) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.gpu
def test_a_counted_write_arrives_in_symmetric_memory() -> None:
    variables = {"WEFT_PROVIDERS": "copy"}
    results = ranks.run(
        "cuda.symmetric.written", 2, environment=variables, quiet=False, execute=True, device="cuda"
    )
    for rank, result in enumerate(results):
        sent = [100 * (1 - rank) + value for value in range(8, 32)]
        assert result.pop("arrived") == sent + [0] * 8
        assert result["one region"]
        assert result["addressed"]


@pytest.mark.gpu
@pytest.mark.parametrize("provider", ["copy", "shm", "tcp"])
@pytest.mark.parametrize("shape", [["--sizes", "8,1001,3M"], ["--pages", "500"]])
def test_every_byte_of_a_benchmark_arrives(provider: str, shape: list[str]) -> None:
    command = [sys.executable, "-m", "weft", "bench", "transfer", "--device", "cuda", *shape]
    command += ["--provider", provider, "--rounds", "5", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["route"], found["staged"]) == (provider, provider != "copy")
    assert all(size["wrong"] == 0 for size in found["sizes"])
