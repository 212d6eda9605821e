//! Integer arguments in Python calls: a type for each, so that an error names the argument that is out of range.

use crate::errors::raise;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

/// Defines a type for each argument: the type, the numbers that fit, the argument's name.
macro_rules! numbers {
    ($refuse:path: $($name:ident($whole:ty) = $argument:literal,)*) => {$(
        #[doc = concat!("The argument `", $argument, "`.")]
        #[derive(Clone, Copy)]
        pub struct $name(pub $whole);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name {
            type Error = PyErr;

            #[inline]
            fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<$name> {
                let number: PyResult<$whole> = given.extract();
                match number {
                    Ok(number) => Ok($name(number)),
                    Err(error) if error.is_instance_of::<PyOverflowError>(given.py()) => {
                        Err($refuse($argument, given, <$whole>::MAX as u64))
                    }
                    Err(_) => Err(mistyped($argument, given)),
                }
            }
        }
    )*};
}

numbers! { misfit:
    Block(u32) = "block",
    Channels(u32) = "channels",
    Count(u32) = "count",
    DestinationOffset(u64) = "destination_offset",
    DestinationStride(u64) = "destination_stride",
    Device(u32) = "device",
    Expected(u64) = "expected",
    Experts(u32) = "experts",
    Flow(u64) = "flow",
    Hidden(u32) = "hidden",
    Length(u64) = "length",
    MaxBytes(u64) = "max_bytes",
    MaxReceiveRows(u32) = "max_receive_rows",
    MaxTokens(u32) = "max_tokens",
    PadTo(u32) = "pad_to",
    PrivateRows(u32) = "private_rows",
    Rank(u32) = "rank",
    Round(u64) = "round",
    Seed(u64) = "seed",
    SourceOffset(u64) = "source_offset",
    SourceStride(u64) = "source_stride",
    TopK(u32) = "top_k",
    TraceLimit(usize) = "trace_limit",
    Window(u32) = "window",
    WorldSize(u32) = "world_size",
}

numbers! { unknown:
    Member(u32) = "member",
    Peer(u32) = "peer",
}

/// Error for an argument that is no integer.
#[cold]
fn mistyped(argument: &str, given: Borrowed<'_, '_, PyAny>) -> PyErr {
    let kind = given.get_type().name();
    let kind = kind.map_or_else(|_| "another type".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("{argument}: expected int, got {kind}"))
}

/// Error for a number outside the argument's range.
#[cold]
fn misfit(argument: &str, given: Borrowed<'_, '_, PyAny>, most: u64) -> PyErr {
    let message = format!(
        "{argument}={}: expected a whole number from 0 to {most}; pass one of those",
        shown(given)
    );
    raise(given.py(), "ConfigurationError", &message)
}

/// Error for a number that is no rank or member.
#[cold]
fn unknown(argument: &str, given: Borrowed<'_, '_, PyAny>, _most: u64) -> PyErr {
    let message = format!("{argument}={}: expected one of the group, from 0 on", shown(given));
    raise(given.py(), "UnknownError", &message)
}

fn shown(given: Borrowed<'_, '_, PyAny>) -> String {
    // Python does not print numbers with more than some thousand digits.
    given.str().map_or_else(|_| "(too many digits)".to_owned(), |text| text.to_string())
}
