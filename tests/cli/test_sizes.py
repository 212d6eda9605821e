"""Sizes that are checked before the work, such as ranks, bytes or runs in a sweep."""

import shlex

import pytest

from weft.cli import main


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tune --ranks 2000000000", "--ranks: 2000000000: expected at most 65536"),
        ("demo --ranks 70000", "--ranks: 70000: expected at most 65536"),
        ("bench moe --ranks 65537", "--ranks: 65537: expected at most 65536"),
        ("bench moe --tokens 2147483647", "lower --ranks, --tokens, --hidden or --experts"),
        ("bench moe --rounds 9999999999", "--rounds: 9999999999: expected at most 2147483647"),
        ("qdl accelerator --bytes 9999999999999999", "expected at most 1125899906842624"),
        ("sim train --topology rail:hosts=2,gpus=2 --ranks 65537", "expected at most 65536"),
        ("sim allreduce --topology rail:hosts=2,gpus=2 --sweep ranks=65537", "job.ranks 65537"),
        (
            "sim moe --topology rail:hosts=2,gpus=2 --sweep ranks=1..16:x2 --sweep tokens="
            + ",".join(map(str, range(1, 1000)))
            + " --sweep seed="
            + ",".join(map(str, range(1, 1000))),
            "4990005 runs of ranks, tokens, seed: expected at most 10000",
        ),
    ],
    ids=lambda text: text[:32],
)
def test_sizes_are_checked_before_the_work(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(shlex.split(command))
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_network_has_as_many_endpoints_as_a_job_may_have_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = "fat-tree:leaves=1,spines=0,hosts=65537"
    with pytest.raises(SystemExit):
        main(["sim", "allreduce", "--topology", network])
    expected = "job.ranks 65537: expected at most 65536; set the number of ranks"
    assert expected in capsys.readouterr().err
