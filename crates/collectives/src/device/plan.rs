//! Launch plan for a call: kernel, grid and sizes. A pure function computes it, with equal results on all ranks.

use super::error::DeviceError;
use super::layout::{Layout, UNIT};
use super::message::{DeviceOperation, Message, messages};

/// Kernel for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    /// Messages as packets.
    ExchangePackets,
    /// Messages as chunks.
    ExchangeChunks,
    /// Packet reduction: the one-shot all-reduce, and short vectors in the other reductions.
    ReducePackets,
    /// Chunk reduction.
    ReduceChunks,
    /// Two-shot all-reduce by chunks.
    AllReduceChunks,
    /// Direct writes into peer outputs.
    ExchangeDirect,
    /// Entry kernel for a copy-engine call; the copies and [`Kernel::CopyExit`] follow.
    CopyEntry,
    /// Exit kernel for a copy-engine call; no plan names it.
    CopyExit,
    /// Direct reduction: sums this rank's part over all ranks' inputs.
    ReduceDirect,
    /// Two-shot all-reduce straight between tensors.
    AllReduceDirect,
}

/// Data transport for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Packets,
    Chunks,
    Direct,
}

impl Kernel {
    /// All kernels in the exchange program.
    pub const EXCHANGE: [Kernel; 5] = [
        Kernel::ExchangePackets,
        Kernel::ExchangeChunks,
        Kernel::ExchangeDirect,
        Kernel::CopyEntry,
        Kernel::CopyExit,
    ];
    /// All kernels in a reduction program.
    pub const REDUCE: [Kernel; 5] = [
        Kernel::ReducePackets,
        Kernel::ReduceChunks,
        Kernel::AllReduceChunks,
        Kernel::ReduceDirect,
        Kernel::AllReduceDirect,
    ];

    /// Entry point name.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::ExchangePackets => "collective_exchange_packets",
            Kernel::ExchangeChunks => "collective_exchange_chunks",
            Kernel::ReducePackets => "collective_reduce_packets",
            Kernel::ReduceChunks => "collective_reduce_chunks",
            Kernel::AllReduceChunks => "collective_all_reduce_chunks",
            Kernel::ExchangeDirect => "collective_exchange_direct",
            Kernel::CopyEntry => "collective_copy_entry",
            Kernel::CopyExit => "collective_copy_exit",
            Kernel::ReduceDirect => "collective_reduce_direct",
            Kernel::AllReduceDirect => "collective_all_reduce_direct",
        }
    }

    /// Threads per block: fixed by the teams in chunk kernels, an upper limit in the others.
    pub const fn threads(self) -> u32 {
        match self {
            Kernel::ExchangePackets | Kernel::ReducePackets => 512,
            Kernel::ExchangeDirect | Kernel::ReduceDirect | Kernel::AllReduceDirect => 512,
            // One warp fits beside kernels that leave few registers on an SM.
            Kernel::CopyEntry | Kernel::CopyExit => 32,
            Kernel::ExchangeChunks => (8 + 8 + 1) * 32,
            Kernel::ReduceChunks => (8 + 12 + 1) * 32,
            Kernel::AllReduceChunks => (8 + 12 + 8 + 2) * 32,
        }
    }

    /// Kernel variant with bulk copies, for aligned tensors.
    pub fn bulk(self) -> Option<BulkKernel> {
        let kernel =
            |name, warps: u32, stages| Some(BulkKernel { name, threads: warps * 32, stages });
        match self {
            Kernel::ExchangePackets | Kernel::ReducePackets => None,
            Kernel::ReduceDirect | Kernel::AllReduceDirect => None,
            Kernel::CopyEntry | Kernel::CopyExit => None,
            Kernel::ExchangeDirect => kernel("collective_exchange_direct_bulk", 4, 14),
            Kernel::ExchangeChunks => kernel("collective_exchange_bulk", 5, 6 + 4 + 4),
            Kernel::ReduceChunks => kernel("collective_reduce_bulk", 16 + 3, 6),
            Kernel::AllReduceChunks => kernel("collective_all_reduce_bulk", 16 + 7, 6 + 4 + 4),
        }
    }

    /// Data transport.
    pub const fn transport(self) -> Transport {
        match self {
            Kernel::ExchangePackets | Kernel::ReducePackets => Transport::Packets,
            Kernel::ExchangeChunks | Kernel::ReduceChunks | Kernel::AllReduceChunks => {
                Transport::Chunks
            }
            Kernel::ExchangeDirect | Kernel::ReduceDirect | Kernel::AllReduceDirect => {
                Transport::Direct
            }
            Kernel::CopyEntry | Kernel::CopyExit => Transport::Direct,
        }
    }
}

