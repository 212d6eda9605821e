//! Device configuration, and counts of rejected input.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::AtomicU64;

/// [`super::TcpDevice`] configuration. A pair uses the smaller `streams` and the smaller
/// `max_part_bytes`.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Address to listen on (default: loopback).
    pub bind: IpAddr,
    /// Address that peers dial, if it differs from `bind`.
    pub advertise: Option<IpAddr>,
    /// Connections to each peer, at least 1. Two let a route use two network paths and two NIC receive
    /// queues, and let one continue while the other recovers from a loss.
    pub streams: u32,
    /// Longest part in a write, at most 1 GiB. Shorter parts spread better over the streams, longer ones
    /// cost fewer system calls.
    pub max_part_bytes: u64,
    /// Bulk bytes queued toward one peer; bytes in both classes may reach twice this. An empty queue
    /// accepts any part.
    pub queue_bytes: u64,
    /// Bulk parts queued toward one peer, at least 1; parts in both classes, signals and credits
    /// included, may reach twice this.
    pub queue_parts: u32,
}

impl Default for TcpConfig {
    fn default() -> Self {
        TcpConfig {
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            advertise: None,
            streams: 2,
            max_part_bytes: 1 << 20,
            queue_bytes: 64 << 20,
            queue_parts: 4096,
        }
    }
}

/// Counts of rejected connections and frames.
#[derive(Debug, Default)]
pub struct TcpCounters {
    /// Connections closed because they did not prove membership in the group.
    pub refused_connections: AtomicU64,
    /// Frames that violated the protocol or addressed bytes outside a grant; each closed the connection.
    pub refused_frames: AtomicU64,
}
