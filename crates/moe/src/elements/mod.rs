//! Element types for tokens, replies and results, and arithmetic on rows.
//!
//! - `dtype.rs`: float32, bfloat16 and float16; weighted row sums
//! - `float8.rs`: 8-bit floating-point formats
//! - `token_type.rs`: plain elements, or 8-bit floats with a scale for each block

pub(crate) mod dtype;
pub(crate) mod float8;
pub(crate) mod token_type;
