//! Memory areas of an all-to-all and arrays of the caller, by name.

use std::fmt;

/// Name of a memory area of a channel or of an array of the caller. Errors print it.
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
    /// Token slots: the private rows of each source, then the shared remainder.
    Tokens,
    /// Metadata, one record per slot.
    Metadata,
    /// Received tokens by local expert (contiguous layout only).
    Expert,
    /// Scales of the tokens by local expert, if tokens have scales (contiguous layout only).
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
