//! Algorithms by name, with options.

use crate::error::Error;
use crate::op::Collective;
use std::fmt;
use std::str::FromStr;

/// Collective algorithm, by name in files and options: for example `ring`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `ring`: neighbours only.
    Ring,
    /// `tree`: a double binary tree, pipelined.
    Tree,
    /// `hd`: recursive halving, doubling, or both.
    HalvingDoubling,
    /// `hdrm`: all-reduce by halving-doubling, for a rank placement on a BiGraph.
    Hdrm,
    /// `circulant`: partners at distances `ceil(N / 2^k)`; no folded ranks.
    Circulant,
    /// `one-shot`: each rank sends the whole vector to all others.
    OneShot,
    /// `two-shot`: direct reduce-scatter, direct all-gather.
    TwoShot,
    /// `direct`: each rank writes to all others at once.
    Direct,
    /// `direct-read`: each rank reads all peers' memory in place, on routes that allow it; all-reduce in two shots.
    DirectRead,
    /// `hierarchical`: direct within nodes, HDRM on rails between them.
    Hierarchical,
    /// `pairwise`: each rank exchanges with all others, one after another.
    Pairwise,
    /// `binomial`: a binomial tree.
    Binomial,
    /// `chain`: all ranks in sequence, pipelined.
    Chain,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: &[Algorithm] = &[
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::HalvingDoubling,
        Algorithm::Hdrm,
        Algorithm::Circulant,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::Direct,
        Algorithm::DirectRead,
        Algorithm::Hierarchical,
        Algorithm::Pairwise,
        Algorithm::Binomial,
        Algorithm::Chain,
    ];

    /// Name.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::HalvingDoubling => "hd",
            Algorithm::Hdrm => "hdrm",
            Algorithm::Circulant => "circulant",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::Direct => "direct",
            Algorithm::DirectRead => "direct-read",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Binomial => "binomial",
            Algorithm::Chain => "chain",
        }
    }

    /// True if each sum is added in rank order, whatever the length and the chunk count: the same bits on all ranks and
    /// in all runs. True for collectives without sums.
    pub fn sums_in_rank_order(self, collective: Collective) -> bool {
        use Algorithm::{Direct, DirectRead, OneShot, TwoShot};
        !collective.reduces() || matches!(self, OneShot | TwoShot | Direct | DirectRead)
    }

    /// Algorithms that compute `collective`.
    pub fn of(collective: Collective) -> &'static [Algorithm] {
        use Algorithm::*;
        match collective {
            Collective::AllReduce => &[
                Ring,
                Tree,
                HalvingDoubling,
                Hdrm,
                Circulant,
                OneShot,
                TwoShot,
                DirectRead,
                Hierarchical,
            ],
            Collective::ReduceScatter | Collective::AllGather => {
                &[Ring, HalvingDoubling, Circulant, Direct, DirectRead]
            }
            Collective::Broadcast { .. } => &[Binomial, Chain, Tree, DirectRead],
            Collective::AllToAll => &[Direct, Pairwise, DirectRead],
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm, Error> {
        Algorithm::ALL.iter().copied().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
            Error::UnknownName { name: name.to_owned(), known: names(Algorithm::ALL) }
        })
    }
}

pub(crate) fn names(algorithms: &[Algorithm]) -> String {
    algorithms.iter().map(|algorithm| algorithm.name()).collect::<Vec<_>>().join(", ")
}

/// Algorithm options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Chunk count for pipelined algorithms.
    pub chunks: u32,
    /// Ranks per node, for hierarchical algorithms; a node's ranks are consecutive.
    pub local: u32,
}

impl Default for Options {
    /// 8 chunks, 1 rank per node.
    fn default() -> Options {
        Options { chunks: 8, local: 1 }
    }
}
