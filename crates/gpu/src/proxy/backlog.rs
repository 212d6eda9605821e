//! Causes for which a proxy's commands wait.

use weft_control::Rank;

/// Causes for which accepted commands wait, for errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Parts that wait for a credit.
    pub without_credit: u32,
    /// Parts whose sources are read.
    pub in_flight: u32,
    /// Peer and word of such a part without a credit.
    pub first: Option<(Rank, u32)>,
}

impl std::fmt::Display for Backlog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Backlog { without_credit, in_flight, first } = self;
        match first {
            Some((peer, word)) => write!(
                f,
                "{without_credit} puts wait for credits, for example from {peer} (proxy word {word}), and {in_flight} \
                 are in flight"
            ),
            None => write!(f, "no put waits for a credit, and {in_flight} are in flight"),
        }
    }
}
