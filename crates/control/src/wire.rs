//! Frames: a 32-bit length, then that many bytes; fields are little-endian.
//!
//! The parser accepts any cut in the byte stream. The memory grows with the bytes received, never with a
//! claimed length.

use crate::bytes;

/// Largest payload in one control message: 64 MiB.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// Largest frame between authenticated ranks.
pub(crate) const MAX_FRAME: usize = MAX_PAYLOAD + 1024;
/// Largest frame before the other side is authenticated.
pub(crate) const MAX_UNAUTHENTICATED_FRAME: usize = 1024;

pub(crate) const LENGTH_BYTES: usize = 4;

/// Protocol violation, with a description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub &'static str);

/// Parses a byte stream into frames.
#[derive(Debug)]
pub(crate) struct FrameParser {
    buffer: Vec<u8>,
    start: usize,
    limit: usize,
}

impl FrameParser {
    pub(crate) fn new(limit: usize) -> FrameParser {
        FrameParser { buffer: Vec::new(), start: 0, limit }
    }

    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Missing bytes in the next frame (first in the length field). A reader that reads no more leaves the
    /// following bytes in the socket.
    pub(crate) fn missing_bytes(&self) -> usize {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((length, body)) = rest.split_first_chunk::<LENGTH_BYTES>() else {
            return LENGTH_BYTES - rest.len();
        };
        (u32::from_le_bytes(*length) as usize).min(self.limit).saturating_sub(body.len())
    }

    /// Next frame body, once complete.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, Malformed> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.limit {
            return Err(Malformed("a frame is longer than allowed"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let body = body.to_vec();
        self.start += LENGTH_BYTES + length;
        if self.start == self.buffer.len() {
            // A large frame must not hold memory while the connection lives.
            self.start = 0;
            self.buffer.clear();
            self.buffer.shrink_to(64 << 10);
        }
        Ok(Some(body))
    }
}

/// Frame builder.
pub(crate) struct FrameWriter(Vec<u8>);

impl FrameWriter {
    pub(crate) fn new(kind: u8) -> FrameWriter {
        FrameWriter(vec![0, 0, 0, 0, kind])
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> FrameWriter {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(self, value: u8) -> FrameWriter {
        self.bytes(&[value])
    }

    pub(crate) fn u16(self, value: u16) -> FrameWriter {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> FrameWriter {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> FrameWriter {
        self.bytes(&value.to_le_bytes())
    }

    /// Text up to 64 KiB; the rest is cut off.
    pub(crate) fn text(self, text: &str) -> FrameWriter {
        let mut cut = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        self.u16(cut as u16).bytes(&text.as_bytes()[..cut])
    }

    /// Frame with the length filled in. Callers respect [`MAX_FRAME`].
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = (self.0.len() - LENGTH_BYTES) as u32;
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// Frame body reader: [`bytes::Reader`] with an error in place of `None`.
pub(crate) struct FrameReader<'a>(bytes::Reader<'a>);

const CUT_SHORT: Malformed = Malformed("a frame is cut short");

impl<'a> FrameReader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> FrameReader<'a> {
        FrameReader(bytes::Reader::new(body))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.0.array().ok_or(CUT_SHORT)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.0.u8().ok_or(CUT_SHORT)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.0.u16().ok_or(CUT_SHORT)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.0.u32().ok_or(CUT_SHORT)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.0.u64().ok_or(CUT_SHORT)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        let length = usize::from(self.u16()?);
        let text = self.0.bytes(length).ok_or(CUT_SHORT)?;
        String::from_utf8(text.to_vec()).map_err(|_| Malformed("a text is not UTF-8"))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_at_end()
    }

    /// Remaining bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0.rest()
    }

    /// Error if bytes remain.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_at_end() { Ok(()) } else { Err(Malformed("a frame has surplus bytes")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_cut_of_the_stream(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            cuts in prop::collection::vec(1usize..200, 1..50),
        ) {
            let frames: Vec<u8> = bodies
                .iter()
                .flat_map(|body| FrameWriter::new(9).bytes(body).finish())
                .collect();
            let mut parser = FrameParser::new(1024);
            let mut seen = Vec::new();
            let mut rest = frames.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                parser.feed(now);
                rest = later;
                while let Some(frame) = parser.next().unwrap() {
                    seen.push(frame[1..].to_vec());
                }
            }
            prop_assert_eq!(seen, bodies);
        }

        #[test]
        fn garbage_neither_panics_nor_grows_beyond_what_was_fed(
            bytes in prop::collection::vec(any::<u8>(), 0..4000),
        ) {
            let mut parser = FrameParser::new(MAX_UNAUTHENTICATED_FRAME);
            parser.feed(&bytes);
            while let Ok(Some(frame)) = parser.next() {
                prop_assert!(frame.len() <= MAX_UNAUTHENTICATED_FRAME);
            }
            prop_assert!(parser.buffer.capacity() <= 2 * bytes.len().max(8));
        }
    }

    #[test]
    fn a_long_length_is_refused_before_anything_follows_it() {
        let mut parser = FrameParser::new(MAX_UNAUTHENTICATED_FRAME);
        parser.feed(&1025u32.to_le_bytes());
        assert!(parser.next().is_err());
    }
}
