//! Sends and receives: their rules, and the kernel argument, declared once for the host and the kernel.
//!
//! A message travels in chunks, chunk `c` in lane `c % lanes`. Lanes and chunks follow only from the byte count, so
//! that both ends agree without communication; what else is in a batch may differ between them.

use super::error::DeviceError;
use super::layout::Layout;
use std::fmt::Write as _;
use weft_gpu::layout;
use weft_gpu::layout::c_struct;
use weft_gpu::table::MAX_RANKS;

/// Maximum sends and receives in a batch: one each for every peer, and two more.
pub const MAX_TRANSFERS: usize = 128;
/// Maximum message bytes, so that 32 bits can count the chunks.
const MAX_BYTES: u64 = 1 << 44;
/// Threads per block.
pub(super) const THREADS: u32 = 512;
/// Kernel name.
pub(super) const KERNEL: &str = "collective_transfers";

/// Send to a peer, or receive from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The peer.
    pub peer: u32,
    /// True for a receive.
    pub receives: bool,
    /// Address of the tensor that is read or, in a receive, written.
    pub address: u64,
    /// Tensor bytes, equal at both ends.
    pub bytes: u64,
}

impl Transfer {
    /// Chunks in the message; one without bytes has one empty chunk, so that the receive waits for the send.
    pub(super) fn chunks(&self, layout: &Layout) -> u64 {
        self.bytes.div_ceil(layout.chunk_capacity.into()).max(1)
    }

    /// Lanes that the message uses.
    pub(super) fn lanes(&self, layout: &Layout) -> u32 {
        self.chunks(layout).min(layout.lanes.into()) as u32
    }

    /// Message chunks in a lane.
    pub(super) fn chunks_in(&self, layout: &Layout, lane: u32) -> u32 {
        let lanes = u64::from(self.lanes(layout));
        self.chunks(layout).saturating_sub(lane.into()).div_ceil(lanes) as u32
            * u32::from(u64::from(lane) < lanes)
    }
}

/// Batch launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TransferPlan {
    /// By direction and peer, in batch order among equal ones.
    pub transfers: Vec<Transfer>,
    /// Blocks.
    pub grid: u32,
}

impl TransferPlan {
    /// Plan for a batch on rank `rank`, which is not empty.
    ///
    /// # Errors
    /// [`DeviceError::NoRank`], [`DeviceError::ToItself`], [`DeviceError::TooLarge`].
    pub fn new(batch: &[Transfer], rank: u32, layout: &Layout) -> Result<Self, DeviceError> {
        let too_large = |what, given, limit| DeviceError::TooLarge { what, given, limit };
        if batch.len() > MAX_TRANSFERS {
            let (given, limit) = (batch.len() as u64, MAX_TRANSFERS as u64);
            return Err(too_large("the number of sends and receives of a batch", given, limit));
        }
        for transfer in batch {
            let Transfer { peer, bytes, .. } = *transfer;
            if peer >= layout.ranks {
                return Err(DeviceError::NoRank { rank: peer, ranks: layout.ranks });
            }
            if peer == rank {
                return Err(DeviceError::ToItself { rank });
            }
            if bytes > MAX_BYTES {
                return Err(too_large("the number of bytes of a message", bytes, MAX_BYTES));
            }
        }
        let mut transfers = batch.to_vec();
        transfers.sort_by_key(|transfer| (transfer.receives, transfer.peer));
        let flows = flows(&transfers, layout).count().clamp(1, layout.blocks as usize) as u32;
        Ok(TransferPlan { transfers, grid: flows })
    }
}

/// Batch flow: the transfers for one direction and peer, one after another, in one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    /// First transfer.
    pub first: usize,
    /// Behind the last one.
    pub end: usize,
    /// Lane.
    pub lane: u32,
}

/// Flows in sorted transfers. Kernel block `b` has flows `b`, `b + grid` and so on.
pub(super) fn flows<'a>(
    transfers: &'a [Transfer],
    layout: &'a Layout,
) -> impl Iterator<Item = Flow> + 'a {
    let key = |transfer: &Transfer| (transfer.receives, transfer.peer);
    let groups = transfers.chunk_by(move |a, b| key(a) == key(b));
    let mut first = 0;
    groups.flat_map(move |group| {
        let begin = first;
        first += group.len();
        let end = first;
        let lanes = group.iter().map(|transfer| transfer.lanes(layout)).max().unwrap_or(0);
        (0..lanes).map(move |lane| Flow { first: begin, end, lane })
    })
}

layout! {
    /// Transfer in the argument.
    pub struct TransferEntry {
        at: u64, "this rank's tensor";
        bytes: u64, "its bytes";
        peer: u32, "rank at the other end";
        receives: u32, "nonzero for a receive";
    }
}

layout! {
    /// The part that does not depend on the rank count.
    pub struct TransferBlock {
        table: u64, "domain table";
        record: u64, "failure records, in pinned memory";
        abort: u64, "word by which the host ends all waits";
        rank: u32, "this rank";
        count: u32, "transfers in the batch";
    }
}

/// Words in the longest argument.
const MAX_WORDS: usize =
    MAX_RANKS + (MAX_TRANSFERS * TransferEntry::SIZE + TransferBlock::SIZE) / 8;

const _: () = assert!(MAX_WORDS * 8 <= 4096, "the limit of a kernel's argument before CUDA 12.1");

