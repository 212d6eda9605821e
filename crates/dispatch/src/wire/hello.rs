//! Handshake: each end sends a hello, and both compute the same agreement from the two.

use super::layout::Layout;
use super::reader::Reader;
use super::schema::Schema;
use crate::error::{Error, Result};

/// Protocol version between a front end and an accelerator node.
pub const VERSION: u16 = 1;

/// First bytes in a hello.
const MAGIC: &[u8; 8] = b"weft-qd\0";
/// Capability bit: this end wants payloads with checksums.
const CHECKSUM: u32 = 1;

/// Role at a connection end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Sends queries.
    FrontEnd = 1,
    /// Sends answers.
    Accelerator = 2,
}

/// One end's half of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Sender's role.
    pub role: Role,
    /// Slots that the sender offers; the connection has the smaller number, for example 8 if the other end
    /// offers 32 and this one 8.
    pub slots: u32,
    /// The sender wants payload checksums; one end suffices.
    pub checksum: bool,
    /// Node name, up to 255 bytes.
    pub name: String,
    /// Tensors. A front end may leave them to the accelerator node.
    pub schema: Option<Schema>,
}

impl Hello {
    /// Maximum slots per connection.
    pub const MAX_SLOTS: u32 = 1 << 16;

    /// Hello bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.push(self.role as u8);
        bytes.extend(self.slots.to_le_bytes());
        bytes.extend((if self.checksum { CHECKSUM } else { 0 }).to_le_bytes());
        let mut length = self.name.len().min(255);
        while !self.name.is_char_boundary(length) {
            length -= 1;
        }
        bytes.push(length as u8);
        bytes.extend(&self.name.as_bytes()[..length]);
        bytes.push(u8::from(self.schema.is_some()));
        if let Some(schema) = &self.schema {
            schema.encode(&mut bytes);
        }
        bytes
    }

    /// Reads the other end's hello. Unknown capability bits are ignored, so that later versions may add some.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::Version`], [`Error::Schema`].
    pub fn decode(bytes: &[u8]) -> Result<Hello> {
        let mut reader = Reader::new("hello", bytes);
        if reader.take("magic number", MAGIC.len())? != MAGIC {
            let detail = "expected the magic number weft-qd: the peer runs another program".into();
            return Err(reader.malformed(detail));
        }
        let version = reader.u16("version")?;
        if version != VERSION {
            return Err(Error::Version { ours: VERSION, theirs: version });
        }
        let role = match reader.u8("role")? {
            1 => Role::FrontEnd,
            2 => Role::Accelerator,
            role => return Err(reader.malformed(format!("role {role}: expected 1 or 2"))),
        };
        let slots = reader.u32("number of slots")?;
        if slots == 0 || slots > Hello::MAX_SLOTS {
            let detail = format!("{slots} slots: expected 1 to {}", Hello::MAX_SLOTS);
            return Err(reader.malformed(detail));
        }
        let checksum = reader.u32("capabilities")? & CHECKSUM != 0;
        let name = reader.text("name")?;
        let schema = match reader.u8("presence of a schema")? {
            0 => None,
            1 => Some(Schema::decode(&mut reader)?),
            byte => {
                return Err(
                    reader.malformed(format!("presence of a schema {byte}: expected 0 or 1"))
                );
            }
        };
        reader.end()?;
        Ok(Hello { role, slots, checksum, name, schema })
    }
}

/// Handshake result; equal at both ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Connection slots.
    pub slots: u32,
    /// Payloads carry checksums.
    pub checksum: bool,
    /// Accelerator node name.
    pub name: String,
    /// Tensors.
    pub schema: Schema,
}

impl Agreement {
    /// The agreement between two hellos, in any order.
    ///
    /// # Errors
    /// [`Error::Disagreement`] for two ends with one role, for different schemas, and without a schema from the
    /// accelerator node.
    pub fn of(one: &Hello, other: &Hello) -> Result<Agreement> {
        let (front, accelerator) = match (one.role, other.role) {
            (Role::FrontEnd, Role::Accelerator) => (one, other),
            (Role::Accelerator, Role::FrontEnd) => (other, one),
            (role, _) => {
                let detail =
                    format!("both ends are {role:?}: connect a front end to an accelerator node");
                return Err(Error::Disagreement { detail });
            }
        };
        let Some(schema) = &accelerator.schema else {
            let detail = format!("node {} sent no schema", accelerator.name);
            return Err(Error::Disagreement { detail });
        };
        if let Some(wanted) = &front.schema
            && wanted != schema
        {
            let name = &accelerator.name;
            let detail = format!("the front end expects {wanted}, node {name} has {schema}");
            return Err(Error::Disagreement { detail });
        }
        schema.check()?;
        Ok(Agreement {
            slots: front.slots.min(accelerator.slots),
            checksum: front.checksum || accelerator.checksum,
            name: accelerator.name.clone(),
            schema: schema.clone(),
        })
    }

    /// True if answers may arrive in parts.
    pub fn has_stream(&self) -> bool {
        self.schema.outputs.iter().any(super::Tensor::has_tokens)
    }

    /// Query layout.
    pub fn queries(&self) -> Layout {
        Layout::new(&self.schema.inputs)
    }

    /// Answer layout.
    pub fn answers(&self) -> Layout {
        Layout::new(&self.schema.outputs)
    }
}
