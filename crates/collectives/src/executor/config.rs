//! Collectives configuration.

use crate::op::MAX_RANKS;
use crate::run_error::RunError;

/// Configuration for [`Collectives`](super::Collectives), equal on all ranks but for the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectivesConfig {
    /// Chunks under way at a time, each on a separate channel.
    pub channels: u32,
    /// Staging memory per channel, in bytes: an upper limit on a chunk with its scratch. A multiple of 64.
    pub channel_bytes: u64,
    /// Vector size in bytes from which writes read the caller's input in place; `None`: 16 KiB where all routes are shm, else
    /// 128 KiB. Shorter inputs are copied to staging memory, which costs less than a registration.
    pub in_place_bytes: Option<u64>,
    /// Sums are added in rank order: the same bits on all ranks, in all runs, for all chunk and channel counts. Only
    /// `one-shot`, `two-shot`, `direct` and `direct-read` reductions then run; a call that names another algorithm is
    /// rejected.
    pub reproducible: bool,
    /// Threads that reduce a long vector, with the one that makes progress; may differ between ranks. 0: as many as
    /// this rank has cores ([`weft_fabric::ProcessorShare`]), at most 8. The others start at the first long reduction and end with
    /// the collectives. Results have the same bits for any number.
    pub reduction_threads: u32,
}

impl Default for CollectivesConfig {
    /// 4 channels with 1 MiB each; the routes decide which lengths are read in place; any summation order; one thread.
    fn default() -> CollectivesConfig {
        CollectivesConfig {
            channels: 4,
            channel_bytes: 1 << 20,
            in_place_bytes: None,
            reproducible: false,
            reduction_threads: 1,
        }
    }
}

/// Route properties over all rank pairs, equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupRoutes {
    /// All routes keep the arrival order.
    pub ordered: bool,
    /// All routes are shm.
    pub one_host: bool,
    /// Both ends on all routes map each other's memory.
    pub mapped: bool,
    /// Each rank can read the private memory on all others.
    pub reads: bool,
}

/// Vector size in bytes from which writes read the caller's input in place: over shm, where a registration is a table entry,
/// and over routes that may pin the pages.
const IN_PLACE_BYTES: u64 = 16 << 10;
const PINNED_BYTES: u64 = 128 << 10;
/// Maximum channel count.
const MAX_CHANNELS: u32 = 256;
/// Maximum thread count, and the maximum if the core count decides.
const MAX_THREADS: u32 = 64;
const MAX_CHOSEN_THREADS: usize = 8;
/// Minimum staging memory per channel, in bytes.
const MIN_CHANNEL_BYTES: u64 = 1024;
/// Lanes between two ranks on routes that do not keep order: a ring needs twice as many as ranks, a pipelined tree with
/// 8 chunks 16. Many ranks get fewer, as an engine's table holds the lanes for all peers.
const MIN_LANES: u32 = 8;
const MAX_LANES: u32 = 64;
const PIPELINE_LANES: u32 = 32;
/// Limit on ranks times lanes.
const ENDS: u32 = 4096;

impl CollectivesConfig {
    /// Checks the values for a group of `ranks` ranks.
    pub(super) fn check(&self, ranks: u32) -> Result<(), RunError> {
        let limit = |what, wanted: u64, limit: u64| {
            if wanted > limit { Err(RunError::TooLarge { what, wanted, limit }) } else { Ok(()) }
        };
        limit("ranks", ranks.into(), MAX_RANKS.into())?;
        limit("channels", self.channels.into(), MAX_CHANNELS.into())?;
        limit("reduction threads", self.reduction_threads.into(), MAX_THREADS.into())?;
        limit("bytes of a channel", self.channel_bytes, 1 << 40)?;
        if self.channels == 0 {
            let detail = "0: expected at least 1".to_owned();
            return Err(RunError::Invalid { what: "channels", detail });
        }
        if self.channel_bytes < MIN_CHANNEL_BYTES || !self.channel_bytes.is_multiple_of(64) {
            let bytes = self.channel_bytes;
            let detail = format!("{bytes}: expected a multiple of 64 from {MIN_CHANNEL_BYTES}");
            return Err(RunError::Invalid { what: "bytes of a channel", detail });
        }
        Ok(())
    }

    /// Vector size in bytes from which writes read the caller's input in place.
    pub(super) fn in_place_from(&self, routes: &GroupRoutes) -> u64 {
        let by_routes = if routes.one_host { IN_PLACE_BYTES } else { PINNED_BYTES };
        self.in_place_bytes.unwrap_or(by_routes)
    }

    /// Threads for a rank that has this many cores.
    pub(super) fn threads(&self, cores: usize) -> u32 {
        match self.reduction_threads {
            0 => cores.clamp(1, MAX_CHOSEN_THREADS) as u32,
            threads => threads,
        }
    }

    /// Lanes between two ranks on each channel: one if all routes keep order.
    pub(super) fn lanes(ranks: u32, ordered: bool) -> u16 {
        if ordered {
            return 1;
        }
        let most = (ENDS / ranks.max(1)).clamp(MIN_LANES, MAX_LANES);
        (2 * ranks).max(PIPELINE_LANES).min(most) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_read_in_place_from_lengths_by_the_routes_or_as_requested() {
        let [shm, others] =
            [true, false].map(|one_host| GroupRoutes { one_host, ..Default::default() });
        let from = |in_place_bytes, routes| {
            CollectivesConfig { in_place_bytes, ..Default::default() }.in_place_from(routes)
        };
        assert_eq!((from(None, &shm), from(None, &others)), (16 << 10, 128 << 10));
        assert_eq!((from(Some(7), &shm), from(Some(7), &others)), (7, 7));
    }

    #[test]
    fn threads_are_those_requested_or_the_cores_of_each_rank() {
        let of = |reduction_threads| CollectivesConfig { reduction_threads, ..Default::default() };
        assert_eq!(CollectivesConfig::default().threads(16), 1);
        assert_eq!(of(3).threads(1), 3);
        for (cores, threads) in [(0, 1), (1, 1), (4, 4), (8, 8), (200, 8)] {
            assert_eq!(of(0).threads(cores), threads);
        }
        assert!(of(64).check(2).is_ok());
        assert!(matches!(of(65).check(2), Err(RunError::TooLarge { limit: 64, .. })));
    }
}
