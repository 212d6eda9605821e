"""On-off switch for operator fusion in torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weft.base.errors import ConfigurationError
from weft.base.timeout import seconds
from weft.fused import gains
from weft.fused.operators import SITE_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weft.fused.graph.passes import Pass

__all__ = ["disable", "enable"]

#: The pass from the last `enable`.
_CURRENT: Final[list[Pass]] = []


def enable(
    *,
    operators: Iterable[str] | None = None,
    force: bool = False,
    timeout: float = 60.0,
) -> None:
    """Have torch.compile substitute fused operators in graphs that it compiles from now on.

    All ranks call it with the same arguments, and compile the same graphs in the same order. Places
    that ranks decide differently, and graphs that some ranks do not compile in time, stay as they
    are on all ranks. For example, `weft.fused.enable(operators=["matmul_all_reduce"])` before the
    first call to a compiled model.

    Args:
        operators: names in `torch.ops.weft_fused`; by default all, with float8 operators only if
            `force` is set. `sequence_parallel` only by name: everything added to a sum, or
            multiplied, up to the next GEMM is then equal on all ranks.
        force: substitute wherever a kernel applies, without an expected gain; for tests.
        timeout: seconds to wait for the other ranks, in a compilation and at the first call of a
            compiled graph.

    Raises:
        ConfigurationError: if an operator is unknown.
    """
    usual = gains.RULES.keys() - gains.BY_NAME - (set() if force else gains.ON_REQUEST)
    chosen = frozenset(usual if operators is None else operators)
    if unknown := chosen - set(gains.RULES):
        raise ConfigurationError(
            f"operators {', '.join(sorted(unknown))}: expected some of {', '.join(gains.RULES)}"
        )
    limit = seconds(timeout)
    SITE_TIMEOUT[0] = limit
    # Inductor is slow to import.
    from torch._inductor import config

    from weft.fused.graph.passes import Pass

    disable()
    previous = config.post_grad_custom_pre_pass
    _CURRENT.append(Pass(previous, chosen, force, limit))
    config.post_grad_custom_pre_pass = _CURRENT[-1]


def disable() -> None:
    """Stop substituting in graphs that are compiled from now on; compiled graphs stay."""
    if not _CURRENT:
        return
    from torch._inductor import config

    while _CURRENT:
        former = _CURRENT.pop()
        former.is_active = False
        # A pass that was wrapped around this one keeps it, inactive.
        if config.post_grad_custom_pre_pass is former:
            config.post_grad_custom_pre_pass = former.previous
