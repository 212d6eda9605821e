//! Schedules by name.

use crate::broadcast::{Binomial, Pipelined};
use crate::direct::{Direct, Kind};
use crate::error::{Error, in_range};
use crate::halving_doubling::HalvingDoubling;
use crate::hierarchical::Hierarchical;
use crate::op::{Collective, Op, Rank};
use crate::pairwise::Pairwise;
use crate::program::Program;
use crate::ring::{RingAllGather, RingAllReduce, RingReduceScatter};
use crate::schedule::Schedule;
use crate::shares::{Doubling, Halving};
use crate::tree::TreeAllReduce;
use std::fmt;
use std::str::FromStr;

/// The most ranks that a schedule is built for.
pub const MAX_RANKS: u32 = 1 << 24;

/// An algorithm, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `ring`: neighbours only.
    Ring,
    /// `tree`: a double binary tree, pipelined.
    Tree,
    /// `hd`: recursive halving, doubling, or both.
    HalvingDoubling,
    /// `hdrm`: all-reduce by halving-doubling, for a map of ranks onto a BiGraph.
    Hdrm,
    /// `one-shot`: everybody sends everything to everybody.
    OneShot,
    /// `two-shot`: direct reduce-scatter, direct all-gather.
    TwoShot,
    /// `direct`: each rank to each, at once.
    Direct,
    /// `hierarchical`: direct inside the nodes, HDRM on rails between them.
    Hierarchical,
    /// `pairwise`: each rank to each, one after another.
    Pairwise,
    /// `binomial`: a binomial tree.
    Binomial,
    /// `chain`: all ranks in a row, pipelined.
    Chain,
}

impl Algorithm {
    /// All of them.
    pub const ALL: &[Algorithm] = &[
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::HalvingDoubling,
        Algorithm::Hdrm,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::Direct,
        Algorithm::Hierarchical,
        Algorithm::Pairwise,
        Algorithm::Binomial,
        Algorithm::Chain,
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::HalvingDoubling => "hd",
            Algorithm::Hdrm => "hdrm",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::Direct => "direct",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Binomial => "binomial",
            Algorithm::Chain => "chain",
        }
    }

    /// The algorithms that compute `collective`.
    pub fn of(collective: Collective) -> &'static [Algorithm] {
        use Algorithm::*;
        match collective {
            Collective::AllReduce => {
                &[Ring, Tree, HalvingDoubling, Hdrm, OneShot, TwoShot, Hierarchical]
            }
            Collective::ReduceScatter | Collective::AllGather => &[Ring, HalvingDoubling, Direct],
            Collective::Broadcast { .. } => &[Binomial, Chain, Tree],
            Collective::AllToAll => &[Direct, Pairwise],
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

fn names(algorithms: &[Algorithm]) -> String {
    algorithms.iter().map(|algorithm| algorithm.name()).collect::<Vec<_>>().join(", ")
}

/// What an algorithm may want to know besides the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Into how many pieces pipelined algorithms cut what they send.
    pub chunks: u32,
    /// How many ranks a node has, for hierarchical algorithms; ranks of a node are consecutive.
    pub local: u32,
}

impl Default for Options {
    /// 8 chunks, 1 rank on a node.
    fn default() -> Options {
        Options { chunks: 8, local: 1 }
    }
}