/// Kernel with bulk copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BulkKernel {
    /// Entry point name.
    pub name: &'static str,
    /// Threads per block.
    pub threads: u32,
    /// Chunk stages in shared memory.
    pub stages: u32,
}

/// Algorithm for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceAlgorithm {
    /// Messages as packets, in one step; an all-reduce sends whole vectors to all ranks.
    OneShot,
    /// Messages as chunks with flags; in an all-reduce, each rank reduces one slice and then sends the result.
    TwoShot,
    /// Direct access to tensors in the symmetric heap or in registered memory: kernels write outputs, and reductions
    /// read inputs.
    Direct,
    /// Copies by copy engines into outputs in symmetric memory, between two meetings; not by name.
    CopyEngine,
}

impl DeviceAlgorithm {
    /// Algorithm name.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceAlgorithm::OneShot => "one_shot",
            DeviceAlgorithm::TwoShot => "two_shot",
            DeviceAlgorithm::Direct => "direct",
            DeviceAlgorithm::CopyEngine => "copy_engine",
        }
    }

    /// Kernel algorithm with this name, for example `two_shot`.
    pub fn from_name(name: &str) -> Option<DeviceAlgorithm> {
        [DeviceAlgorithm::OneShot, DeviceAlgorithm::TwoShot, DeviceAlgorithm::Direct]
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }
}

/// Caller options; equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CallOptions {
    /// Algorithm; by default the faster one for the size.
    pub algorithm: Option<DeviceAlgorithm>,
    /// Maximum block count; the constructor's value by default.
    pub num_sms: Option<u32>,
    /// Chunk size in bytes; derived from the message length by default.
    pub chunk_bytes: Option<u32>,
    /// Lets copy engines move messages from [`COPIED_MESSAGE`] bytes up between symmetric tensors, if no algorithm is
    /// given and the operation has no arithmetic.
    pub copy_engine: bool,
}

/// Launch parameters for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LaunchPlan {
    pub kernel: Kernel,
    pub grid: u32,
    pub threads: u32,
    /// By packets.
    pub units_per_block: u32,
    /// Chunk size in bytes, also for direct calls with bulk copies.
    pub chunk_bytes: u32,
    /// By rank.
    pub messages: Vec<Message>,
}

/// Largest total in bytes, sent by a rank to all peers, for which packets are faster: in an all-reduce, whose chunks
/// take two steps, and in the other operations. A packet takes twice its data bytes; a chunk adds a fence and a flag.
const PACKETS_OF_ALL_REDUCE: u64 = 1 << 20;
const PACKETS_OF_OTHERS: u64 = 512 << 10;
/// The same limits where a direct call is the alternative.
const PACKETS_OF_ALL_REDUCE_BESIDE_DIRECT: u64 = 640 << 10;
const PACKETS_OF_OTHERS_BESIDE_DIRECT: u64 = 448 << 10;
/// Shortest message that copy engines move by [`CallOptions::copy_engine`], in bytes. Not measured.
pub(super) const COPIED_MESSAGE: u64 = 1 << 20;
/// Message size in bytes per block above which a direct call uses one more block.
const DIRECT_BYTES: u64 = 8 << 10;
/// Packet units per block above which a call uses one more block.
const UNITS_OF_A_BLOCK: u64 = 128;
/// Minimum chunk size for a message that is divided, in bytes.
const MIN_CHUNK: u64 = 4096;

