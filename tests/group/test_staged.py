"""GPU memory over tcp, which stages it by itself, with host memory in place of GPUs."""

import subprocess
import sys

import pytest

import weft
from tests import ROOT, ranks
from tests.workers.group.device_tensor import exchanged

#: Hosts with twins of GPUs; GPUs themselves need no variable.
TWINS = {"WEFT_STAGED": "automatic-twin"}


def test_a_tensor_of_a_gpu_is_a_source_and_a_destination_over_tcp() -> None:
    results = ranks.run("group.device_tensor.sent", 2, "tcp", environment=TWINS, kind="twin")
    for result in results:
        assert (result["device"], result["length"]) == ("cuda:0", 20_000)
    assert results[1]["arrived"]
    assert results[1]["arrived on the host"]


def test_a_pair_over_tcp_carries_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TWINS.items():
        monkeypatch.setenv(name, value)
    with weft.listen(providers=["tcp"]) as listener:
        code = (
            "from tests.workers.group import device_tensor; "
            f"device_tensor.dial({listener.address!r})"
        )
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            with listener.accept() as pair:
                assert pair.routes() == [None, "tcp"]
                exchanged("twin", pair)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("staged", ["0", None])
def test_memory_of_gpus_is_refused_over_tcp_where_no_rank_stages_it(staged: str | None) -> None:
    environment = {} if staged is None else {"WEFT_STAGED": staged}
    for message in ranks.run("group.device_tensor.refused", 2, "tcp", environment=environment):
        assert message.startswith("RegionError: tcp cannot use region")


def test_ranks_with_host_memory_only_have_no_threads_and_hardly_descriptors_more() -> None:
    def counts(staged: str) -> list[dict[str, int]]:
        environment = {"WEFT_STAGED": staged}
        results = ranks.run("group.device_tensor.host_traffic", 2, "tcp", environment=environment)
        return [dict(result) for result in results]

    for plain, twin in zip(counts("0"), counts("automatic-twin"), strict=True):
        assert twin["task"] == plain["task"]
        # The timer by which copies wake the engine.
        assert twin["fd"] <= plain["fd"] + 1
