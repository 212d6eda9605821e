"""Arrays from any library with DLPack, such as torch."""

from typing import Any

import numpy as np
import pytest

import weft


class Tensor:
    """An array from another library."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_tensors_go_in_and_out_without_copies() -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=2, top_k=1, hidden=3, max_tokens=4)
        tokens = Tensor(np.arange(12, dtype=np.float32).reshape(4, 3))
        out = Tensor(np.zeros((4, 3), dtype=np.float32))
        with all_to_all.dispatch(tokens, [[0], [1], [0], [1]]) as received:
            outputs = Tensor(received.tokens * 2)
            assert all_to_all.combine(received, outputs, out=out) is out
        assert np.array_equal(out.values, tokens.values * 2)
        region = communicator.register(tokens)
        assert len(region) == tokens.values.nbytes


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((4, 3), dtype=np.float64),
        np.zeros((4, 3), dtype=np.int32),
        np.zeros((3, 4), dtype=np.float32).T,
        np.zeros((4, 6), dtype=np.float32)[:, ::2],
        np.zeros((4, 2), dtype=np.float32),
    ],
)
def test_tensors_that_do_not_fit_are_refused(values: Any) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        all_to_all = weft.moe.AllToAll(communicator, experts=2, top_k=1, hidden=3, max_tokens=4)
        with pytest.raises(weft.errors.ShapeError):
            all_to_all.dispatch(Tensor(values), np.zeros((len(values), 1)))
