//! Kernel source files, under `crates/moe/kernels`. They include the `weft_gpu` headers.

use weft_gpu::kernels::SourceFile;

/// The program with all entry points.
pub const PROGRAM: &str = "moe.cu";

/// Path and text for each file.
pub const SOURCES: &[SourceFile] = weft_gpu::sources![
    "moe.cu",
    "moe/arguments.cuh",
    "moe/combine.cuh",
    "moe/combine_bandwidth.cuh",
    "moe/copy.cuh",
    "moe/counts.cuh",
    "moe/dispatch.cuh",
    "moe/dispatch_bandwidth.cuh",
    "moe/elements.cuh",
    "moe/launch.cuh",
    "moe/owed.cuh",
    "moe/plan.cuh",
    "moe/shape.cuh",
    "moe/signals.cuh",
];