/// Builds the schedule of `collective` by `algorithm` among `ranks`.
///
/// # Errors
/// If the algorithm does not compute the collective, or a number is out of range: ranks from 1 to
/// [`MAX_RANKS`], ranks of a node that divide them, chunks from 1 to 65,536.
pub fn build(
    collective: Collective,
    algorithm: Algorithm,
    ranks: u32,
    options: &Options,
) -> Result<AnySchedule, Error> {
    in_range("the number of ranks", ranks, 1, MAX_RANKS)?;
    in_range("the number of chunks", options.chunks, 1, 1 << 16)?;
    in_range("the number of ranks on a node", options.local, 1, MAX_RANKS)?;
    let chunks = options.chunks;
    use {Algorithm as A, Collective as C};
    if let C::Broadcast { root } = collective {
        in_range("the root", root.0, 0, ranks - 1)?;
    }
    let direct = |kind| Ok(Direct { ranks, kind }.into());
    match (collective, algorithm) {
        (C::AllReduce, A::Ring) => Ok(RingAllReduce { ranks }.into()),
        (C::AllReduce, A::Tree) => Ok(TreeAllReduce::new(ranks, chunks).into()),
        (C::AllReduce, A::HalvingDoubling) => Ok(HalvingDoubling::new(ranks, false).into()),
        (C::AllReduce, A::Hdrm) => Ok(HalvingDoubling::new(ranks, true).into()),
        (C::AllReduce, A::OneShot) => direct(Kind::OneShot),
        (C::AllReduce, A::TwoShot) => direct(Kind::TwoShot),
        (C::AllReduce, A::Hierarchical) if ranks.is_multiple_of(options.local) => {
            Ok(Hierarchical::new(ranks, options.local).into())
        }
        (C::AllReduce, A::Hierarchical) => {
            Err(Error::Uneven { what: "ranks", whole: ranks, parts: options.local })
        }
        (C::ReduceScatter, A::Ring) => Ok(RingReduceScatter { ranks }.into()),
        (C::ReduceScatter, A::HalvingDoubling) => Ok(Halving::new(ranks).into()),
        (C::ReduceScatter, A::Direct) => direct(Kind::ReduceScatter),
        (C::AllGather, A::Ring) => Ok(RingAllGather { ranks }.into()),
        (C::AllGather, A::HalvingDoubling) => Ok(Doubling::new(ranks).into()),
        (C::AllGather, A::Direct) => direct(Kind::AllGather),
        (C::Broadcast { root }, A::Binomial) => Ok(Binomial { ranks, root }.into()),
        (C::Broadcast { root }, A::Chain) => Ok(Pipelined::chain(ranks, root, chunks).into()),
        (C::Broadcast { root }, A::Tree) => Ok(Pipelined::tree(ranks, root, chunks).into()),
        (C::AllToAll, A::Direct) => direct(Kind::AllToAll),
        (C::AllToAll, A::Pairwise) => Ok(Pairwise { ranks }.into()),
        _ => Err(Error::NoSuchAlgorithm {
            collective,
            algorithm: algorithm.name(),
            known: names(Algorithm::of(collective)),
        }),
    }
}

macro_rules! any_schedule {
    ($($variant:ident($type:ty)),* $(,)?) => {
        /// Any of the schedules, so that a caller needs no type parameter and no dynamic call.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        #[allow(missing_docs)]
        pub enum AnySchedule {
            $($variant($type),)*
        }

        $(impl From<$type> for AnySchedule {
            fn from(schedule: $type) -> AnySchedule {
                AnySchedule::$variant(schedule)
            }
        })*

        impl Schedule for AnySchedule {
            fn name(&self) -> &str {
                match self { $(AnySchedule::$variant(s) => s.name(),)* }
            }
            fn collective(&self) -> Collective {
                match self { $(AnySchedule::$variant(s) => s.collective(),)* }
            }
            fn ranks(&self) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.ranks(),)* }
            }
            fn blocks(&self) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.blocks(),)* }
            }
            fn scratch_blocks(&self, rank: Rank) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.scratch_blocks(rank),)* }
            }
            fn steps(&self) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.steps(),)* }
            }
            fn lanes(&self) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.lanes(),)* }
            }
            fn len(&self, rank: Rank) -> u32 {
                match self { $(AnySchedule::$variant(s) => s.len(rank),)* }
            }
            fn op(&self, rank: Rank, index: u32) -> Op {
                match self { $(AnySchedule::$variant(s) => s.op(rank, index),)* }
            }
        }
    };
}

any_schedule! {
    RingAllReduce(RingAllReduce),
    RingReduceScatter(RingReduceScatter),
    RingAllGather(RingAllGather),
    TreeAllReduce(TreeAllReduce),
    HalvingDoubling(HalvingDoubling),
    Halving(Halving),
    Doubling(Doubling),
    Direct(Direct),
    Hierarchical(Hierarchical),
    Pairwise(Pairwise),
    Binomial(Binomial),
    Pipelined(Pipelined),
    Program(Program),
}