/// Launch argument as words: memory on all ranks, transfers, block.
pub(super) fn argument(
    peers: &[u64],
    transfers: &[Transfer],
    block: &TransferBlock,
) -> [u64; MAX_WORDS] {
    let mut words = [0; MAX_WORDS];
    let (ranks, rest) = words.split_at_mut(peers.len());
    ranks.copy_from_slice(peers);
    let (entries, rest) = rest.split_at_mut(MAX_TRANSFERS * TransferEntry::SIZE / 8);
    let store = |to: &mut [u64], bytes: &[u8]| {
        let (all, _) = bytes.as_chunks::<8>();
        to.iter_mut().zip(all).for_each(|(to, word)| *to = u64::from_ne_bytes(*word));
    };
    for (to, transfer) in entries.chunks_exact_mut(TransferEntry::SIZE / 8).zip(transfers) {
        let Transfer { peer, receives, address: at, bytes } = *transfer;
        store(to, &TransferEntry { at, bytes, peer, receives: receives.into() }.bytes());
    }
    store(rest, &block.bytes());
    words
}

/// The header `collectives/transfer_arguments.cuh`.
pub fn transfer_arguments_header() -> String {
    let mut arrays =
        String::from("    u64 peer[RANKS]; // every rank's memory, as mapped on this rank\n");
    // Writing to a string does not fail.
    let _ = writeln!(
        arrays,
        "    Transfer transfer[TRANSFERS]; // by direction and peer, in batch order among equal \
         ones"
    );
    format!(
        "// Send and receive kernel argument. Generated from \
         crates/collectives/src/device/transfers.rs; a test compares the two.\n#pragma \
         once\n#include \"collectives/arguments.cuh\"\n\nnamespace weft::collectives \
         {{\n\nconstexpr u32 TRANSFERS = \
         {MAX_TRANSFERS};\n\n{}\n{}static_assert(sizeof(TransferArguments) == 8 * RANKS + {}, \
         \"the size in Rust\");\n\n}} // namespace weft::collectives\n",
        c_struct("Transfer", "", TransferEntry::FIELDS),
        c_struct("TransferArguments", &arrays, TransferBlock::FIELDS),
        MAX_TRANSFERS * TransferEntry::SIZE + TransferBlock::SIZE,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_header_is_the_one_that_the_kernel_includes() {
        let path = "collectives/transfer_arguments.cuh";
        let listed = crate::device::SOURCES.iter().find(|(listed, _)| *listed == path);
        let expected = transfer_arguments_header();
        assert_eq!(
            listed.map(|(_, text)| *text),
            Some(expected.as_str()),
            "write this to crates/collectives/kernels/{path}:\n{expected}"
        );
    }

    #[test]
    fn words_follow_in_the_order_of_the_structs() {
        let transfer = Transfer { peer: 1, receives: true, address: 8, bytes: 9 };
        let block = TransferBlock { table: 70, record: 71, abort: 72, rank: 0, count: 1 };
        let words = argument(&[5, 6], &[transfer], &block);
        assert_eq!(words[..7], [5, 6, 8, 9, 1 | 1 << 32, 0, 0]);
        let at = 2 + MAX_TRANSFERS * TransferEntry::SIZE / 8;
        assert_eq!(words[at..at + 5], [70, 71, 72, 1 << 32, 0]);
    }

    proptest! {
        /// Lanes have all chunks in a message, and a block has at most one flow for each direction and peer.
        #[test]
        fn lanes_partition_messages_and_blocks_have_few_flows(
            lengths in prop::collection::vec((0u64..2_000_000, 0u32..70, any::<bool>()), 1..MAX_TRANSFERS),
            ranks in 2u32..65, blocks in 1u32..40,
        ) {
            let layout = Layout::new(ranks, blocks);
            let transfer = |&(bytes, peer, receives): &(u64, u32, bool)| Transfer {
                peer: 1 + peer % (ranks - 1), receives, address: 0, bytes,
            };
            let batch: Vec<Transfer> = lengths.iter().map(transfer).collect();
            for each in &batch {
                let chunks: u64 = (0..layout.lanes).map(|lane| u64::from(each.chunks_in(&layout, lane))).sum();
                prop_assert_eq!(chunks, each.chunks(&layout));
                prop_assert!(each.chunks_in(&layout, 0) > 0);
            }
            let plan = TransferPlan::new(&batch, 0, &layout).unwrap();
            let all: Vec<Flow> = flows(&plan.transfers, &layout).collect();
            prop_assert!(plan.grid <= blocks && plan.grid as usize <= all.len());
            prop_assert!(all.len().div_ceil(plan.grid as usize) <= 2 * (ranks as usize - 1));
            prop_assert_eq!(all.last().map(|flow| flow.end), Some(batch.len()));
            let of_peer = |transfers: &[Transfer]| -> Vec<u64> {
                transfers.iter().filter(|each| each.peer == 1 && each.receives).map(|each| each.bytes).collect()
            };
            prop_assert_eq!(of_peer(&batch), of_peer(&plan.transfers));
        }
    }

    #[test]
    fn batches_that_cannot_run_are_rejected() {
        let layout = Layout::new(2, 4);
        let one = Transfer { peer: 1, receives: false, address: 0, bytes: 8 };
        for (batch, expected) in [
            (vec![Transfer { peer: 2, ..one }], "rank is 2: expected one below 2"),
            (vec![one, Transfer { peer: 0, ..one }], "rank 0 sends to itself"),
            (vec![Transfer { bytes: MAX_BYTES + 1, ..one }], "the number of bytes of a message"),
            (vec![one; 129], "the number of sends and receives of a batch is 129"),
        ] {
            let error = TransferPlan::new(&batch, 0, &layout).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
