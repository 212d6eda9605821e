//! Message header: the first bytes in the first slot.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | sequence number: messages that the sender began toward this rank before |
//! | 8..16 | tag |
//! | 16..24 | bytes of the message |
//! | 24..32 | reserved, zero |
//!
//! Numbers are little-endian. A header comes from memory that a peer writes; every field is checked.

use crate::run_error::RunError;
use weft_fabric::Rank;

/// Message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Messages that the sender began toward this rank before.
    pub sequence: u64,
    /// Tag.
    pub tag: u64,
    /// Message size in bytes.
    pub length: u64,
}

impl Header {
    /// Encoded header size in bytes.
    pub const BYTES: u64 = 32;
    /// Longest message, in bytes.
    pub const MAX_LENGTH: u64 = isize::MAX as u64;

    /// Encodes the header.
    pub fn encode(&self) -> [u8; Self::BYTES as usize] {
        let mut bytes = [0; Self::BYTES as usize];
        bytes[0..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Decodes the header for the message that `peer` sent with number `sequence`.
    ///
    /// # Errors
    /// [`RunError::Violation`] with the first invalid field.
    pub fn decode(
        bytes: &[u8; Self::BYTES as usize],
        peer: Rank,
        sequence: u64,
    ) -> Result<Header, RunError> {
        let words = bytes.as_chunks::<8>().0;
        let [seen, tag, length, reserved] = [0, 1, 2, 3].map(|at| u64::from_le_bytes(words[at]));
        let expect = |what, expected, seen| Err(RunError::Violation { peer, what, expected, seen });
        if seen != sequence {
            return expect("the sequence number of a message", sequence, seen);
        }
        if length > Self::MAX_LENGTH {
            return expect("the length of a message", Self::MAX_LENGTH, length);
        }
        if reserved != 0 {
            return expect("the reserved field of a message", 0, reserved);
        }
        Ok(Header { sequence, tag, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_is_decoded_as_it_was_encoded(
            sequence: u64,
            tag: u64,
            length in 0..=Header::MAX_LENGTH,
        ) {
            let header = Header { sequence, tag, length };
            prop_assert_eq!(Header::decode(&header.encode(), Rank(1), sequence).unwrap(), header);
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error_that_names_the_peer(
            bytes in prop::array::uniform32(any::<u8>()),
            sequence: u64,
            valid: bool,
        ) {
            let mut bytes = bytes;
            if valid {
                bytes[0..8].copy_from_slice(&sequence.to_le_bytes());
            }
            match Header::decode(&bytes, Rank(3), sequence) {
                Ok(header) => {
                    prop_assert!(header.length <= Header::MAX_LENGTH);
                    prop_assert_eq!(header.encode(), bytes);
                }
                Err(error) => prop_assert_eq!(error.offender(), Some(Rank(3))),
            }
        }
    }
}
