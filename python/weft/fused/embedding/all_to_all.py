"""Embedding bags for tables on several ranks, fused with the all-to-all for pooled rows."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from weft.base.errors import ClosedError, ConfigurationError, OutOfRangeError, ShapeError
from weft.fused.embedding.bags import checked_bags
from weft.fused.embedding.gradient import (
    Ends,
    dense_gradients,
    factor_gradients,
    sparse_gradients,
)
from weft.fused.embedding.tables import ELEMENTS, Tables, default_tiling, local_batch
from weft.fused.kernels import embedding as kernels
from weft.fused.kernels.embedding import UNCOVERED
from weft.fused.kernels.rounds import Peers
from weft.fused.spaces import Agreed, Space, drop, launch, programs_of, space
from weft.fused.tracing import current_trace
from weft.gpu import symmetric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.fused.embedding.bags import Bags
    from weft.fused.embedding.tables import Tiling
    from weft.group.communicator import Communicator

__all__ = ["EmbeddingAllToAll"]

#: Output buffer alignment in bytes.
_LINE: Final = 128
#: Operator numbers, in the order in which all ranks make them.
_NUMBERS: Final[weakref.WeakKeyDictionary[Communicator, itertools.count[int]]] = (
    weakref.WeakKeyDictionary()
)


class EmbeddingAllToAll:
    """Embedding-bag pooling with all-to-all: each rank has tables, and gets its samples.

    All ranks make the object together, and call it in the same order with the same global batch. A
    rank pools the global batch's bags for its tables. Its output has the samples
    `torch.tensor_split(batch, ranks)[rank]` as rows, and as columns all tables on all ranks in rank
    order: `[local batch, columns]`.

    The output is an operator-owned buffer that a later call overwrites: the call after
    `buffers - 1` further calls. With `copy=True` it is a separate tensor.

    Source: https://arxiv.org/abs/2305.06942, with embedding bags and all-to-all as a case.

    Args:
        weights: this rank's tables, `[rows, columns]` each; columns are a multiple of 4 up to 1024.
            They may be empty on some ranks. float32, float16 or bfloat16, the same for all tables
            on a rank; sums are in float32.
        modes: "sum", "mean" or "weighted_sum" (by `per_sample_weights`), for all tables or for
            each.
        communicator: group with all table ranks; by default the only one that is open.
        out_dtype: output dtype, equal on all ranks; by default the tables' dtype.
        buffers: number of outputs that are valid at a time.
        sparse: table gradients are sparse tensors, as in `torch.nn.EmbeddingBag`.
        device: output device if `weights` is empty; by default the current GPU.
        num_sms: maximum number of SMs to use; by default all.
        tiling: task sizes; by default `default_tiling` for each call.

    Raises:
        ShapeError: if a table has an unsuitable shape, dtype or address.
        ConfigurationError: if an argument is invalid, no rank has tables, or tables are on the CPU
            without Triton's interpreter.
        ConfigurationMismatchError: if ranks have outputs of different dtypes.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        modes: str | Sequence[str] = "sum",
        *,
        communicator: Communicator | None = None,
        out_dtype: torch.dtype | None = None,
        buffers: int = 2,
        sparse: bool = False,
        device: torch.device | str | None = None,
        num_sms: int | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        if buffers < 1:
            raise ConfigurationError(f"buffers is {buffers}: expected at least 1")
        if num_sms is not None and num_sms < 1:
            raise ConfigurationError(f"num_sms is {num_sms}: expected at least 1")
        if tiling is not None:
            tiling.check()
        group = symmetric.only_open() if communicator is None else communicator
        self.weights: list[torch.Tensor] = list(weights)
        self.tables = Tables(self.weights, modes, group, out_dtype, device)
        _check_device(self.tables.device)
        self.rank, self.ranks = group.rank, group.world_size
        self.buffers, self.sparse, self.tiling = buffers, sparse, tiling
        number = next(_NUMBERS.setdefault(group, itertools.count()))
        self._name = f"embedding_all_to_all[{number}]"
        self._group = weakref.ref(group)
        self._calls = 0
        #: The last exchange's space.
        self._last: Space | None = None
        self._is_closed = False
        self._num_sms = num_sms
        on = self.tables.device
        self._errors = torch.zeros(1, dtype=torch.int32, device=on)
        layout = self.tables.layout
        self._firsts = torch.tensor(layout.firsts, dtype=torch.int64).to(on)
        # An anchor, so that backward runs even on a rank without trained tables: it has gradients
        # to send.
        self._anchor = torch.zeros(0, device=on, requires_grad=layout.is_trained)

    def __call__(
        self,
        indices: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        batch: int | None = None,
        out: torch.Tensor | None = None,
        copy: bool | None = None,
    ) -> torch.Tensor:
        """Pool the global batch's bags, and exchange them.

        Args:
            indices: int32 or int64 `[total]`, for all tables on this rank, one after the other. An
                index outside its table adds zero to the bag; `check` raises an error for it.
            offsets: int32 or int64 `[tables * batch + 1]`: the first index in each bag, by table,
                and the number of indices. `concatenate_bags` makes both from lists.
            per_sample_weights: `[total]`, row factors for tables with mode "weighted_sum", for
                which it is required; it may require a gradient.
            batch: global batch, equal on all ranks; required on a rank without tables.
            out: `[local batch, columns]`, contiguous, to which the output is copied.
            copy: return a tensor that later calls do not change; by default only where gradients
                are recorded.

        Returns:
            `[local batch, columns]`.

        Raises:
            ShapeError: if a tensor has an unsuitable shape, dtype or device.
            ConfigurationError: if `per_sample_weights` lacks or is not used, or requires a gradient
                and no table does.
            WaitTimeoutError, PeerLostError: an earlier call failed.
        """
        bags = checked_bags(self.tables, indices, offsets, per_sample_weights, batch)
        return self.call(self.weights, bags, out, copy)

    def pool(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pool by the same kernel without an exchange: `[batch, columns on this rank]`.

        A rank's samples are adjacent rows. Gradients are not recorded. The call is local.
        """
        bags = checked_bags(self.tables, indices, offsets, per_sample_weights, None)
        outputs = torch.empty(
            (bags.batch, self.tables.columns),
            dtype=self.tables.layout.dtype,
            device=self.tables.device,
        )
        if outputs.numel() > 0:
            self._launch(self.weights, bags, outputs, None)
        return outputs

    def by_table(self, output: torch.Tensor) -> torch.Tensor:
        """An output as `[local batch, tables, columns]`: a view, if all tables have one width.

        Raises:
            ShapeError: if tables have different numbers of columns.
        """
        columns = self.tables.layout.all_columns
        if len(set(columns)) != 1:
            raise ShapeError(
                f"tables have {sorted(set(columns))} columns: expected one number; use split()"
            )
        return output.view(len(output), len(columns), columns[0])

    def split(self, output: torch.Tensor) -> list[torch.Tensor]:
        """Each table's columns in an output: views `[local batch, columns]`."""
        return list(output.split(self.tables.layout.all_columns, dim=1))

    def check(self) -> None:
        """Wait for the calls so far; raise if one had wrong indices or offsets, or failed.

        Index and offset errors are raised once; the outputs lack the rows for such indices.

        Raises:
            OutOfRangeError: names a table, or reports offsets that do not cover all indices.
            ConfigurationMismatchError: if ranks passed different batches.
            WaitTimeoutError, PeerLostError: a call so far failed.
        """
        number = int(self._errors.item())
        if self._last is not None:
            self._last.check()
        if number:
            self._errors.zero_()
        if number == UNCOVERED:
            raise OutOfRangeError(
                "offsets do not begin with 0, or do not end with the number of indices, so that "
                "indices belong to no bag: expected the first index of each bag, by table, and at "
                "the end the number of indices; append it (include_last_offset)"
            )
        if number:
            raise OutOfRangeError(
                f"an index of table {number - 1} is outside of its "
                f"{self.tables.shapes[number - 1][0]} rows, or its offsets descend or exceed the "
                "number of indices; correct the indices"
            )

    def close(self) -> None:
        """Free the operator's symmetric memory; all ranks call it, and replay no graphs with it.

        Outputs without copies are kept as long as the tensors are. It waits for the device.
        """
        group = self._group()
        if self._is_closed or group is None:
            return
        self._is_closed = True
        if self.tables.device.type == "cuda":
            torch.cuda.synchronize(self.tables.device)
        self._last = None
        drop(self._name, group)
        drop(f"{self._name} gradients", group)

    def call(
        self,
        weights: Sequence[torch.Tensor],
        bags: Bags,
        out: torch.Tensor | None,
        copy: bool | None,
    ) -> torch.Tensor:
        """Same as `__call__`, with tables in the operator's shapes, and with checked bags."""
        is_trained = self.tables.layout.is_trained and torch.is_grad_enabled()
        if out is not None:
            self._check_out(out, bags.batch, is_trained)
        if is_trained:
            copy = True if copy is None else copy
            made: torch.Tensor = _Pooling.apply(
                self, bags, copy, self._anchor, bags.factors, *weights
            )
            return made
        output = self._exchange(weights, bags)
        if out is not None:
            return out.copy_(output)
        return output.clone() if copy else output

    def _exchange(self, weights: Sequence[torch.Tensor], bags: Bags) -> torch.Tensor:
        """Run the fused kernel; the output is in the next buffer."""
        layout = self.tables.layout
        most = -(-bags.batch // self.ranks)
        needed = -(-most * layout.width * layout.dtype.itemsize // _LINE) * _LINE
        own = self._space(self._name, self.buffers * needed)
        own.enter()
        self._last = own
        size = own.data.numel() // self.buffers // _LINE * _LINE
        first = self._calls % self.buffers * size
        rows = local_batch(bags.batch, self.rank, self.ranks)[1]
        used = rows * layout.width * layout.dtype.itemsize
        output = own.data[first : first + used].view(layout.dtype).view(rows, layout.width)
        self._launch(weights, bags, own.data[first : first + size].view(layout.dtype), own)
        # Counted after everything that may raise only on this rank.
        self._calls += 1
        return output

    def _launch(
        self,
        weights: Sequence[torch.Tensor],
        bags: Bags,
        outputs: torch.Tensor,
        own: Space | None,
    ) -> None:
        tables, layout = self.tables, self.tables.layout
        tiling = self._tiling(bags)
        pieces = tables.pieces(weights, tiling.columns)
        most = -(-bags.batch // self.ranks)
        tasks = -(-most // tiling.bags) * len(pieces) * self.ranks
        rows = local_batch(bags.batch, self.rank, self.ranks)[1]
        factors = bags.factors
        memory = self._firsts, self._errors, self._errors
        agreement, digest = Agreed(None, 0)
        if own is not None:
            memory = own.context, own.words, own.state
            agreement, digest = own.agreed(f"weft.fused.{self._name}(batch={bags.batch})")
        sample_weights = bags.offsets if factors is None else factors
        given = kernels.Bags(pieces, bags.indices, bags.offsets, sample_weights)
        launch(
            kernels.pool,
            max(1, min(self._programs(tiling), tasks)),
            outputs.device,
            outputs,
            Peers(*memory, agreement),
            self._errors,
            given,
            counts=kernels.Counts(
                rank=self.rank,
                batch=bags.batch,
                total=bags.indices.numel(),
                pieces=len(pieces),
                elements=rows * layout.width,
                own_last=tiling.own_last,
                tables=len(tables.shapes),
                digest=digest,
            ),
            strides=(tables.columns if own is None else layout.width) // layout.align,
            modes=kernels.Modes(
                ranks=self.ranks,
                element=ELEMENTS[_given(tables.dtype)],
                align=layout.align,
                weighted=factors is not None,
                fused=own is not None,
                bags=tiling.bags,
                columns=tiling.columns,
                unroll=tiling.unroll,
            ),
            num_warps=tiling.num_warps,
            maxnreg=tiling.registers,
            trace=current_trace(outputs.device),
        )

    def _return(self, gradients: torch.Tensor, bags: Bags) -> torch.Tensor:
        """Pooled rows' gradients for this rank's tables, `[batch, columns]`."""
        tables, layout = self.tables, self.tables.layout
        tiling = self._tiling(bags)
        widest = max(map(sum, layout.columns))
        own = self._space(
            f"{self._name} gradients", max(1, bags.batch) * widest * layout.dtype.itemsize
        )
        own.enter()
        inbox = own.data.view(layout.dtype)
        elements = bags.batch * tables.columns
        agreement, digest = own.agreed(f"weft.fused.{self._name} gradients(batch={bags.batch})")
        launch(
            kernels.return_gradients,
            self._programs(tiling),
            tables.device,
            inbox,
            gradients.contiguous(),
            Peers(own.context, own.words, own.state, agreement),
            self._firsts,
            kernels.GradientCounts(self.rank, bags.batch, elements, digest),
            layout.width // layout.align,
            kernels.GradientModes(
                ranks=self.ranks,
                align=layout.align,
                rows=tiling.gradient_rows,
                columns=tiling.gradient_columns,
            ),
            num_warps=tiling.num_warps,
        )
        return inbox[:elements].view(bags.batch, tables.columns)

    def _gradients(
        self, bags: Bags, returned: torch.Tensor, ends: Ends | None
    ) -> list[torch.Tensor]:
        """Table gradients from the pooled rows' gradients; sparse ones with `ends`."""
        if ends is not None:
            return sparse_gradients(self.tables, bags, returned, ends)
        return dense_gradients(self.tables, bags, returned, self._tiling(bags))

    def _space(self, name: str, data: int) -> Space:
        group = self._group()
        if group is None or self._is_closed:
            raise ClosedError("the operator or its communicator was closed: make it anew")
        return space(
            name,
            self.tables.device,
            group,
            words=2 * self.ranks,
            data=max(data, _LINE * self.buffers),
            state=kernels.COUNTERS + self.ranks,
        )

    def _tiling(self, bags: Bags) -> Tiling:
        if self.tiling is not None:
            return self.tiling
        count = max(1, bags.batch * len(self.tables.shapes))
        itemsize = _given(self.tables.dtype).itemsize
        return default_tiling(self.tables.mean_columns, itemsize, bags.indices.numel() / count)

    def _programs(self, tiling: Tiling) -> int:
        device = self.tables.device
        every = programs_of(device)
        if device.type == "cpu":
            return every
        return tiling.programs * min(every, self._num_sms or every)

    def _check_out(self, out: torch.Tensor, batch: int, is_trained: bool) -> None:
        layout = self.tables.layout
        shape = (local_batch(batch, self.rank, self.ranks)[1], layout.width)
        if tuple(out.shape) != shape or out.dtype != layout.dtype or not out.is_contiguous():
            raise ShapeError(
                f"out is {out.dtype} of shape {tuple(out.shape)}: expected contiguous "
                f"{layout.dtype} of shape {shape}"
            )
        if is_trained:
            raise ConfigurationError("out is given while gradients are recorded: leave one out")


class _Pooling(torch.autograd.Function):  # type: ignore[misc]
    """The exchange with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: EmbeddingAllToAll,
        bags: Bags,
        copy: bool,
        anchor: torch.Tensor,
        factors: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """Pooled rows."""
        ctx.operator, ctx.bags = operator, bags
        if ctx.needs_input_grad[4]:
            ctx.save_for_backward(*weights)
        # Done now, so that the backward pass does not wait for all work before it.
        is_sparse = operator.sparse and any(ctx.needs_input_grad[5:])
        ctx.ends = Ends(bags, len(operator.tables.shapes)) if is_sparse else None
        output = operator._exchange(weights, bags)
        return output.clone() if copy else output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[Any, ...]:
        """Gradients for the sample weights and the tables."""
        operator, bags = ctx.operator, ctx.bags
        returned = operator._return(gradients, bags)
        _, _, _, _, needs_factors, *needs = ctx.needs_input_grad
        factors = None
        if needs_factors:
            factors = factor_gradients(operator.tables, bags, returned, ctx.saved_tensors)
        made: list[Any] = [None] * len(needs)
        if any(needs):
            made = operator._gradients(bags, returned, ctx.ends)
        own = (each if is_needed else None for each, is_needed in zip(made, needs, strict=True))
        return (None, None, None, None, factors, *own)


def _check_device(device: torch.device) -> None:
    """Raise unless kernels run on a device."""
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ConfigurationError(
            "tables are on the CPU: expected a GPU, or TRITON_INTERPRET=1 in the environment "
            "before the first import of triton"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"tables are on {device}: expected a GPU")


def _given(dtype: torch.dtype | None) -> torch.dtype:
    assert dtype is not None
    return dtype
