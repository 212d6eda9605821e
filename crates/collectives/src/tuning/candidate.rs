//! Candidates: algorithms that are measured and selected, and collective names.

use crate::algorithm::{Algorithm, Options};
use crate::op::Collective;

/// Chunk counts that are candidates for pipelined algorithms.
const CHUNKS: [u32; 2] = [2, 8];
/// Algorithms that the tuner measures and selects, with options. Algorithms that need a rank placement are not among
/// them.
pub fn candidates(collective: Collective) -> impl Iterator<Item = (Algorithm, Options)> {
    let placed =
        |algorithm: &Algorithm| matches!(algorithm, Algorithm::Hdrm | Algorithm::Hierarchical);
    let all = Algorithm::of(collective).iter().copied().filter(move |one| !placed(one));
    all.flat_map(|algorithm| {
        let count = if is_pipelined(algorithm) { CHUNKS.len() } else { 1 };
        CHUNKS[CHUNKS.len() - count..]
            .iter()
            .map(move |&chunks| (algorithm, Options { chunks, ..Options::default() }))
    })
}

/// Collective name in files: without a root.
pub fn collective_name(collective: Collective) -> &'static str {
    match collective {
        Collective::AllReduce => "all-reduce",
        Collective::ReduceScatter => "reduce-scatter",
        Collective::AllGather => "all-gather",
        Collective::Broadcast { .. } => "broadcast",
        Collective::AllToAll => "all-to-all",
    }
}

/// True if options set the chunk count.
pub(super) fn is_pipelined(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::Tree | Algorithm::Chain)
}
