//! Algorithm of a call without one: by size, number of ranks, and whether all ranks share a host.

use crate::algorithm::{Algorithm, Options, names};
use crate::op::Collective;
use crate::run_error::RunError;

/// Longest vector, in bytes, that each rank sends whole to all others.
const ONE_SHOT_BYTES: u64 = 16 << 10;
/// Number of ranks up to which each may write to all others at once over a network.
const DIRECT_RANKS: u32 = 8;

/// Routes of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routes {
    /// All ranks are reached over shm.
    pub one_host: bool,
    /// Lanes between two ranks; 1 if routes keep the order of arrivals.
    pub lanes: u16,
}

/// Rejects an algorithm whose sums depend on the number of ranks and chunks.
pub(super) fn check_reproducible(
    collective: Collective,
    algorithm: Algorithm,
) -> Result<(), RunError> {
    if algorithm.sums_in_rank_order(collective) {
        return Ok(());
    }
    let all = Algorithm::of(collective).iter().copied();
    let ordered: Vec<_> = all.filter(|each| each.sums_in_rank_order(collective)).collect();
    let detail = format!("{algorithm}: expected one that adds in rank order ({})", names(&ordered));
    Err(RunError::Invalid { what: "algorithm", detail })
}

/// Algorithm for a vector of `bytes` bytes; one whose sums are added in rank order, if `reproducible`.
pub(super) fn select(
    collective: Collective,
    bytes: u64,
    ranks: u32,
    Routes { one_host, lanes }: Routes,
    reproducible: bool,
) -> (Algorithm, Options) {
    let few = one_host || ranks <= DIRECT_RANKS || reproducible && collective.reduces();
    let is_short = bytes * u64::from(ranks) <= ONE_SHOT_BYTES * 2;
    let long = if lanes == 1 || 2 * (ranks - 1) <= u32::from(lanes) {
        Algorithm::Ring
    } else {
        Algorithm::Circulant
    };
    let algorithm = match collective {
        Collective::AllReduce if is_short && few => Algorithm::OneShot,
        // In two shots a sum passes through staging memory, since it is sent on; in one it does not.
        Collective::AllReduce if ranks == 2 && one_host => Algorithm::OneShot,
        Collective::AllReduce if few => Algorithm::TwoShot,
        Collective::AllReduce if bytes < 1 << 20 => Algorithm::HalvingDoubling,
        Collective::AllReduce => long,
        Collective::ReduceScatter | Collective::AllGather if few => Algorithm::Direct,
        Collective::ReduceScatter | Collective::AllGather if bytes < 1 << 20 => {
            Algorithm::HalvingDoubling
        }
        Collective::ReduceScatter | Collective::AllGather => long,
        Collective::AllToAll if few => Algorithm::Direct,
        Collective::AllToAll => Algorithm::Pairwise,
        Collective::Broadcast { .. } => Algorithm::Binomial,
    };
    (algorithm, Options::default())
}
