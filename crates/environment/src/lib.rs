//! Environment variables, and the files that they name.
//!
//! A blank variable counts as not set. A variable with any other value is never treated as one that is not set: where
//! text is expected, bytes that are not UTF-8 are an [`Error`] that names the variable. A path or a secret may
//! have any bytes.
//!
//! ```
//! assert_eq!(weft_environment::text_of("WEFT_RANK", Some(" 1 ".into()))?.as_deref(), Some("1"));
//! # Ok::<(), weft_environment::Error>(())
//! ```
//!
//! - `variable.rs`: text, numbers, flags, paths and bytes in variables
//! - `file.rs`: regular files, read up to a limit

mod file;
mod variable;

pub use file::{open, read, read_text};
pub use variable::{Error, Result, bytes, bytes_of, flag, invalid, path, path_of, text, text_of};
