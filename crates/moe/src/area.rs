//! All-to-all memory areas and the caller's arrays, by name.

use std::fmt;

/// Memory area in a channel, or array from the caller. Errors print the name, for example `tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// The caller's tokens.
    Input,
    /// The header that this rank sends.
    SendHeader,
    /// Metadata records that this rank sends, ordered by destination.
    SendMetadata,
    /// Received headers, one per source.
    Headers,
    /// Token slots: each source's private rows, then the shared remainder.
    Tokens,
    /// Metadata, one record per slot.
    Metadata,
    /// Received tokens by local expert (contiguous layout only).
    Expert,
    /// Token scales by local expert, if tokens have scales (contiguous layout only).
    ExpertScales,
    /// The caller's expert outputs.
    ExpertOutput,
    /// Replies that this rank sends, ordered by source.
    SendReplies,
    /// Received replies for this rank's own tokens.
    Replies,
    /// The caller's combined result.
    Output,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Area::Input => "the input tokens",
            Area::SendHeader => "send header",
            Area::SendMetadata => "send metadata",
            Area::Headers => "headers",
            Area::Tokens => "tokens",
            Area::Metadata => "metadata",
            Area::Expert => "tokens by expert",
            Area::ExpertScales => "scales by expert",
            Area::ExpertOutput => "the expert output",
            Area::SendReplies => "send replies",
            Area::Replies => "replies",
            Area::Output => "the output",
        })
    }
}
