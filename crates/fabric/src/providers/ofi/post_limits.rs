//! Limits for posts on a link.

use super::config::OfiConfig;
use super::objects::Domain;
use std::sync::Arc;

/// Maximum bytes in a write over shm that is copied inside the call: they fit into a command in shm's
/// queues (192 bytes in libfabric 2.5), so that no byte stays with the sender.
const MAX_INJECTED: usize = 128;

/// Limits for posts.
#[derive(Clone, Copy, Debug)]
pub struct PostLimits {
    /// Maximum bytes in a write that completes when the post returns; `None`: no write does.
    pub max_injected: Option<u64>,
    /// Maximum parts in flight toward one peer.
    pub max_parts: u32,
}

impl PostLimits {
    /// Limits for a link with this many slots for parts, toward this many peers.
    pub fn new(
        config: &OfiConfig,
        domains: &[Arc<Domain>],
        slots: usize,
        peers: usize,
    ) -> PostLimits {
        let (max_injected, max_parts) = (max_injected(config, domains), max_parts(slots, peers));
        PostLimits { max_injected, max_parts }
    }

    /// True for a length that the provider copies from host memory inside a call.
    #[inline(always)]
    pub fn injects(&self, length: u64) -> bool {
        self.max_injected.is_some_and(|most| length <= most)
    }
}

/// Maximum parts in flight toward one of `peers`, out of all `slots`. Libfabric 2.x shm keeps parts that
/// a peer has not accepted in the sender's queue: a peer that does not poll would fill it.
fn max_parts(slots: usize, peers: usize) -> u32 {
    let left_to_others = if peers > 1 { slots / 4 } else { 0 };
    (slots - left_to_others).max(1) as u32
}

/// See [`PostLimits::max_injected`]. Providers other than shm keep a copy, which a later poll sends.
fn max_injected(config: &OfiConfig, domains: &[Arc<Domain>]) -> Option<u64> {
    let sizes = domains.iter().map(|domain| domain.info().inject_size());
    let size = sizes.fold(MAX_INJECTED, usize::min) as u64;
    config.provider.is_single_host().then_some(size)
}
