//! What went where: bytes, writes and errors for each peer and each provider.

use crate::types::ProviderKind;
use weft_control::Rank;

/// Totals since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Payload bytes handed to a provider.
    pub bytes: u64,
    /// Parts handed to a provider, signals and credits included.
    pub parts: u64,
    /// Raises that arrived.
    pub arrivals: u64,
    /// Parts that failed.
    pub errors: u64,
}

/// One peer's totals and the provider of its route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatistics {
    /// The peer.
    pub rank: Rank,
    /// The provider that its route uses.
    pub provider: ProviderKind,
    /// Its totals.
    pub totals: Totals,
}

/// A snapshot of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// By peer, in rank order, without this rank.
    pub peers: Vec<PeerStatistics>,
    /// Requests under way.
    pub requests: u64,
    /// Arrivals dropped because their lane was not granted to the peer.
    pub refused_ungranted: u64,
    /// Arrivals dropped because their lane was of another generation.
    pub refused_stale: u64,
}

impl Statistics {
    /// Totals over all peers that one provider reaches.
    pub fn of_provider(&self, provider: ProviderKind) -> Totals {
        let peers = self.peers.iter().filter(|peer| peer.provider == provider);
        peers.fold(Totals::default(), |sum, peer| Totals {
            bytes: sum.bytes + peer.totals.bytes,
            parts: sum.parts + peer.totals.parts,
            arrivals: sum.arrivals + peer.totals.arrivals,
            errors: sum.errors + peer.totals.errors,
        })
    }
}
