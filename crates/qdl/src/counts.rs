//! Counts in a running test or node, read by other threads.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Most departures that are kept.
const MAX_DEPARTURES: usize = 256;

/// Counts that one thread adds to and others read. Each is exact; together they are no consistent snapshot.
#[derive(Debug, Default)]
pub struct Counts {
    issued: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    peers: AtomicU64,
    departures: Mutex<Vec<Departure>>,
}

/// End of a peer connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Departure {
    /// Node name; `front end` on a node.
    pub name: String,
    /// Cause, in a line.
    pub cause: String,
    /// False for a peer that left in order.
    pub lost: bool,
}

/// Values in [`Counts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Snapshot {
    /// Queries issued by LoadGen; on a node, queries that have arrived in batches.
    pub issued: u64,
    /// Queries answered.
    pub answered: u64,
    /// Queries that ended without an answer; on a node, those whose model failed.
    pub failed: u64,
    /// Connected nodes on a front end; connected front ends on a node.
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

    /// Sets how many peers are connected.
    pub fn set_peers(&self, peers: u64) {
        self.peers.store(peers, Ordering::Relaxed);
    }

    /// Removes a peer.
    pub fn remove_peer(&self) {
        self.peers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds a connection end; only the first 256 are kept.
    pub fn add_departure(&self, departure: Departure) {
        let mut departures = self.departures.lock().unwrap_or_else(PoisonError::into_inner);
        if departures.len() < MAX_DEPARTURES {
            departures.push(departure);
        }
    }

    /// Connection ends, in order.
    pub fn departures(&self) -> Vec<Departure> {
        self.departures.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