impl LaunchPlan {
    /// Launch plan for a call on rank `rank`. `symmetric`: all ranks have mapped the tensors that peers access in a
    /// direct call.
    ///
    /// # Errors
    /// Errors from [`DeviceOperation::check`]; [`DeviceError::TooLarge`], [`DeviceError::Zero`],
    /// [`DeviceError::Algorithm`], [`DeviceError::NotDirect`], [`DeviceError::NotByCopyEngine`].
    pub fn new(
        operation: &DeviceOperation,
        element_bytes: u64,
        rank: u32,
        layout: &Layout,
        options: CallOptions,
        symmetric: bool,
    ) -> Result<LaunchPlan, DeviceError> {
        let Layout { ranks, blocks, .. } = *layout;
        operation.check(ranks)?;
        check_bytes(operation, element_bytes, ranks)?;
        let limit = match options.num_sms {
            Some(0) => return Err(DeviceError::Zero { what: "num_sms" }),
            Some(given) if given > blocks => {
                let (what, given, limit) = ("num_sms of a call", given.into(), blocks.into());
                return Err(DeviceError::TooLarge { what, given, limit });
            }
            given => given.unwrap_or(blocks),
        };
        let longest = operation.longest().map(|count| count * element_bytes);
        let all_reduce = matches!(operation, DeviceOperation::AllReduce { .. });
        let most = match (symmetric, all_reduce) {
            (true, true) => PACKETS_OF_ALL_REDUCE_BESIDE_DIRECT,
            (true, false) => PACKETS_OF_OTHERS_BESIDE_DIRECT,
            (false, true) => PACKETS_OF_ALL_REDUCE,
            (false, false) => PACKETS_OF_OTHERS,
        };
        let requested = options.algorithm;
        // An empty tensor has no address.
        let has_data = longest != Some(0);
        if requested == Some(DeviceAlgorithm::Direct) && !symmetric && has_data {
            return Err(operation.not_direct());
        }
        if requested == Some(DeviceAlgorithm::CopyEngine) {
            operation.check_copied(symmetric || !has_data)?;
        }
        let copies = options.copy_engine && symmetric && !operation.reduces();
        let requested = match longest {
            Some(bytes) if requested.is_none() && copies && bytes >= COPIED_MESSAGE => {
                Some(DeviceAlgorithm::CopyEngine)
            }
            _ => requested,
        };
        let algorithm = choose(longest, layout, limit, most, requested, symmetric)?;
        let sliced = algorithm != DeviceAlgorithm::OneShot;
        let messages = messages(operation, element_bytes, rank, ranks, sliced);
        use DeviceAlgorithm::{CopyEngine, Direct, OneShot, TwoShot};
        let kernel = match (operation.reduces() && ranks > 1, algorithm) {
            (false, OneShot) => Kernel::ExchangePackets,
            (false, TwoShot) => Kernel::ExchangeChunks,
            (false, Direct) => Kernel::ExchangeDirect,
            // Operations that reduce are rejected above.
            (_, CopyEngine) => Kernel::CopyEntry,
            (true, OneShot) => Kernel::ReducePackets,
            (true, TwoShot) if all_reduce => Kernel::AllReduceChunks,
            (true, TwoShot) => Kernel::ReduceChunks,
            (true, Direct) if all_reduce => Kernel::AllReduceDirect,
            (true, Direct) => Kernel::ReduceDirect,
        };
        if algorithm == OneShot {
            let units = longest.unwrap_or(0).div_ceil(UNIT);
            let each = UNITS_OF_A_BLOCK.min(layout.slots.into());
            let grid = units.div_ceil(each).clamp(1, limit.into()) as u32;
            let units_per_block = units.div_ceil(grid.into()) as u32;
            let threads = units_per_block.max(ranks).next_multiple_of(32).clamp(32, 512);
            return Ok(LaunchPlan {
                kernel,
                grid,
                threads,
                units_per_block,
                chunk_bytes: 0,
                messages,
            });
        }
        let (grid, chunk_bytes) = chunks(kernel, longest, layout, limit, options)?;
        // One block meets its counterparts on the peers; only a twin copies chunks.
        let grid = if kernel == Kernel::CopyEntry { 1 } else { grid };
        let threads = kernel.threads();
        Ok(LaunchPlan { kernel, grid, threads, units_per_block: 0, chunk_bytes, messages })
    }

