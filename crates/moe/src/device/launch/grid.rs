//! Kernels for each operation, and launch sizes.
//!
//! The program itself defines each block's threads and shared memory (`weft_moe_launch` in `moe.cu`); the
//! host defines how many blocks, in this file.

use crate::device::options::types::TransferPath;
use crate::device::shape::channel_layout::CHUNK;
use crate::error::Error;

/// A kernel in the program, by entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Counts experts and ranks in each chunk of tokens (bandwidth path).
    PlanCount,
    /// Assigns slots to each token (bandwidth path).
    PlanScan,
    /// Tokens leave.
    DispatchSend,
    /// Tokens arrive.
    DispatchRecv,
    /// Both, in one launch.
    Dispatch,
    /// Replies leave.
    CombineSend,
    /// Replies arrive.
    CombineRecv,
    /// Both, in one launch.
    Combine,
    /// Counts come to the host.
    Counts,
}

impl Kernel {
    /// All kernel points.
    pub const ALL: [Kernel; 9] = [
        Kernel::PlanCount,
        Kernel::PlanScan,
        Kernel::DispatchSend,
        Kernel::DispatchRecv,
        Kernel::Dispatch,
        Kernel::CombineSend,
        Kernel::CombineRecv,
        Kernel::Combine,
        Kernel::Counts,
    ];

    /// Entry point in the program.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::PlanCount => "moe_plan_count",
            Kernel::PlanScan => "moe_plan_scan",
            Kernel::DispatchSend => "moe_dispatch_send",
            Kernel::DispatchRecv => "moe_dispatch_recv",
            Kernel::Dispatch => "moe_dispatch",
            Kernel::CombineSend => "moe_combine_send",
            Kernel::CombineRecv => "moe_combine_recv",
            Kernel::Combine => "moe_combine",
            Kernel::Counts => "moe_counts",
        }
    }

    /// True if it waits for peers, so that it must be resident while they make progress.
    pub fn waits(self) -> bool {
        !matches!(self, Kernel::PlanCount | Kernel::PlanScan)
    }

    /// True if a program on this path has it.
    pub fn is_of(self, path: TransferPath) -> bool {
        path == TransferPath::Bandwidth || !matches!(self, Kernel::PlanCount | Kernel::PlanScan)
    }
}

/// Call operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Tokens leave.
    DispatchSend,
    /// Tokens arrive.
    DispatchRecv,
    /// Both.
    Dispatch,
    /// Replies leave.
    CombineSend,
    /// Replies arrive.
    CombineRecv,
    /// Both.
    Combine,
}

impl Operation {
    /// Kernels for the operation, in stream order.
    pub fn kernels(self, path: TransferPath) -> &'static [Kernel] {
        let planned = path == TransferPath::Bandwidth;
        match self {
            Operation::DispatchSend if planned => {
                &[Kernel::PlanCount, Kernel::PlanScan, Kernel::DispatchSend]
            }
            Operation::Dispatch if planned => {
                &[Kernel::PlanCount, Kernel::PlanScan, Kernel::Dispatch]
            }
            Operation::DispatchSend => &[Kernel::DispatchSend],
            Operation::Dispatch => &[Kernel::Dispatch],
            Operation::DispatchRecv => &[Kernel::DispatchRecv],
            Operation::CombineSend => &[Kernel::CombineSend],
            Operation::CombineRecv => &[Kernel::CombineRecv],
            Operation::Combine => &[Kernel::Combine],
        }
    }
}

/// Kernel block size, as the program defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Threads.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared: u32,
}

/// Launch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchSize {
    /// Block count.
    pub grid: u32,
    /// Size of each block.
    pub block: BlockSize,
}

