//! Slot header: the first bytes in a query or an answer.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | turn: slot use number, from 1 |
//! | 4 | 4 | query: cancels sent for earlier slot uses, modulo 2^32; answer: status, 0 or an error code |
//! | 8 | 8 | payload checksum; 0 without |
//! | 16 | 4 | tensor count; 0 in an answer with an error, 1 in an answer part |
//! | 20 | 4 | 1 in an answer part, else 0 |
//! | 24 | 8 | zero |
//! | 32 | 8 each | bytes per tensor; token bytes so far in an answer part |

use super::layout::{FIXED_BYTES, Layout};
use super::reader::Reader;
use super::schema::Schema;
use crate::error::{Error, Result};

/// Answer status for a query that was cancelled before it started.
pub const CANCELLED: u32 = u32::MAX;

/// Header without the lengths, which are in another place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    pub turn: u32,
    pub word: u32,
    pub checksum: u64,
    pub is_part: bool,
    /// Bytes per tensor.
    pub lengths: &'a [u64],
}

impl Fields<'_> {
    /// Writes the header to a slot's first bytes.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`Layout::header_bytes`] for as many tensors.
    #[inline]
    pub fn encode(&self, bytes: &mut [u8]) {
        let (fixed, lengths) = bytes.split_at_mut(FIXED_BYTES as usize);
        let tensors = self.lengths.len() as u64 | u64::from(self.is_part) << 32;
        fixed[..8]
            .copy_from_slice(&(u64::from(self.turn) | u64::from(self.word) << 32).to_le_bytes());
        fixed[8..16].copy_from_slice(&self.checksum.to_le_bytes());
        fixed[16..24].copy_from_slice(&tensors.to_le_bytes());
        fixed[24..].fill(0);
        for (tensor, length) in self.lengths.iter().enumerate() {
            lengths[8 * tensor..8 * tensor + 8].copy_from_slice(&length.to_le_bytes());
        }
    }
}

/// Decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Slot use number, from 1, modulo 2^32.
    pub turn: u32,
    /// Cancels in a query, status in an answer.
    pub word: u32,
    /// Payload checksum.
    pub checksum: u64,
    /// Answer part: the one length counts the token bytes so far.
    pub is_part: bool,
    tensors: u8,
    lengths: [u64; Schema::MAX_TENSORS],
}

impl Header {
    /// Header with these lengths; at most [`Schema::MAX_TENSORS`], the rest is dropped.
    pub fn new(turn: u32, word: u32, lengths: impl IntoIterator<Item = u64>) -> Header {
        let lengths_of_none = [0; Schema::MAX_TENSORS];
        let (checksum, is_part, tensors) = (0, false, 0);
        let mut header =
            Header { turn, word, checksum, is_part, tensors, lengths: lengths_of_none };
        for (place, length) in header.lengths.iter_mut().zip(lengths) {
            *place = length;
            header.tensors += 1;
        }
        header
    }

    /// Header for an answer part, with this many token bytes so far.
    pub fn part(turn: u32, bytes: u64) -> Header {
        Header { is_part: true, ..Header::new(turn, 0, [bytes]) }
    }

    /// Bytes per tensor.
    pub fn lengths(&self) -> &[u64] {
        &self.lengths[..usize::from(self.tensors)]
    }

    /// Writes it to a slot's first bytes.
    ///
    /// # Panics
    /// If `bytes` is shorter than [`Layout::header_bytes`] for as many tensors.
    pub fn encode(&self, bytes: &mut [u8]) {
        self.fields().encode(bytes);
    }

