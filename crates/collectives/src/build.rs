//! Schedules by name.

use crate::error::Error;
use crate::halving_doubling::HalvingDoubling;
use crate::op::{Collective, Op, Rank};
use crate::program::Program;
use crate::ring::{RingAllGather, RingAllReduce, RingReduceScatter};
use crate::schedule::Schedule;
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
    /// `hd`: recursive halving, doubling, or both.
    HalvingDoubling,
    /// `hdrm`: all-reduce by halving-doubling, for a map of ranks onto a BiGraph.
    Hdrm,
}

impl Algorithm {
    /// All of them.
    pub const ALL: &[Algorithm] = &[Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Hdrm];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "hd",
            Algorithm::Hdrm => "hdrm",
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
            Error::UnknownName {
                name: name.to_owned(),
                known: names(Algorithm::ALL.iter().copied()),
            }
        })
    }
}

fn names(algorithms: impl Iterator<Item = Algorithm>) -> String {
    algorithms.map(Algorithm::name).collect::<Vec<_>>().join(", ")
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
pub fn build(
    collective: Collective,
    algorithm: Algorithm,
    ranks: u32,
    options: &Options,
) -> Result<AnySchedule, Error> {
    in_range("the number of ranks", ranks, 1, MAX_RANKS)?;
    in_range("the number of chunks", options.chunks, 1, 1 << 16)?;
    in_range("the number of ranks on a node", options.local, 1, ranks)?;
    use {Algorithm as A, Collective as C};
    Ok(match (collective, algorithm) {
        (C::AllReduce, A::Ring) => RingAllReduce { ranks }.into(),
        (C::ReduceScatter, A::Ring) => RingReduceScatter { ranks }.into(),
        (C::AllGather, A::Ring) => RingAllGather { ranks }.into(),
        (C::AllReduce, A::HalvingDoubling) => HalvingDoubling::new(ranks, false).into(),
        (C::AllReduce, A::Hdrm) => HalvingDoubling::new(ranks, true).into(),
        _ => {
            return Err(Error::NoSuchAlgorithm {
                collective,
                algorithm: algorithm.name(),
                known: String::new(),
            });
        }
    })
}

fn in_range(what: &'static str, value: u32, least: u32, most: u32) -> Result<(), Error> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::OutOfRange { what, value: value.into(), least: least.into(), most: most.into() })
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
    HalvingDoubling(HalvingDoubling),
    Program(Program),
}
