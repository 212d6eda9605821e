"""Device collective arguments that are refused before any launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def refusals() -> list[tuple[str, str, Callable[[Any, Any], object]]]:
    """An error's class and text, and the call on rank 0 of 2 that raises it."""
    import torch

    f32 = torch.float32

    def rows(m: Any, count: int = 4, dtype: Any = f32) -> Any:
        return torch.zeros(count, 3, dtype=dtype, device=m.device)

    def uneven(m: Any, given: Any, sent: Any, received: Any, **more: Any) -> Any:
        return m.all_to_all(given, input_splits=sent, output_splits=received, **more)

    def shifted(m: Any, name: str, given: slice, out: slice) -> Any:
        whole = rows(m, 8)
        return getattr(m, name)(whole[given], out=whole[out])

    return [
        ("ShapeError", "tensor is a list, not a torch tensor", lambda m, t: m.all_reduce([1])),
        ("ShapeError", "tensor is on meta: expected ", lambda m, t: m.all_reduce(t.to("meta"))),
        ("ShapeError", "out is on meta: ", lambda m, t: m.all_gather(t, out=t.to("meta"))),
        ("ShapeError", r"pass tensor\.contiguous\(\)", lambda m, t: m.all_reduce(t.t())),
        ("ShapeError", r"pass tensor\.contiguous\(\)", lambda m, t: m.broadcast(t[:, :2])),
        ("ShapeError", r"pass tensor\.to_dense\(\)", lambda m, t: m.all_reduce(t.to_sparse())),
        (
            "ShapeError",
            "lazy conjugate",
            lambda m, t: m.broadcast(torch.zeros(3, dtype=torch.complex64, device=m.device).conj()),
        ),
        (
            "ConfigurationError",
            "op 'mean': expected one of sum, avg",
            lambda m, t: m.all_reduce(t, "mean"),
        ),
        (
            "ConfigurationError",
            "xor of float32: expected bool or",
            lambda m, t: m.all_reduce(t, "xor"),
        ),
        ("ConfigurationError", "band of bfloat16", lambda m, t: m.reduce(t.bfloat16(), 0, "band")),
        (
            "ShapeError",
            "sum of complex64: expected one of bool, ",
            lambda m, t: m.all_reduce(t + 0j),
        ),
        (
            "ShapeError",
            "sum of float8_e4m3fnuz: .*; cast the tensor",
            lambda m, t: m.reduce_scatter(t.to(torch.float8_e4m3fnuz)),
        ),
        ("ConfigurationError", "op 'mean'", lambda m, t: m.prepare("mean", f32)),
        (
            "ShapeError",
            r"out has shape \(2, 3\); \(4, 3\) is needed",
            lambda m, t: m.all_reduce(t, out=rows(m, 2)),
        ),
        (
            "ShapeError",
            "out is of dtype torch.float64; torch.float32",
            lambda m, t: m.all_reduce(t, out=t.double()),
        ),
        (
            "ShapeError",
            r"out has shape \(4, 3\); \(8, 3\) is needed",
            lambda m, t: m.all_gather(t, out=rows(m)),
        ),
        (
            "ShapeError",
            r"out has shape \(4, 3\); \(2, 3\) is needed",
            lambda m, t: m.reduce_scatter(t, out=rows(m)),
        ),
        (
            "ShapeError",
            "3 rows: expected a multiple of 2 ranks",
            lambda m, t: m.reduce_scatter(rows(m, 3)),
        ),
        ("ShapeError", "3 rows: .*pass input_splits", lambda m, t: m.all_to_all(rows(m, 3))),
        (
            "ShapeError",
            r"a scalar: .*pass tensor\.view\(1\)",
            lambda m, t: m.all_gather(t[0, 0].clone()),
        ),
        ("ShapeError", "out is a scalar", lambda m, t: m.scatter(t, out=t[0, 0].clone())),
        (
            "ShapeError",
            "out overlaps the input: .*, or the input itself",
            lambda m, t: shifted(m, "all_reduce", slice(0, 4), slice(2, 6)),
        ),
        (
            "ShapeError",
            "or rows 0 to 2 of the input",
            lambda m, t: shifted(m, "reduce_scatter", slice(0, 4), slice(1, 3)),
        ),
        (
            "ShapeError",
            "or rows 0 to 4 of out as the input",
            lambda m, t: shifted(m, "all_gather", slice(4, 8), slice(0, 8)),
        ),
        ("ShapeError", "pass memory of its own$", lambda m, t: m.all_to_all(t, out=t)),
        ("UnknownError", "root is 2: expected a rank from 0 to 1", lambda m, t: m.broadcast(t, 2)),
        ("UnknownError", "root is -1", lambda m, t: m.reduce(t, -1)),
        ("UnknownError", "root is 7", lambda m, t: m.gather(t, 7)),
        ("UnknownError", "root is 7", lambda m, t: m.scatter(t, 7, out=t)),
        (
            "ConfigurationError",
            "out is given on rank 0: the root, rank 1,",
            lambda m, t: m.gather(t, 1, out=t),
        ),
        ("ConfigurationError", "out is given on rank 0", lambda m, t: m.reduce(t, 1, out=t)),
        (
            "ConfigurationError",
            "tensor is not given on rank 0",
            lambda m, t: m.scatter(None, out=t),
        ),
        (
            "ConfigurationError",
            "tensor is given on rank 0: .* other ranks pass None",
            lambda m, t: m.scatter(t, 1, out=t),
        ),
        (
            "ConfigurationError",
            "input_splits without output_splits",
            lambda m, t: m.all_to_all(t, input_splits=[2, 2]),
        ),
        (
            "ConfigurationError",
            "output_splits without input_splits",
            lambda m, t: m.all_to_all(t, output_splits=[2, 2]),
        ),
        ("ShapeError", "sum 5, expected the 4 rows", lambda m, t: uneven(m, t, [2, 3], [2, 2])),
        (
            "ShapeError",
            "has 1 numbers: expected one for each of 2 ranks",
            lambda m, t: uneven(m, t, [4], [2, 2]),
        ),
        (
            "ShapeError",
            "expected numbers of rows from 0 on",
            lambda m, t: uneven(m, t, [-1, 5], [2, 2]),
        ),
        (
            "ShapeError",
            "sends itself 1 rows and expects 2",
            lambda m, t: uneven(m, t, [1, 3], [2, 2]),
        ),
        (
            "ShapeError",
            r"pass input_splits\.tolist\(\)",
            lambda m, t: uneven(m, t, torch.tensor([2, 2]), [2, 2]),
        ),
        (
            "ConfigurationError",
            "tensor requires a gradient, .*no_grad",
            lambda m, t: m.all_reduce(t.requires_grad_()),
        ),
        (
            "ConfigurationError",
            "algorithm.*ring.*one_shot",
            lambda m, t: m.all_reduce(t, algorithm="ring"),
        ),
        ("WeftError", "num_sms", lambda m, t: m.all_reduce(t, num_sms=0)),
        ("WeftError", "num_sms", lambda m, t: m.all_reduce(t, num_sms=4096)),
        (
            "ConfigurationError",
            "one_shot of .* bytes",
            lambda m, t: m.all_reduce(rows(m, 1_000_000), algorithm="one_shot"),
        ),
        (
            "ConfigurationError",
            "one_shot",
            lambda m, t: uneven(m, t, [2, 2], [2, 2], algorithm="one_shot"),
        ),
        (
            "ConfigurationError",
            "previous_event is a int",
            lambda m, t: m.all_reduce(t, previous_event=3),
        ),
    ]