    /// True if all peers are sent the same bytes.
    pub fn is_same_for_all(&self, rank: u32) -> bool {
        let sent = |message: &Message| (message.send_at, message.send_bytes);
        let own = self.messages.get(rank as usize).map(sent);
        self.messages.iter().all(|message| Some(sent(message)) == own)
    }

    /// True if `input`, `output` and all messages in them start at multiples of 16 bytes.
    pub fn is_aligned(&self, input: u64, output: u64) -> bool {
        let of = |message: &Message| message.send_at | message.receive_at;
        let all = self.messages.iter().map(of).fold(input | output, |all, at| all | at);
        all.is_multiple_of(UNIT)
    }
}

/// Rejects tensors that no memory holds.
fn check_bytes(
    operation: &DeviceOperation,
    element_bytes: u64,
    ranks: u32,
) -> Result<(), DeviceError> {
    let limit = (1u64 << 46) / u64::from(ranks) / element_bytes.max(1);
    let most = match operation {
        DeviceOperation::AllToAllUneven { sent, received } => {
            sent.iter().chain(received).copied().max().unwrap_or(0)
        }
        other => other.longest().unwrap_or(0),
    };
    match most > limit {
        true => Err(DeviceError::TooLarge { what: "the number of elements", given: most, limit }),
        false => Ok(()),
    }
}

/// Algorithm selection for a call, with or without a known longest message.
fn choose(
    longest: Option<u64>,
    layout: &Layout,
    limit: u32,
    most_by_packets: u64,
    requested: Option<DeviceAlgorithm>,
    symmetric: bool,
) -> Result<DeviceAlgorithm, DeviceError> {
    let capacity = u64::from(limit) * u64::from(layout.slots) * UNIT;
    let peers = u64::from((layout.ranks - 1).max(1));
    match (requested, longest) {
        (Some(DeviceAlgorithm::OneShot), Some(bytes)) if bytes <= capacity => {
            Ok(DeviceAlgorithm::OneShot)
        }
        (Some(DeviceAlgorithm::OneShot), Some(bytes)) => {
            Err(DeviceError::Algorithm { algorithm: "one_shot", bytes, limit: capacity })
        }
        (Some(DeviceAlgorithm::OneShot), None) => Err(DeviceError::Uneven),
        // A call without data has no chunks, but must meet the peers.
        (_, Some(0)) => Ok(DeviceAlgorithm::OneShot),
        (None, Some(bytes)) if bytes <= capacity && bytes * peers <= most_by_packets => {
            Ok(DeviceAlgorithm::OneShot)
        }
        (Some(DeviceAlgorithm::Direct), _) => Ok(DeviceAlgorithm::Direct),
        (Some(DeviceAlgorithm::CopyEngine), _) => Ok(DeviceAlgorithm::CopyEngine),
        (None, _) if symmetric => Ok(DeviceAlgorithm::Direct),
        _ => Ok(DeviceAlgorithm::TwoShot),
    }
}

