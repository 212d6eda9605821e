//! Default algorithm selection: by measured times, otherwise by size, rank count, and whether all ranks share a host.

use crate::algorithm::{Algorithm, Options, names};
use crate::op::Collective;
use crate::placement::Placement;
use crate::run_error::RunError;
use crate::tune::Costs;
use crate::tuning::{Prediction, Tuning};
use std::fmt::Write as _;

/// Log target for selection records, for `WEFT_LOG=tuner`.
const LOG: &str = "tuner";
/// Longest vector, in bytes, that each rank sends whole to all others.
const ONE_SHOT_BYTES: u64 = 16 << 10;
/// Shortest vectors, in bytes, that are read in place: copies by the kernel take longer than two by the CPU until these
/// leave the CPU caches. Sums never are, since writes copy the inputs once too; nor are broadcasts, whose times are
/// alike.
const READ_BYTES: u64 = 2 << 20;
/// Maximum rank count for which each rank may write to all others at once over a network.
const DIRECT_RANKS: u32 = 8;

/// Group routes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routes {
    /// All ranks are reached over shm.
    pub one_host: bool,
    /// True if each rank can read the memory on all others.
    pub reads: bool,
    /// Lanes between two ranks; 1 if routes keep the arrival order.
    pub lanes: u16,
}

/// Collective, and vector bytes.
type Shape = (Collective, u64);

/// Selection for one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selector {
    pub routes: Routes,
    pub ranks: u32,
    /// Sums are added in rank order.
    pub reproducible: bool,
    /// True for a sum over 8-bit or 16-bit floats: writes have twice or four times the bytes, reads in place do
    /// not.
    pub is_rounded: bool,
    /// The ranks have an order for HDRM.
    pub has_hdrm: bool,
}

impl Selector {
    /// Predicted times for the algorithms that may be selected, the one to select first, and the source: network
    /// estimates for an all-reduce with an HDRM placement, otherwise measurements; none without either.
    pub fn predictions(
        &self,
        (collective, bytes): Shape,
        tuning: Option<&Tuning>,
        placement: Option<&mut Placement>,
    ) -> (Vec<Prediction>, &'static str) {
        if let Some(placement) = placement
            && collective == Collective::AllReduce
            && !self.reproducible
        {
            let costs = tuning.map_or_else(Costs::default, |tuning| tuning.constants.costs());
            let estimates = placement.estimates(bytes, &costs);
            if !estimates.is_empty() {
                return (estimates, "estimated on the network");
            }
        }
        let measured = tuning.is_some_and(|tuning| tuning.is_measured(collective));
        let source = if measured { "measured" } else { "estimated" };
        let predicted = tuning.map(|tuning| tuning.predictions(collective, self.ranks, bytes));
        let mut all = predicted.unwrap_or_default();
        all.retain(|one| !self.reproducible || one.algorithm.sums_in_rank_order(collective));
        (all, source)
    }

    /// Algorithm by fixed rules, without measurements.
    pub fn by_rule(&self, (collective, bytes): Shape) -> (Algorithm, Options) {
        let Routes { one_host, lanes, reads } = self.routes;
        let ranks = self.ranks;
        let few = one_host || ranks <= DIRECT_RANKS || self.reproducible && collective.reduces();
        let is_short = bytes * u64::from(ranks) <= ONE_SHOT_BYTES * 2;
        let long = if lanes == 1 || 2 * (ranks - 1) <= u32::from(lanes) {
            Algorithm::Ring
        } else {
            Algorithm::Circulant
        };
        let algorithm = match collective {
            _ if reads && is_read(collective, ranks, bytes) => Algorithm::DirectRead,
            _ if reads && self.is_rounded && bytes >= READ_BYTES => Algorithm::DirectRead,
            Collective::AllReduce if is_short && few => Algorithm::OneShot,
            // In two shots a sum passes through staging memory, since it is sent on; in one it does not.
            Collective::AllReduce if ranks == 2 && one_host => Algorithm::OneShot,
            Collective::AllReduce if few => Algorithm::TwoShot,
            // A ring sends as many bytes as HDRM without folded ranks, in more messages.
            Collective::AllReduce
                if self.has_hdrm && (bytes < 1 << 20 || ranks.is_power_of_two()) =>
            {
                Algorithm::Hdrm
            }
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

    /// Logs a choice by predicted times: the first one, and the others beside it.
    pub fn log_prediction(
        &self,
        (collective, bytes): Shape,
        predictions: &[Prediction],
        source: &str,
    ) {
        if !log::log_enabled!(target: LOG, log::Level::Debug) {
            return;
        }
        let Some((best, others)) = predictions.split_first() else { return };
        let mut text = String::new();
        for (index, other) in others.iter().enumerate() {
            let before = if index == 0 { "; " } else { ", " };
            let _ = write!(text, "{before}{other} {:.2}x", other.seconds / best.seconds);
        }
        let order = if self.reproducible && collective.reduces() { ", in rank order" } else { "" };
        log::debug!(
            target: LOG,
            "{collective} of {bytes} bytes, {} ranks: {best}, {source} {:.1} us{order}{text}",
            self.ranks,
            best.seconds * 1e6
        );
    }

    /// Logs a choice by rules.
    pub fn log_rule(
        &self,
        (collective, bytes): Shape,
        algorithm: Algorithm,
        has_measurements: bool,
    ) {
        let why = match has_measurements {
            true => "without measured algorithms that fit",
            false => "without measurements; `weft tune` makes them",
        };
        let routes = if self.routes.one_host { "one host" } else { "a network" };
        log::debug!(
            target: LOG,
            "{collective} of {bytes} bytes, {} ranks: {algorithm}, by the rules for {routes}, {why}",
            self.ranks
        );
    }
}

/// True for vectors that are read in place where routes allow it.
fn is_read(collective: Collective, ranks: u32, bytes: u64) -> bool {
    matches!(collective, Collective::AllGather | Collective::AllToAll)
        && ranks > 1
        && bytes >= READ_BYTES
}

/// Rejects an algorithm whose sums depend on rank and chunk counts.
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