/// Launch size of `kernel` for a batch with `given` tokens.
#[inline]
pub fn launch_size(
    kernel: Kernel,
    block: BlockSize,
    path: TransferPath,
    sms: SmBudget,
    given: u32,
) -> LaunchSize {
    let grid = match kernel {
        // One block for each chunk; the last one also sends the counts, so there is at least one.
        Kernel::PlanCount | Kernel::PlanScan => given.div_ceil(CHUNK).max(1),
        Kernel::DispatchSend | Kernel::DispatchRecv | Kernel::Dispatch => sms.of_dispatch(path),
        Kernel::CombineSend | Kernel::CombineRecv | Kernel::Combine => sms.of_combine(path),
        Kernel::Counts => 1,
    };
    LaunchSize { grid, block }
}

/// SMs that launches may occupy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmBudget {
    available: u32,
    requested: Option<u32>,
    packet_blocks: Option<PacketBlocks>,
}

/// Blocks with work in a batch on the packets path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PacketBlocks {
    dispatch: u32,
    combine: u32,
}

/// Reply bytes that a combine team adds at a time: 16 for each of `COMBINE_THREADS` in `combine.cuh`.
const ADDED_BYTES: u64 = 16 * 224;

/// Default block counts for dispatch and combine on the bandwidth path: enough for NVLink; the other SMs are
/// left to the experts.
const DISPATCH_SMS: u32 = 32;
const COMBINE_SMS: u32 = 64;

impl SmBudget {
    /// Budget on a GPU with `available` SMs; `requested` is the user's limit. `sharing` ranks share the GPU:
    /// their kernels wait for each other, so all must be resident at once.
    ///
    /// # Errors
    /// [`Error::Zero`] and [`Error::DeviceLimit`].
    pub fn new(available: u32, sharing: u32, requested: Option<u32>) -> Result<SmBudget, Error> {
        match requested {
            Some(0) => Err(Error::Zero { field: "num_sms" }),
            Some(given) if given > available => Err(Error::DeviceLimit {
                field: "num_sms",
                given: given.into(),
                limit: available.into(),
                reason: "the GPU has no more",
            }),
            _ => Ok(SmBudget {
                available: (available / sharing.max(1)).max(1),
                requested,
                packet_blocks: None,
            }),
        }
    }

    /// The budget with the block counts that rounds with `max_tokens` on `ranks` ranks have work for, on the
    /// packets path.
    pub fn for_batch(
        self,
        path: TransferPath,
        ranks: u32,
        max_tokens: u32,
        reply_bytes: u64,
    ) -> SmBudget {
        let rows = ranks.saturating_mul(max_tokens);
        let pieces = u64::from(max_tokens).saturating_mul(reply_bytes.div_ceil(ADDED_BYTES));
        let blocks = PacketBlocks {
            // A block receives one row, or sends one token or one rank's line of counts.
            dispatch: rows.max(ranks.saturating_add(max_tokens)).min(self.available),
            // A block sends one reply or the signals, or adds one token chunk.
            combine: rows
                .saturating_add(1)
                .max(u32::try_from(pieces).unwrap_or(u32::MAX))
                .min(self.available),
        };
        SmBudget { packet_blocks: (path == TransferPath::Packets).then_some(blocks), ..self }
    }

    /// The budget for a call to `operation` with a separate limit.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] above the all-to-all's limit, which the residency account includes.
    #[inline]
    pub fn of_call(
        self,
        path: TransferPath,
        operation: Operation,
        requested: Option<u32>,
    ) -> Result<SmBudget, Error> {
        let Some(given) = requested else { return Ok(self) };
        let limit = match operation {
            Operation::DispatchSend | Operation::DispatchRecv | Operation::Dispatch => {
                self.most(path, DISPATCH_SMS)
            }
            Operation::CombineSend | Operation::CombineRecv | Operation::Combine => {
                self.most(path, COMBINE_SMS)
            }
        };
        match given {
            0 => Err(Error::Zero { field: "num_sms" }),
            _ if given > limit => Err(Error::DeviceLimit {
                field: "num_sms of a call",
                given: given.into(),
                limit: limit.into(),
                reason: "that is the all-to-all's limit",
            }),
            _ => Ok(SmBudget { requested, ..self }),
        }
    }

