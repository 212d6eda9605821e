//! Wire format: handshake, schema of tensors, layout of slots, headers. All integers are little-endian.
//!
//! - `hello.rs`: [`Hello`], each end's half of the handshake; [`Agreement`], its result
//! - `schema.rs`: [`Schema`], the tensors of queries and answers
//! - `layout.rs`: [`Layout`], positions of header and tensors in a slot
//! - `header.rs`: [`Header`], the first bytes of a slot
//! - `checksum.rs`: [`checksum`] of payloads
//! - `reader.rs`: bounded reads of fields

mod checksum;
mod header;
mod hello;
mod layout;
mod reader;
mod schema;

pub use checksum::{Checksum, checksum};
pub(crate) use header::Fields;
pub use header::{CANCELLED, Header};
pub use hello::{Agreement, Hello, Role, VERSION};
pub use layout::{ALIGNMENT, Layout};
pub use schema::{DataType, Dimension, Schema, Tensor};
