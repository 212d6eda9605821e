"""Words that streams and the host share, one process for each rank on one GPU."""

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.mark.parametrize("over", ["shm", "copy"])
def test_streams_raise_words_and_wait_for_them(over: str) -> None:
    for found in ranks.run(
        "cuda.words.streams",
        2,
        timeout=170,
        quiet=False,
        environment={"WEFT_PROVIDERS": over} | ({"WEFT_STAGED": "1"} if over == "shm" else {}),
        rounds=100,
        home="auto",
    ):
        assert found["right"] == 100