    /// SMs for dispatch.
    pub fn of_dispatch(self, path: TransferPath) -> u32 {
        let most = self.most(path, DISPATCH_SMS);
        self.packet_blocks.map_or(most, |blocks| most.min(blocks.dispatch))
    }

    /// SMs for combine.
    pub fn of_combine(self, path: TransferPath) -> u32 {
        let most = self.most(path, COMBINE_SMS);
        self.packet_blocks.map_or(most, |blocks| most.min(blocks.combine))
    }

    /// Maximum number of SMs, regardless of the work.
    fn most(self, path: TransferPath, usual: u32) -> u32 {
        let most = if path == TransferPath::Bandwidth {
            usual.min(self.available)
        } else {
            self.available
        };
        self.requested.unwrap_or(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(kernel: Kernel, path: TransferPath, sms: SmBudget, given: u32) -> u32 {
        let block = BlockSize { threads: 256, shared: 1024 };
        let launch = launch_size(kernel, block, path, sms, given);
        assert_eq!(launch.block, block);
        launch.grid
    }

    #[test]
    fn small_batches_take_the_whole_gpu_and_large_ones_a_part() {
        let sms = SmBudget::new(132, 1, None).unwrap();
        for path in [TransferPath::Packets, TransferPath::Latency] {
            assert_eq!(grid(Kernel::Dispatch, path, sms, 8), 132);
            assert_eq!(grid(Kernel::Combine, path, sms, 8), 132);
        }
        assert_eq!(grid(Kernel::DispatchSend, TransferPath::Bandwidth, sms, 4096), DISPATCH_SMS);
        assert_eq!(grid(Kernel::Combine, TransferPath::Bandwidth, sms, 4096), COMBINE_SMS);
        let few = SmBudget::new(132, 1, Some(20)).unwrap();
        assert_eq!(grid(Kernel::DispatchRecv, TransferPath::Bandwidth, few, 4096), 20);
        assert_eq!(grid(Kernel::CombineSend, TransferPath::Latency, few, 8), 20);
        // A MIG slice may have fewer SMs than the default.
        let slice = SmBudget::new(16, 1, None).unwrap();
        assert_eq!(grid(Kernel::Combine, TransferPath::Bandwidth, slice, 4096), 16);
    }

    #[test]
    fn packets_take_one_block_for_each_unit_of_work() {
        let of = |ranks, max_tokens, reply_bytes| {
            let sms = SmBudget::new(132, 1, None).unwrap();
            let sms = sms.for_batch(TransferPath::Packets, ranks, max_tokens, reply_bytes);
            [Kernel::Dispatch, Kernel::Combine]
                .map(|kernel| grid(kernel, TransferPath::Packets, sms, 1))
        };
        assert_eq!(of(1, 1, 16), [2, 2]);
        assert_eq!(of(2, 1, 14_336), [3, 4]);
        assert_eq!(of(2, 1, 14_352), [3, 5]);
        assert_eq!(of(2, 8, 14_336), [16, 32]);
        assert_eq!(of(8, 8, 14_336), [64, 65]);
        assert_eq!(of(u32::MAX, u32::MAX, u64::MAX), [132, 132]);
        let all = SmBudget::new(132, 1, None).unwrap().for_batch(TransferPath::Latency, 2, 1, 16);
        assert_eq!(grid(Kernel::Dispatch, TransferPath::Latency, all, 1), 132);
        let requested =
            SmBudget::new(132, 1, Some(5)).unwrap().for_batch(TransferPath::Packets, 2, 8, 16);
        assert_eq!(grid(Kernel::Combine, TransferPath::Packets, requested, 1), 5);
        // A call may request the all-to-all's limit, and gets the blocks with work.
        let two = SmBudget::new(132, 1, None).unwrap().for_batch(TransferPath::Packets, 2, 1, 16);
        let call = two.of_call(TransferPath::Packets, Operation::Dispatch, Some(24)).unwrap();
        assert_eq!(grid(Kernel::Dispatch, TransferPath::Packets, call, 1), 3);
        assert!(two.of_call(TransferPath::Packets, Operation::Dispatch, Some(133)).is_err());
    }

    #[test]
    fn a_call_may_lower_the_limit_of_its_all_to_all() {
        let sms = SmBudget::new(132, 1, None).unwrap();
        let of = |operation, requested| sms.of_call(TransferPath::Bandwidth, operation, requested);
        let few = of(Operation::DispatchRecv, Some(4)).unwrap();
        assert_eq!(grid(Kernel::DispatchRecv, TransferPath::Bandwidth, few, 4096), 4);
        assert_eq!(of(Operation::Combine, None).unwrap(), sms);
        assert!(of(Operation::Combine, Some(COMBINE_SMS)).is_ok());
        let error = of(Operation::Dispatch, Some(COMBINE_SMS)).unwrap_err().to_string();
        assert!(error.contains("num_sms of a call is 64") && error.contains("32"), "{error}");
        assert!(matches!(of(Operation::Combine, Some(0)), Err(Error::Zero { field: "num_sms" })));
        // Plans have a block for each chunk, regardless of the budget.
        assert_eq!(grid(Kernel::PlanScan, TransferPath::Bandwidth, few, 4096), 64);
    }

    #[test]
    fn ranks_that_share_a_gpu_share_its_sms() {
        let half = SmBudget::new(132, 2, None).unwrap();
        assert_eq!(grid(Kernel::Dispatch, TransferPath::Latency, half, 8), 66);
        assert_eq!(grid(Kernel::Combine, TransferPath::Bandwidth, half, 8), COMBINE_SMS);
        let crowd = SmBudget::new(4, 8, None).unwrap();
        assert_eq!(grid(Kernel::Dispatch, TransferPath::Latency, crowd, 8), 1);
    }

    #[test]
    fn plans_have_a_block_for_each_chunk_of_the_batch() {
        let sms = SmBudget::new(132, 1, None).unwrap();
        for (given, blocks) in [(0, 1), (1, 1), (64, 1), (65, 2), (4096, 64)] {
            assert_eq!(grid(Kernel::PlanCount, TransferPath::Bandwidth, sms, given), blocks);
            assert_eq!(grid(Kernel::PlanScan, TransferPath::Bandwidth, sms, given), blocks);
        }
        let names = |operation: Operation| -> Vec<&str> {
            operation.kernels(TransferPath::Bandwidth).iter().map(|kernel| kernel.name()).collect()
        };
        let send = ["moe_plan_count", "moe_plan_scan", "moe_dispatch_send"];
        assert_eq!(names(Operation::DispatchSend), send);
        assert_eq!(names(Operation::CombineSend), ["moe_combine_send"]);
    }

    #[test]
    fn every_operation_consists_of_kernels_that_its_path_has() {
        use Operation as O;
        let all = [
            O::DispatchSend,
            O::DispatchRecv,
            O::Dispatch,
            O::CombineSend,
            O::CombineRecv,
            O::Combine,
        ];
        for path in TransferPath::ALL {
            assert!(all.iter().flat_map(|o| o.kernels(path)).all(|kernel| kernel.is_of(path)));
        }
    }

    #[test]
    fn more_sms_than_the_gpu_has_are_rejected() {
        assert!(matches!(SmBudget::new(132, 1, Some(0)), Err(Error::Zero { field: "num_sms" })));
        let message = SmBudget::new(132, 1, Some(133)).unwrap_err().to_string();
        assert!(message.contains("num_sms is 133; on a device it is at most 132"), "{message}");
    }
}
