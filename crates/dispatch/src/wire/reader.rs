//! Reader for little-endian fields, with the field name in each error.

use crate::error::{Error, Result};

/// Bytes that are left to read.
pub(super) struct Reader<'a> {
    what: &'static str,
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reader for a message named `what` in errors.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Reader<'a> {
        Reader { what, bytes }
    }

    /// The next `count` bytes.
    pub fn take(&mut self, field: &'static str, count: usize) -> Result<&'a [u8]> {
        let Some((head, rest)) = self.bytes.split_at_checked(count) else {
            let detail = format!("{field}: expected {count} bytes, {} are left", self.bytes.len());
            return Err(self.malformed(detail));
        };
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(field, N)?);
        Ok(array)
    }

    pub fn u8(&mut self, field: &'static str) -> Result<u8> {
        Ok(self.array::<1>(field)?[0])
    }

    pub fn u16(&mut self, field: &'static str) -> Result<u16> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A text with the length in one byte.
    pub fn text(&mut self, field: &'static str) -> Result<String> {
        let length = self.u8(field)?;
        let bytes = self.take(field, length.into())?;
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|_| self.malformed(format!("{field}: expected UTF-8")))?;
        Ok(text.to_owned())
    }

    /// Ends the message.
    pub fn end(self) -> Result<()> {
        match self.bytes.len() {
            0 => Ok(()),
            left => Err(self.malformed(format!("{left} bytes behind the last field"))),
        }
    }

    pub fn malformed(&self, detail: String) -> Error {
        Error::Malformed { what: self.what, detail }
    }
}
