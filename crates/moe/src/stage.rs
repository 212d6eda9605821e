//! Round stage.

use std::fmt;

/// Round stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No round.
    Idle,
    /// Tokens are in flight.
    Dispatching,
    /// All tokens for this rank's experts have arrived.
    Dispatched,
    /// Some rank lacks room for the tokens sent to it, for example because `max_receive_rows` is
    /// small. Every rank has sent only headers and private rows.
    Refused,
    /// Replies are in flight.
    Combining,
    /// All replies have arrived.
    Combined,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Idle => "released",
            Stage::Dispatching => "dispatching",
            Stage::Dispatched => "dispatched",
            Stage::Refused => "refused",
            Stage::Combining => "combining",
            Stage::Combined => "combined",
        })
    }
}
