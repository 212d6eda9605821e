//! Device headers of this crate, embedded in the library.
//!
//! A crate with kernels (a *family* of operators) lists its own files with [`sources!`](crate::sources);
//! every program may also include these headers. A test of each such crate compares its list with its
//! folder `kernels`.

/// Path and text of a source file; the path is that of `#include "path"` in a kernel.
pub type SourceFile = (&'static str, &'static str);

/// Path and text of each listed file, by its path in the folder `kernels` of the calling crate.
#[macro_export]
macro_rules! sources {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $path)))),*]
    };
}

/// Headers available to all kernels.
pub const HEADERS: &[SourceFile] = crate::sources![
    "weft/barrier.cuh",
    "weft/device.cuh",
    "weft/order.cuh",
    "weft/pipe.cuh",
    "weft/ptx.cuh",
    "weft/put.cuh",
    "weft/table.cuh",
    "weft/team.cuh",
    "weft/wait.cuh",
];
