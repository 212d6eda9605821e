//! Messages in a collective: the bytes that each rank pair exchanges, and their places in the tensors.

use super::error::DeviceError;
use std::ops::Range;

/// Collective operation between GPUs. `count` counts elements, and `N` ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceOperation {
    /// Input and output have `count` elements: the output is the reduction over all ranks.
    AllReduce {
        /// Vector elements.
        count: u64,
    },
    /// The input has `N * count` elements, the output `count`: part `r` in the reduction at rank `r`.
    ReduceScatter {
        /// Output elements.
        count: u64,
    },
    /// The input has `count` elements, and at `root` the output: the reduction.
    Reduce {
        /// Vector elements.
        count: u64,
        /// Rank that gets the result.
        root: u32,
    },
    /// The input has `count` elements, the output `N * count`, by rank.
    AllGather {
        /// Input elements per rank.
        count: u64,
    },
    /// Input and output have `N * count` elements: part `d` at rank `s` becomes part `s` at rank `d`.
    AllToAll {
        /// Elements per part.
        count: u64,
    },
    /// Like [`DeviceOperation::AllToAll`], with parts that differ in length and follow each other in both tensors.
    AllToAllUneven {
        /// Elements for each rank.
        sent: Vec<u64>,
        /// Elements from each rank.
        received: Vec<u64>,
    },
    /// The input at `root` has `count` elements, the output at all ranks too.
    Broadcast {
        /// Vector elements.
        count: u64,
        /// Rank that has the vector.
        root: u32,
    },
    /// The input has `count` elements, and at `root` the output has `N * count`, by rank.
    Gather {
        /// Input elements per rank.
        count: u64,
        /// Rank that gets the result.
        root: u32,
    },
    /// At `root` the input has `N * count` elements, and at all ranks the output has `count`.
    Scatter {
        /// Output elements per rank.
        count: u64,
        /// Rank that has the vector.
        root: u32,
    },
    /// No data; ends after all ranks have begun it.
    Barrier,
}

impl DeviceOperation {
    /// All operation names.
    pub(super) const NAMES: [&'static str; 9] = [
        "all_reduce",
        "reduce_scatter",
        "reduce",
        "all_gather",
        "all_to_all",
        "broadcast",
        "gather",
        "scatter",
        "barrier",
    ];

    /// Elements in the operation: its `count`, or all that an uneven all-to-all sends.
    pub(super) fn count(&self) -> u64 {
        match self {
            DeviceOperation::AllToAllUneven { sent, .. } => {
                sent.iter().fold(0, |sum, part| sum.saturating_add(*part))
            }
            other => other.longest().unwrap_or(0),
        }
    }