    /// Header fields, with a reference to the lengths.
    #[inline]
    pub(crate) fn fields(&self) -> Fields<'_> {
        let Header { turn, word, checksum, is_part, .. } = *self;
        Fields { turn, word, checksum, is_part, lengths: self.lengths() }
    }

    /// [`Header::decode`] into this header.
    ///
    /// # Errors
    /// As [`Header::decode`]; the header is then undefined.
    #[inline]
    pub(crate) fn read(
        &mut self,
        bytes: &[u8],
        layout: &Layout,
        turn: u32,
        is_answer: bool,
    ) -> Result<()> {
        if !self.read_whole(bytes, layout, turn, is_answer) {
            *self = Header::decode(bytes, layout, turn, is_answer)?;
        }
        Ok(())
    }

    /// Reads a valid header for all tensors; false for a part, an error and an invalid header.
    #[inline]
    fn read_whole(&mut self, bytes: &[u8], layout: &Layout, turn: u32, is_answer: bool) -> bool {
        let Some((fixed, lengths)) = bytes.split_at_checked(FIXED_BYTES as usize) else {
            return false;
        };
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let (first, expected) = (word(&fixed[..8]), layout.tensors().len());
        self.turn = first as u32;
        self.word = (first >> 32) as u32;
        self.checksum = word(&fixed[8..16]);
        (self.is_part, self.tensors) = (false, expected as u8);
        if self.turn != turn
            || is_answer && self.word != 0
            || word(&fixed[16..24]) != expected as u64
            || word(&fixed[24..]) != 0
            || lengths.len() < 8 * expected
        {
            return false;
        }
        let places = self.lengths.iter_mut().zip(lengths.chunks_exact(8));
        places.take(expected).enumerate().all(|(tensor, (place, bytes))| {
            *place = word(bytes);
            layout.admits(tensor, *place)
        })
    }

    /// Reads a header in the expected slot use. An answer (`is_answer`) with an error has no tensors; it may be a part
    /// if the layout has tokens.
    ///
    /// # Errors
    /// [`Error::Malformed`], which names the field.
    pub fn decode(bytes: &[u8], layout: &Layout, turn: u32, is_answer: bool) -> Result<Header> {
        let mut reader = Reader::new("slot header", bytes);
        let seen = reader.u32("turn")?;
        if seen != turn {
            return Err(reader.malformed(format!("turn {seen}: expected {turn}")));
        }
        let word = reader.u32("cancels or status")?;
        let checksum = reader.u64("checksum")?;
        let tensors = reader.u32("number of tensors")?;
        let part = reader.u32("part")?;
        let stream = layout.stream().filter(|_| is_answer && part == 1);
        if part != 0 && stream.is_none() {
            return Err(
                reader.malformed(format!("part {part}: expected {}", part_or_whole(layout)))
            );
        }
        let expected = match (stream, is_answer && word != 0) {
            (Some(_), true) => {
                return Err(reader.malformed(format!("status {word} in a part: expected 0")));
            }
            (Some(_), false) => 1,
            (None, true) => 0,
            (None, false) => layout.tensors().len(),
        };
        if tensors as usize != expected {
            return Err(reader.malformed(format!("{tensors} tensors: expected {expected}")));
        }
        if reader.take("zero", 8)? != [0; 8] {
            return Err(reader.malformed("bytes 24 to 31: expected zero".into()));
        }
        let mut header = Header::new(turn, word, []);
        (header.checksum, header.is_part) = (checksum, stream.is_some());
        for place in 0..expected {
            let (length, tensor) = (reader.u64("tensor bytes")?, stream.unwrap_or(place));
            if !layout.admits(tensor, length) {
                let tensor = &layout.tensors()[tensor];
                return Err(reader.malformed(format!("{length} bytes of {tensor}")));
            }
            header.lengths[place] = length;
            header.tensors += 1;
        }
        Ok(header)
    }

    /// Compares the checksum of the payload that arrived.
    ///
    /// # Errors
    /// [`Error::Checksum`].
    pub fn check(&self, sum: u64) -> Result<()> {
        if self.checksum == sum {
            return Ok(());
        }
        Err(Error::Checksum { expected: self.checksum, seen: sum })
    }
}

fn part_or_whole(layout: &Layout) -> &'static str {
    if layout.stream().is_some() { "0 or 1 in an answer" } else { "0, without an output of tokens" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{DataType, Dimension, Tensor};
    use proptest::prelude::*;

    proptest! {
        /// Valid headers, and those with one damaged byte.
        #[test]
        fn a_header_is_read_as_it_is_decoded(
            lengths in (0u64..=8, Just(24u64)),
            (turn, word, checksum) in (0u32..3, 0u32..2, any::<u64>()),
            (place, damage) in (0usize..48, prop_oneof![Just(0u8), any::<u8>()]),
            is_answer in any::<bool>(),
        ) {
            let three = Tensor::new("three", DataType::I64, &[Dimension::Fixed(3)]);
            let tensors = [Tensor::bytes("bytes", 8), three];
            let layout = Layout::new(&tensors);
            let mut header = Header::new(turn, word, [lengths.0, lengths.1]);
            header.checksum = checksum;
            let mut bytes = vec![0; layout.header_bytes() as usize];
            header.encode(&mut bytes);
            bytes[place] ^= damage;
            let mut read = Header::new(7, 7, [7; 5]);
            let outcome = read.read(&bytes, &layout, 1, is_answer);
            match Header::decode(&bytes, &layout, 1, is_answer) {
                Ok(decoded) => {
                    prop_assert!(outcome.is_ok());
                    prop_assert_eq!(read.fields().lengths, decoded.lengths());
                    prop_assert_eq!((read.turn, read.word), (decoded.turn, decoded.word));
                    prop_assert_eq!((read.checksum, read.is_part), (decoded.checksum, decoded.is_part));
                }
                Err(error) => prop_assert_eq!(outcome.unwrap_err().to_string(), error.to_string()),
            }
        }
    }
}
