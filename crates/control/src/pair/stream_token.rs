//! Token for a further connection, and the frame that carries it.

use crate::handshake::PAIR_MAGIC;
use crate::wire::FrameWriter;

/// Token by which a further connection to the listener belongs to a pair that is being formed.
pub type StreamToken = [u8; 16];

/// Kind of the only frame on a further connection.
const STREAM: u8 = 0x90;

/// Only frame on a further connection.
pub(crate) fn stream_frame(token: &StreamToken) -> Vec<u8> {
    FrameWriter::new(STREAM).bytes(&PAIR_MAGIC).bytes(token).finish()
}

/// Token in a further connection's frame; `None` for other frame kinds.
pub(crate) fn stream_token(frame: &[u8]) -> Option<std::result::Result<StreamToken, &'static str>> {
    let rest = frame.strip_prefix(&[STREAM])?;
    let token = rest.strip_prefix(&PAIR_MAGIC).and_then(|token| token.try_into().ok());
    Some(token.ok_or("a connection of a pair without a token"))
}
