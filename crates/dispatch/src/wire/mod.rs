//! Wire format: handshake, tensor schema, slot layout, headers. All integers are little-endian.
//!
//! - `hello.rs`: [`Hello`], each end's half of the handshake; [`Agreement`], the result
//! - `schema.rs`: [`Schema`], query and answer tensors
//! - `layout.rs`: [`Layout`], header and tensor positions in a slot
//! - `header.rs`: [`Header`], a slot's first bytes
//! - `checksum.rs`: [`checksum`] over payloads
//! - `reader.rs`: bounded field reads

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