def test_what_does_not_fit_is_refused_before_any_launch(kind: str) -> None:
    import torch

    import weft
    from tests.gpu.collective_calls import Group

    group = Group(kind, 2, skew_timeout=5.0)
    member = group.members[0]
    for name, text, call in refusals():
        kind_of = weft.WeftError if name == "WeftError" else getattr(weft.errors, name)
        with pytest.raises(kind_of, match=text):
            call(member, torch.zeros(4, 3, device=member.device))
    # No epoch was lost.
    for each in group.members:
        each.prepare("sum", torch.float32)
    vectors = [torch.full((4,), 1.0, device=each.device) for each in group.members]
    group.synchronise()
    group.run(lambda rank, member: member.all_reduce(vectors[rank]))
    assert [each.tolist() for each in vectors] == [[2.0] * 4] * 2
    assert group.raised() == ["", ""]
    group.close()
    for each, vector in zip(group.members, vectors, strict=True):
        with pytest.raises(weft.errors.ClosedError):
            each.all_reduce(vector)
        with pytest.raises(weft.errors.ClosedError):
            each.check()
        each.close()


def test_arguments_of_groups_are_checked() -> None:
    import torch

    import weft
    from weft import cuda

    def refused(text: str, ranks: int = 1, devices: Any = ("twin",), **options: Any) -> None:
        with pytest.raises(weft.WeftError, match=text):
            cuda.local_collectives(ranks, devices, **options)

    refused("1 devices are given for 2 ranks", 2)
    refused("world_size is 0", 0, ())
    refused("'cuda:1' or 'twin'", devices=["mps"])
    refused("skew_timeout nan", skew_timeout=float("nan"))
    refused("num_sms", num_sms=0)
    refused("memory", memory="tape")
    if not torch.cuda.is_available():
        refused("no GPU here", devices=["cuda:0"])
    with pytest.raises(TypeError, match=r"communicator: expected weft\.Communicator, got int"):
        cuda.Collectives(3, device="twin")  # type: ignore[arg-type]


def test_refused_calls_name_the_argument_and_leave_the_output_alone() -> None:
    import torch

    from weft import cuda
    from weft.errors import ConfigurationError, ShapeError

    for wrong in (-1, 0, 1 << 40):
        with pytest.raises(ConfigurationError, match=f"num_sms is {wrong}"):
            cuda.local_collectives(2, ["twin"] * 2, num_sms=wrong)
    member, other = cuda.local_collectives(2, ["twin"] * 2)
    with pytest.raises(ConfigurationError, match="num_sms of a call is 99: expected at most"):
        member.all_reduce(torch.ones(4), num_sms=99)
    memory = bytearray(33)
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=4)
    with pytest.raises(ShapeError, match="not a multiple of its element"):
        member.all_reduce(odd)
    out = torch.ones(4)
    version = out._version
    with pytest.raises(ShapeError, match="overlaps"):
        member.all_to_all(out, out=out)
    assert out._version == version
    member.close()
    other.close()
