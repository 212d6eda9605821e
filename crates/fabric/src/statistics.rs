//! Engine statistics: bytes, parts, arrivals and errors by peer and provider.

use crate::types::ProviderKind;
use weft_control::Rank;

/// Totals since the engine was constructed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficTotals {
    /// Payload bytes handed to a provider.
    pub bytes: u64,
    /// Parts handed to a provider, signals and credits included.
    pub parts: u64,
    /// Raises that arrived.
    pub arrivals: u64,
    /// Parts that failed.
    pub errors: u64,
}

/// One peer's totals and route provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerStatistics {
    /// The peer.
    pub rank: Rank,
    /// Provider that the route uses.
    pub provider: ProviderKind,
    /// Traffic totals.
    pub totals: TrafficTotals,
}

/// Engine statistics snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// By peer, in rank order, without this rank.
    pub peers: Vec<PeerStatistics>,
    /// Requests in flight.
    pub requests: u64,
    /// Dropped arrivals that named a lane not granted to the peer.
    pub refused_ungranted: u64,
    /// Dropped arrivals that named a lane from another generation.
    pub refused_stale: u64,
}

impl EngineStatistics {
    /// Totals over all peers that one provider reaches.
    pub fn of_provider(&self, provider: ProviderKind) -> TrafficTotals {
        let peers = self.peers.iter().filter(|peer| peer.provider == provider);
        peers.fold(TrafficTotals::default(), |sum, peer| TrafficTotals {
            bytes: sum.bytes + peer.totals.bytes,
            parts: sum.parts + peer.totals.parts,
            arrivals: sum.arrivals + peer.totals.arrivals,
            errors: sum.errors + peer.totals.errors,
        })
    }
}
