//! Frames and the numbers in them: a length of 32 bits, then that many bytes.
//!
//! The parser is fed whatever arrived. It keeps what it was given and never reserves memory
//! because a length said so.

use crate::bytes;

/// The largest payload of one control message: 64 MiB.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// The largest frame between ranks that trust each other.
pub(crate) const MAX_FRAME: usize = MAX_PAYLOAD + 1024;
/// The largest frame before the other side has proved that it belongs here.
pub(crate) const MAX_UNPROVED_FRAME: usize = 1024;

pub(crate) const LENGTH_BYTES: usize = 4;

/// Bytes that do not follow the protocol, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub &'static str);

/// Cuts a stream of bytes into frames.
#[derive(Debug)]
pub(crate) struct Parser {
    buffer: Vec<u8>,
    start: usize,
    limit: usize,
}

impl Parser {
    pub(crate) fn new(limit: usize) -> Parser {
        Parser { buffer: Vec::new(), start: 0, limit }
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

    /// Bytes that the next frame lacks, its length first: who reads no more leaves what follows it in
    /// the socket.
    pub(crate) fn lacking(&self) -> usize {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        let Some((length, body)) = rest.split_first_chunk::<LENGTH_BYTES>() else {
            return LENGTH_BYTES - rest.len();
        };
        (u32::from_le_bytes(*length) as usize).min(self.limit).saturating_sub(body.len())
    }

    /// The next whole frame, once all of it has arrived.
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
            // A large frame must not hold its memory for the rest of the connection.
            self.start = 0;
            self.buffer.clear();
            self.buffer.shrink_to(64 << 10);
        }
        Ok(Some(body))
    }
}

/// Builds a frame.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(kind: u8) -> Writer {
        Writer(vec![0, 0, 0, 0, kind])
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(self, value: u8) -> Writer {
        self.bytes(&[value])
    }

    pub(crate) fn u16(self, value: u16) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Writer {
        self.bytes(&value.to_le_bytes())
    }

    /// Text of at most 64 KiB; more is cut off.
    pub(crate) fn text(self, text: &str) -> Writer {
        let mut cut = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        self.u16(cut as u16).bytes(&text.as_bytes()[..cut])
    }

    /// The frame, its length filled in. Callers keep to [`MAX_FRAME`].
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = (self.0.len() - LENGTH_BYTES) as u32;
        self.0[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        self.0
    }
}

/// Reader of a frame's body: [`bytes::Reader`] with an error in place of `None`.
pub(crate) struct Reader<'a>(bytes::Reader<'a>);

const CUT_SHORT: Malformed = Malformed("a frame is cut short");

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8]) -> Reader<'a> {
        Reader(bytes::Reader::new(body))
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

    /// All bytes that are left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0.rest()
    }

    /// An error if bytes are left.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_at_end() { Ok(()) } else { Err(Malformed("a frame has bytes to spare")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            cuts in prop::collection::vec(1usize..200, 1..50),
        ) {
            let frames: Vec<u8> = bodies
                .iter()
                .flat_map(|body| Writer::new(9).bytes(body).finish())
                .collect();
            let mut parser = Parser::new(1024);
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
            let mut parser = Parser::new(MAX_UNPROVED_FRAME);
            parser.feed(&bytes);
            while let Ok(Some(frame)) = parser.next() {
                prop_assert!(frame.len() <= MAX_UNPROVED_FRAME);
            }
            prop_assert!(parser.buffer.capacity() <= 2 * bytes.len().max(8));
        }
    }

    #[test]
    fn a_long_length_is_refused_before_anything_follows_it() {
        let mut parser = Parser::new(MAX_UNPROVED_FRAME);
        parser.feed(&1025u32.to_le_bytes());
        assert!(parser.next().is_err());
    }
}
