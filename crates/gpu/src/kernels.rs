//! The device headers of this crate, carried in the library so that a program needs no files beside it.
//!
//! A crate with kernels (a *family* of operators) lists its own files with [`sources!`](crate::sources);
//! every program may include these headers besides. A test of each such crate compares its list with
//! its folder `kernels`, so no file can be forgotten.

/// Path and text of a source file. The path is what `#include "path"` names in a kernel.
pub type File = (&'static str, &'static str);

/// Path and text of each file named, by its path under the folder `kernels` of the crate that calls this.
#[macro_export]
macro_rules! sources {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $path)))),*]
    };
}

/// The headers that every kernel may include.
pub const HEADERS: &[File] = crate::sources![
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