    /// Operation name.
    pub fn name(&self) -> &'static str {
        match self {
            DeviceOperation::AllReduce { .. } => "all_reduce",
            DeviceOperation::ReduceScatter { .. } => "reduce_scatter",
            DeviceOperation::Reduce { .. } => "reduce",
            DeviceOperation::AllGather { .. } => "all_gather",
            DeviceOperation::AllToAll { .. } | DeviceOperation::AllToAllUneven { .. } => {
                "all_to_all"
            }
            DeviceOperation::Broadcast { .. } => "broadcast",
            DeviceOperation::Gather { .. } => "gather",
            DeviceOperation::Scatter { .. } => "scatter",
            DeviceOperation::Barrier => "barrier",
        }
    }

    /// True if contributions are reduced.
    pub fn reduces(&self) -> bool {
        use DeviceOperation::{AllReduce, Reduce, ReduceScatter};
        matches!(self, AllReduce { .. } | ReduceScatter { .. } | Reduce { .. })
    }

    /// Tensors that peers access in a direct call, if the operation can be one: input and output.
    pub(super) fn of_peers(&self) -> Option<(bool, bool)> {
        use DeviceOperation::*;
        match self {
            AllReduce { .. } => Some((true, true)),
            ReduceScatter { .. } | Reduce { .. } => Some((true, false)),
            AllGather { .. } | AllToAll { .. } | Broadcast { .. } | Scatter { .. } => {
                Some((false, true))
            }
            // Peers have no output to give the root's address, or do not have the part places.
            Gather { .. } | AllToAllUneven { .. } | Barrier => None,
        }
    }

    /// Root, if there is one.
    pub fn root(&self) -> Option<u32> {
        use DeviceOperation::{Broadcast, Gather, Reduce, Scatter};
        match *self {
            Broadcast { root, .. } | Gather { root, .. } | Scatter { root, .. } => Some(root),
            Reduce { root, .. } => Some(root),
            _ => None,
        }
    }

    /// Error for a direct call whose tensors are not in the symmetric heap, or whose operation has no direct form.
    pub(super) fn not_direct(&self) -> DeviceError {
        let needed = match self.of_peers() {
            Some((true, true)) => "input and output must be symmetric memory",
            Some((true, false)) => "the input must be symmetric memory",
            Some((false, _)) => "the output must be symmetric memory",
            None => "the operation has no direct form",
        };
        DeviceError::NotDirect { operation: self.name(), needed }
    }

    /// Rejects a copy-engine call if the operation has none, or the output is not symmetric.
    pub(super) fn check_copied(&self, symmetric: bool) -> Result<(), DeviceError> {
        let needed = match self.of_peers() {
            _ if self.reduces() => "reductions take SMs; omit copy_engine",
            None => "no form by copy engines; omit copy_engine",
            Some(_) if !symmetric => {
                "the output must be symmetric memory; pass one of symmetric_empty or \
                 weft.symmetric_register on all ranks, or omit copy_engine"
            }
            Some(_) => return Ok(()),
        };
        Err(DeviceError::NotByCopyEngine { operation: self.name(), needed })
    }

    /// Input and output elements at a rank that has both; 0 for an uneven operation.
    pub(super) fn lengths(&self, ranks: u32) -> (u64, u64) {
        use DeviceOperation::*;
        // Longer tensors are rejected by the plan.
        let all = |count: u64| count.saturating_mul(ranks.into());
        match *self {
            AllReduce { count } | Reduce { count, .. } | Broadcast { count, .. } => (count, count),
            ReduceScatter { count } | Scatter { count, .. } => (all(count), count),
            AllGather { count } | Gather { count, .. } => (count, all(count)),
            AllToAll { count } => (all(count), all(count)),
            AllToAllUneven { .. } | Barrier => (0, 0),
        }
    }

    /// Elements in the longest message between any pair, if it is the same at all ranks.
    pub(super) fn longest(&self) -> Option<u64> {
        use DeviceOperation::*;
        match *self {
            AllReduce { count } | ReduceScatter { count } | Reduce { count, .. } => Some(count),
            AllGather { count } | AllToAll { count } | Broadcast { count, .. } => Some(count),
            Gather { count, .. } | Scatter { count, .. } => Some(count),
            AllToAllUneven { .. } => None,
            Barrier => Some(0),
        }
    }

    pub(super) fn check(&self, ranks: u32) -> Result<(), DeviceError> {
        if let Some(root) = self.root().filter(|&root| root >= ranks) {
            return Err(DeviceError::NoRank { rank: root, ranks });
        }
        if let DeviceOperation::AllToAllUneven { sent, received } = self {
            for (what, parts) in [("sent", sent), ("received", received)] {
                if parts.len() != ranks as usize {
                    return Err(DeviceError::Parts { what, given: parts.len(), ranks });
                }
            }
        }
        Ok(())
    }
}

/// Bytes exchanged with a rank. A rank's message to itself is copied, or is its own contribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Begin in the input.
    pub send_at: u64,
    /// Bytes to the rank.
    pub send_bytes: u64,
    /// Begin in the output. Contributions to a reduction have the same place as the result.
    pub receive_at: u64,
    /// Bytes from the rank.
    pub receive_bytes: u64,
    /// Bytes in the pair's longer direction; equal at both ranks.
    pub longer: u64,
}

/// Slice length granularity, so that slices in aligned vectors are aligned.
pub(super) const SLICE_ALIGNMENT: u64 = 16;

/// A rank's slice in a two-shot all-reduce over a vector of `bytes` bytes.
pub(super) fn slice(bytes: u64, rank: u32, ranks: u32) -> Range<u64> {
    let each = bytes.div_ceil(u64::from(ranks)).next_multiple_of(SLICE_ALIGNMENT);
    let at = |rank: u32| (u64::from(rank) * each).min(bytes);
    at(rank)..at(rank + 1)
}

