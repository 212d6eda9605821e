//! Run progress, as the caller receives it.

/// Callback with the share that is done, from 0 to 1, and the stage; false cancels the run.
pub type Progress<'a> = dyn FnMut(f64, &str) -> bool + 'a;
