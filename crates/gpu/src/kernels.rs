//! This crate's device headers, embedded in the library.
//!
//! A crate with kernels (an operator *family*) lists its own files with [`sources!`](crate::sources);
//! every program may also include these headers. Each such crate tests the list against its `kernels`
//! folder.

/// Source file path and text; the path is as in `#include "path"` in a kernel.
pub type SourceFile = (&'static str, &'static str);

/// Path and text for each listed file, by its path in the calling crate's `kernels` folder.
#[macro_export]
macro_rules! sources {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $path)))),*]
    };
}

/// Headers available to all kernels.
pub const HEADERS: &[SourceFile] = crate::sources![
    "weft/barrier.cuh",
    "weft/command.cuh",
    "weft/device.cuh",
    "weft/order.cuh",
    "weft/pipe.cuh",
    "weft/proxy.cuh",
    "weft/ptx.cuh",
    "weft/put.cuh",
    "weft/table.cuh",
    "weft/team.cuh",
    "weft/wait.cuh",
];