/// Message length between two ranks from which fewer blocks are faster, in bytes, and how many chunk blocks an
/// all-reduce and the other operations then use. Measured on two GPUs (`benchmarks/results/gpu_collectives.jsonl`).
const LONG_MESSAGE: u64 = 8 << 20;
const LONG_ALL_REDUCE_BLOCKS: u32 = 20;
const LONG_BLOCKS: u32 = 24;
/// The same limits for direct calls without arithmetic.
const LONG_DIRECT_MESSAGE: u64 = 1 << 20;
const LONG_DIRECT_BLOCKS: u32 = 16;

/// Block count for direct reductions among more than two ranks, measured on four GPUs: more blocks are not faster.
const DIRECT_REDUCTION_BLOCKS: u32 = 32;

/// Maximum block count for a call with `message` bytes per message.
fn usual_blocks(kernel: Kernel, ranks: u32, message: u64) -> u32 {
    let (long, usual) = match (kernel, ranks) {
        (Kernel::ReduceDirect | Kernel::AllReduceDirect, 3..) => (0, DIRECT_REDUCTION_BLOCKS),
        (_, 3..) => return u32::MAX,
        (Kernel::ExchangeDirect, _) => (LONG_DIRECT_MESSAGE, LONG_DIRECT_BLOCKS),
        (Kernel::ExchangeChunks | Kernel::ReduceChunks, _) => (LONG_MESSAGE, LONG_BLOCKS),
        (Kernel::AllReduceChunks, _) => (LONG_MESSAGE, LONG_ALL_REDUCE_BLOCKS),
        _ => return u32::MAX,
    };
    if message >= long { usual } else { u32::MAX }
}

