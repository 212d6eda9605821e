//! The kernels' sources, which lie under `crates/moe/kernels`. They include the headers of `weft_gpu`.

use weft_gpu::kernels::File;

/// The program that has all entry points.
pub const PROGRAM: &str = "moe.cu";

/// Path and text of each file.
pub const SOURCES: &[File] = weft_gpu::sources![
    "moe.cu",
    "moe/arguments.cuh",
    "moe/combine.cuh",
    "moe/combine_bandwidth.cuh",
    "moe/counts.cuh",
    "moe/dispatch.cuh",
    "moe/dispatch_bandwidth.cuh",
    "moe/elements.cuh",
    "moe/launch.cuh",
    "moe/plan.cuh",
    "moe/shape.cuh",
    "moe/signals.cuh",
];
