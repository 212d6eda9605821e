//! Schedule construction by algorithm name, and the enum over all schedules.

use crate::algorithm::{Algorithm, Options, names};
use crate::broadcast::{Binomial, Pipelined};
use crate::circulant::Circulant;
use crate::direct::{Direct, DirectVariant};
use crate::error::{Error, in_range};
use crate::halving_doubling::HalvingDoubling;
use crate::hierarchical::Hierarchical;
use crate::op::{Collective, MAX_RANKS, Op, Rank};
use crate::pairwise::Pairwise;
use crate::placed_hdrm::PlacedHdrm;
use crate::program::Program;
use crate::recursive::{RecursiveDoubling, RecursiveHalving};
use crate::ring::{RingAllGather, RingAllReduce, RingReduceScatter};
use crate::schedule::Schedule;
use crate::tree::TreeAllReduce;

/// Builds the schedule for `collective` by `algorithm` among `ranks`, for example an all-reduce by ring among 8.
///
/// # Errors
/// If the algorithm does not compute the collective, or a number is out of range: ranks from 1 to
/// [`MAX_RANKS`], a multiple of the ranks per node, chunks from 1 to 65,536.
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
    let direct = |variant| Ok(Direct { ranks, variant }.into());
    match (collective, algorithm) {
        (C::AllReduce, A::Ring) => Ok(RingAllReduce { ranks }.into()),
        (C::AllReduce, A::Tree) => Ok(TreeAllReduce::new(ranks, chunks).into()),
        (C::AllReduce, A::HalvingDoubling) => Ok(HalvingDoubling::new(ranks, false).into()),
        (C::AllReduce, A::Hdrm) => Ok(HalvingDoubling::new(ranks, true).into()),
        (C::AllReduce | C::ReduceScatter | C::AllGather, A::Circulant) => {
            Ok(Circulant::new(collective, ranks).into())
        }
        (C::AllReduce, A::OneShot) => direct(DirectVariant::OneShot),
        (C::AllReduce, A::TwoShot | A::DirectRead) => direct(DirectVariant::TwoShot),
        (C::AllReduce, A::Hierarchical) if ranks.is_multiple_of(options.local) => {
            Ok(Hierarchical::new(ranks, options.local).into())
        }
        (C::AllReduce, A::Hierarchical) => {
            Err(Error::Uneven { what: "ranks", whole: ranks, parts: options.local })
        }
        (C::ReduceScatter, A::Ring) => Ok(RingReduceScatter { ranks }.into()),
        (C::ReduceScatter, A::HalvingDoubling) => Ok(RecursiveHalving::new(ranks).into()),
        (C::ReduceScatter, A::Direct | A::DirectRead) => direct(DirectVariant::ReduceScatter),
        (C::AllGather, A::Ring) => Ok(RingAllGather { ranks }.into()),
        (C::AllGather, A::HalvingDoubling) => Ok(RecursiveDoubling::new(ranks).into()),
        (C::AllGather, A::Direct | A::DirectRead) => direct(DirectVariant::AllGather),
        (C::Broadcast { root }, A::Binomial) => Ok(Binomial { ranks, root }.into()),
        (C::Broadcast { root }, A::Chain) => Ok(Pipelined::chain(ranks, root, chunks).into()),
        (C::Broadcast { root }, A::DirectRead) => direct(DirectVariant::Broadcast { root }),
        (C::Broadcast { root }, A::Tree) => Ok(Pipelined::tree(ranks, root, chunks).into()),
        (C::AllToAll, A::Direct | A::DirectRead) => direct(DirectVariant::AllToAll),
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
        /// Schedule for any algorithm, without type parameter or dynamic dispatch.
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
    PlacedHdrm(PlacedHdrm),
    RecursiveHalving(RecursiveHalving),
    RecursiveDoubling(RecursiveDoubling),
    Circulant(Circulant),
    Direct(Direct),
    Hierarchical(Hierarchical),
    Pairwise(Pairwise),
    Binomial(Binomial),
    Pipelined(Pipelined),
    Program(Program),
}