/// Grid and chunk bytes.
fn chunks(
    kernel: Kernel,
    longest: Option<u64>,
    layout: &Layout,
    limit: u32,
    requested: CallOptions,
) -> Result<(u32, u32), DeviceError> {
    let capacity = layout.chunk_capacity;
    if let Some(given) = requested.chunk_bytes {
        if given == 0 || given > capacity || !u64::from(given).is_multiple_of(UNIT) {
            let (given, limit) = (given.into(), capacity.into());
            return Err(DeviceError::TooLarge {
                what: "chunk_bytes, a multiple of 16,",
                given,
                limit,
            });
        }
        return Ok((limit, given));
    }
    // Not all ranks know the longest part in an uneven call.
    let Some(longest) = longest else { return Ok((limit, capacity)) };
    let all_reduce = matches!(kernel, Kernel::AllReduceChunks | Kernel::AllReduceDirect);
    let message = if all_reduce { longest.div_ceil(layout.ranks.into()) } else { longest };
    let limit = match requested.num_sms {
        None => limit.min(usual_blocks(kernel, layout.ranks, message)),
        Some(_) => limit,
    };
    // A chunk takes about a microsecond whatever the length, so that each block has few long ones.
    let each = message.div_ceil(limit.into()).next_multiple_of(UNIT);
    let is_direct = kernel.transport() == Transport::Direct;
    let shortest = if is_direct { DIRECT_BYTES } else { MIN_CHUNK };
    let chunk = each.max(shortest).min(capacity.into());
    let grid = message.div_ceil(chunk).clamp(1, limit.into());
    Ok((grid as u32, chunk as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operation(kind: u8, count: u64, root: u32) -> DeviceOperation {
        match kind {
            0 => DeviceOperation::AllReduce { count },
            1 => DeviceOperation::ReduceScatter { count },
            2 => DeviceOperation::Reduce { count, root },
            3 => DeviceOperation::AllGather { count },
            4 => DeviceOperation::AllToAll { count },
            5 => DeviceOperation::Broadcast { count, root },
            6 => DeviceOperation::Gather { count, root },
            7 => DeviceOperation::Scatter { count, root },
            _ => DeviceOperation::Barrier,
        }
    }

    proptest! {
        /// All ranks launch equal grids, and packets and chunks fit in the memory.
        #[test]
        fn plans_are_equal_on_all_ranks_and_fit(
            kind in 0u8..9, count in prop_oneof![0u64..200, 0u64..10_000_000], ranks in prop_oneof![1u32..9, 1u32..65],
            blocks in 1u32..40, num_sms in prop::option::of(1u32..40), root in 0u32..65, symmetric: bool,
        ) {
            let layout = Layout::new(ranks, blocks);
            let operation = operation(kind, count, root % ranks);
            let options = CallOptions { num_sms, ..CallOptions::default() };
            let plan = |rank| LaunchPlan::new(&operation, 2, rank, &layout, options, symmetric);
            if num_sms.is_some_and(|given| given > blocks) {
                prop_assert!(plan(0).is_err());
                return Ok(());
            }
            let first = plan(0).unwrap();
            prop_assert!(first.grid >= 1 && first.grid <= num_sms.unwrap_or(blocks));
            prop_assert!(first.threads.is_multiple_of(32) && first.threads <= first.kernel.threads());
            for rank in 0..ranks {
                let plan = plan(rank).unwrap();
                prop_assert_eq!(
                    (plan.kernel, plan.grid, plan.threads, plan.units_per_block, plan.chunk_bytes),
                    (first.kernel, first.grid, first.threads, first.units_per_block, first.chunk_bytes)
                );
                let longest = plan.messages.iter().map(|message| message.longer).max().unwrap();
                if plan.kernel.transport() == Transport::Packets {
                    let units = longest.div_ceil(UNIT);
                    prop_assert!(plan.units_per_block <= layout.slots);
                    prop_assert!(units <= u64::from(plan.grid) * u64::from(plan.units_per_block));
                } else {
                    prop_assert!(plan.chunk_bytes <= layout.chunk_capacity && plan.chunk_bytes >= 16);
                    prop_assert!(u64::from(plan.chunk_bytes).is_multiple_of(UNIT));
                    prop_assert!(longest > 0);
                }
            }
        }
    }

    #[test]
    fn short_vectors_take_one_step_and_long_ones_two() {
        let layout = Layout::new(2, 32);
        let kernel = |count, algorithm| {
            let options = CallOptions { algorithm, ..CallOptions::default() };
            LaunchPlan::new(&DeviceOperation::AllReduce { count }, 2, 0, &layout, options, false)
                .map(|plan| plan.kernel)
        };
        assert_eq!(kernel(512, None).unwrap(), Kernel::ReducePackets);
        assert_eq!(kernel(1 << 20, None).unwrap(), Kernel::AllReduceChunks);
        let two_shot = Some(DeviceAlgorithm::TwoShot);
        assert_eq!(kernel(512, two_shot).unwrap(), Kernel::AllReduceChunks);
        let error = kernel(1 << 20, Some(DeviceAlgorithm::OneShot)).unwrap_err().to_string();
        assert!(error.contains("one_shot of 2097152 bytes"), "{error}");
        // Calls without data meet the peers by packets.
        assert_eq!(kernel(0, two_shot).unwrap(), Kernel::ReducePackets);
    }

    #[test]
    fn copy_engines_move_what_is_requested_and_long_messages_where_preferred() {
        let layout = Layout::new(2, 32);
        let plan = |operation: DeviceOperation, options, symmetric| {
            LaunchPlan::new(&operation, 2, 0, &layout, options, symmetric)
        };
        let gather = |count| DeviceOperation::AllGather { count };
        let algorithm = Some(DeviceAlgorithm::CopyEngine);
        let forced = CallOptions { algorithm, ..CallOptions::default() };
        let preferred = CallOptions { copy_engine: true, ..CallOptions::default() };
        let long = COPIED_MESSAGE / 2;
        for (count, options, symmetric, kernel) in [
            (1, forced, true, Kernel::CopyEntry),
            (0, forced, false, Kernel::ExchangePackets),
            (long, preferred, true, Kernel::CopyEntry),
            (long - 1, preferred, true, Kernel::ExchangeDirect),
            (long, preferred, false, Kernel::ExchangeChunks),
            (long, CallOptions::default(), true, Kernel::ExchangeDirect),
        ] {
            let plan = plan(gather(count), options, symmetric).unwrap();
            assert_eq!(plan.kernel, kernel, "{count} {options:?} {symmetric}");
            assert!(kernel != Kernel::CopyEntry || (plan.grid, plan.threads) == (1, 32));
        }
        let reduce = DeviceOperation::AllReduce { count: long };
        let kernel = plan(reduce.clone(), preferred, true).unwrap().kernel;
        assert_eq!(kernel, Kernel::AllReduceDirect);
        for (operation, symmetric, expected) in [
            (reduce, true, "copy_engine of all_reduce: reductions"),
            (DeviceOperation::Gather { count: 1, root: 0 }, true, "copy_engine of gather: no form"),
            (gather(1), false, "copy_engine of all_gather: the output must be symmetric"),
        ] {
            let error = plan(operation, forced, symmetric).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn what_a_plan_cannot_carry_is_rejected() {
        let layout = Layout::new(2, 4);
        let plan = |operation, options| LaunchPlan::new(&operation, 4, 0, &layout, options, false);
        let with =
            |num_sms, chunk_bytes| CallOptions { num_sms, chunk_bytes, ..CallOptions::default() };
        let large = DeviceOperation::AllReduce { count: 1 << 20 };
        for (options, expected) in [
            (with(Some(0), None), "num_sms is 0"),
            (with(Some(5), None), "num_sms of a call is 5: expected at most 4"),
            (with(None, Some(24)), "chunk_bytes"),
            (with(None, Some(1 << 20)), "chunk_bytes"),
        ] {
            let error = plan(large.clone(), options).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let none = CallOptions::default();
        for (operation, expected) in [
            (DeviceOperation::Broadcast { count: 1, root: 2 }, "rank is 2: expected one below 2"),
            (DeviceOperation::AllGather { count: u64::MAX / 2 }, "the number of elements"),
            (
                DeviceOperation::AllToAllUneven { sent: vec![1], received: vec![1, 1] },
                "1 parts are sent: expected one for each of 2 ranks",
            ),
        ] {
            let error = plan(operation, none).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Grid for a call on long symmetric or ordinary tensors, with the default SM count.
    #[test]
    fn long_messages_take_more_blocks_among_more_than_two_ranks() {
        use crate::device::config::DeviceConfig;
        let grid = |ranks, kind, symmetric| {
            let layout = Layout::new(ranks, DeviceConfig::usual_sms(ranks));
            let options = CallOptions::default();
            let operation = operation(kind, 64 << 20, 0);
            LaunchPlan::new(&operation, 2, 0, &layout, options, symmetric).unwrap().grid
        };
        for (kind, of_two, of_four) in [(0, [20, 32], [64, 32]), (3, [24, 16], [64, 64])] {
            assert_eq!([false, true].map(|symmetric| grid(2, kind, symmetric)), of_two);
            assert_eq!([false, true].map(|symmetric| grid(4, kind, symmetric)), of_four);
        }
        assert_eq!(grid(9, 3, false), 32);
    }

    #[test]
    fn vectors_that_are_not_aligned_are_noticed() {
        let layout = Layout::new(2, 4);
        let none = CallOptions::default();
        let plan = |count| {
            let operation = DeviceOperation::AllGather { count };
            LaunchPlan::new(&operation, 2, 1, &layout, none, false).unwrap()
        };
        assert!(plan(8).is_aligned(16, 32));
        assert!(!plan(8).is_aligned(16, 34));
        assert!(!plan(7).is_aligned(16, 32), "the second part starts at 14");
        assert!(plan(7).is_same_for_all(1));
    }
}