/// Messages for `rank`, by rank. A two-shot all-reduce exchanges slices, and a one-shot one whole vectors.
///
/// `operation` is valid for `ranks`, and the bytes fit in a `u64`.
pub(super) fn messages(
    operation: &DeviceOperation,
    element_bytes: u64,
    rank: u32,
    ranks: u32,
    two_shot: bool,
) -> Vec<Message> {
    let message = |peer: u32| -> Message {
        let part = |count: u64, index: u32| u64::from(index) * count * element_bytes;
        let only = |condition: bool, count: u64| if condition { count * element_bytes } else { 0 };
        let of = |send_at, send_bytes: u64, receive_at, receive_bytes: u64| Message {
            send_at,
            send_bytes,
            receive_at,
            receive_bytes,
            longer: send_bytes.max(receive_bytes),
        };
        match *operation {
            DeviceOperation::AllReduce { count } if two_shot => {
                let bytes = count * element_bytes;
                let length = |slice: &Range<u64>| slice.end - slice.start;
                let (theirs, ours) = (slice(bytes, peer, ranks), slice(bytes, rank, ranks));
                let message = of(theirs.start, length(&theirs), theirs.start, length(&theirs));
                Message { longer: message.longer.max(length(&ours)), ..message }
            }
            DeviceOperation::AllReduce { count } => {
                of(0, count * element_bytes, 0, count * element_bytes)
            }
            DeviceOperation::ReduceScatter { count } => {
                of(part(count, peer), count * element_bytes, 0, count * element_bytes)
            }
            DeviceOperation::Reduce { count, root } => {
                of(0, only(peer == root, count), 0, only(rank == root, count))
            }
            DeviceOperation::AllGather { count } => {
                of(0, count * element_bytes, part(count, peer), count * element_bytes)
            }
            DeviceOperation::AllToAll { count } => {
                let bytes = count * element_bytes;
                of(part(count, peer), bytes, part(count, peer), bytes)
            }
            DeviceOperation::AllToAllUneven { ref sent, ref received } => {
                let before =
                    |parts: &[u64]| parts[..peer as usize].iter().sum::<u64>() * element_bytes;
                let length = |parts: &[u64]| parts[peer as usize] * element_bytes;
                of(before(sent), length(sent), before(received), length(received))
            }
            DeviceOperation::Broadcast { count, root } => {
                of(0, only(rank == root, count), 0, only(peer == root, count))
            }
            DeviceOperation::Gather { count, root } => {
                of(0, only(peer == root, count), part(count, peer), only(rank == root, count))
            }
            DeviceOperation::Scatter { count, root } => {
                of(part(count, peer), only(rank == root, count), 0, only(peer == root, count))
            }
            DeviceOperation::Barrier => Message::default(),
        }
    };
    (0..ranks).map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operations(count: u64, root: u32) -> Vec<DeviceOperation> {
        use DeviceOperation::*;
        vec![
            AllReduce { count },
            ReduceScatter { count },
            Reduce { count, root },
            AllGather { count },
            AllToAll { count },
            Broadcast { count, root },
            Gather { count, root },
            Scatter { count, root },
            Barrier,
        ]
    }

    proptest! {
        /// Bytes sent and bytes expected in a pair are equal, and the longest message bounds all.
        #[test]
        fn both_ends_of_a_pair_agree(count in 0u64..5000, ranks in 1u32..9, root in 0u32..9, element in 0u32..4) {
            let element = 1u64 << element;
            for operation in operations(count, root % ranks) {
                for two_shot in [false, true] {
                    let all: Vec<_> =
                        (0..ranks).map(|rank| messages(&operation, element, rank, ranks, two_shot)).collect();
                    let sliced = two_shot && matches!(operation, DeviceOperation::AllReduce { .. });
                    for (a, of_a) in all.iter().enumerate() {
                        for (b, of_b) in all.iter().enumerate() {
                            // Contributions to a slice have the slice length.
                            let expected = if sliced { of_b[b].send_bytes } else { of_b[a].receive_bytes };
                            prop_assert_eq!(of_a[b].send_bytes, expected);
                            prop_assert!(of_a[b].send_bytes <= operation.longest().unwrap() * element);
                            prop_assert_eq!(of_a[b].longer, of_b[a].longer);
                            prop_assert!(of_a[b].longer >= of_a[b].send_bytes.max(expected));
                        }
                    }
                }
            }
        }

        #[test]
        fn slices_partition_the_vector(bytes in 0u64..100_000, ranks in 1u32..65) {
            let mut end = 0;
            for rank in 0..ranks {
                let slice = slice(bytes, rank, ranks);
                prop_assert_eq!(slice.start, end);
                prop_assert!(slice.start.is_multiple_of(SLICE_ALIGNMENT) || slice.start == bytes);
                end = slice.end;
            }
            prop_assert_eq!(end, bytes);
        }

        #[test]
        fn uneven_parts_follow_each_other(
            sent in prop::collection::vec(0u64..100, 1..9), element in 0u32..4,
        ) {
            let ranks = sent.len() as u32;
            let received: Vec<u64> = sent.iter().rev().copied().collect();
            let operation = DeviceOperation::AllToAllUneven { sent: sent.clone(), received: received.clone() };
            prop_assert!(operation.check(ranks).is_ok());
            prop_assert!(operation.check(ranks + 1).is_err());
            let all = messages(&operation, 1 << element, 0, ranks, false);
            let (mut from, mut to) = (0, 0);
            for (message, (sent, received)) in all.iter().zip(sent.iter().zip(&received)) {
                prop_assert_eq!(message.send_at, from);
                prop_assert_eq!(message.receive_at, to);
                from += sent << element;
                to += received << element;
                prop_assert_eq!(message.send_bytes, sent << element);
                prop_assert_eq!(message.receive_bytes, received << element);
            }
        }
    }
}
