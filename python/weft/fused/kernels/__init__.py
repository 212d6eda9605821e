"""Fused-operator kernels in Triton; a file for each, and `rounds`, which all use.

Parameters that belong together are one NamedTuple, which Triton flattens, for example `Blocks` in
`weft.fused.kernels.gemm.gemm`:

- A group of constants is annotated `tl.constexpr`, so that the interpreter keeps its numbers. One
  constant is read as `rows: tl.constexpr = blocks.block_rows`: without the annotation, Triton makes
  a tensor from it.
- `do_not_specialize` applies to a whole group.
- Tensor descriptors stay parameters, since the launcher does not find them in a tuple.
- No field is named `values` or `type`, which Triton's tuples have, and no kernel parameter
  `options`, which the launcher has.
"""
