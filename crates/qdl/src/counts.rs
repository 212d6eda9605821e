//! Counts of a running test or node, read by other threads.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts that one thread adds to and others read. Each is exact; together they are no snapshot of one instant.
#[derive(Debug, Default)]
pub struct Counts {
    issued: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    peers: AtomicU64,
}

/// Values of [`Counts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Snapshot {
    /// Queries issued by LoadGen; on a node, queries that have arrived in batches.
    pub issued: u64,
    /// Queries answered.
    pub answered: u64,
    /// Queries that ended without an answer; on a node, those whose model failed.
    pub failed: u64,
    /// Nodes of a front end; front ends of a node.
    pub peers: u64,
}

impl Counts {
    /// Adds to the queries issued.
    pub fn add_issued(&self, queries: u64) {
        self.issued.fetch_add(queries, Ordering::Relaxed);
    }

    /// Adds to the queries answered.
    pub fn add_answered(&self, queries: u64) {
        self.answered.fetch_add(queries, Ordering::Relaxed);
    }

    /// Adds to the queries without an answer.
    pub fn add_failed(&self, queries: u64) {
        self.failed.fetch_add(queries, Ordering::Relaxed);
    }

    /// Sets the number of connected peers.
    pub fn set_peers(&self, peers: u64) {
        self.peers.store(peers, Ordering::Relaxed);
    }

    /// Removes a peer.
    pub fn remove_peer(&self) {
        self.peers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The present values.
    pub fn snapshot(&self) -> Snapshot {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Snapshot {
            issued: read(&self.issued),
            answered: read(&self.answered),
            failed: read(&self.failed),
            peers: read(&self.peers),
        }
    }
}
