//! How kernels are launched: which of them a call consists of, and with how many blocks.
//!
//! Threads and shared memory of a block follow from how kernels are written, so the program says them of
//! itself (`weft_moe_launch` in `moe.cu`). How many blocks there are is up to the host, and here.

use crate::device::areas::CHUNK;
use crate::device::config::Path;
use crate::error::Error;

/// A kernel of the program, by its entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Counts the experts of each chunk of tokens (bandwidth path).
    PlanCount,
    /// Gives every token its slots (bandwidth path).
    PlanScan,
    /// Tokens leave.
    DispatchSend,
    /// Tokens arrive.
    DispatchRecv,
    /// Both, in one launch.
    Dispatch,
    /// Answers leave.
    CombineSend,
    /// Answers arrive.
    CombineRecv,
    /// Both, in one launch.
    Combine,
}

impl Entry {
    /// All entry points.
    pub const ALL: [Entry; 8] = [
        Entry::PlanCount,
        Entry::PlanScan,
        Entry::DispatchSend,
        Entry::DispatchRecv,
        Entry::Dispatch,
        Entry::CombineSend,
        Entry::CombineRecv,
        Entry::Combine,
    ];

    /// Its name in the program.
    pub fn name(self) -> &'static str {
        match self {
            Entry::PlanCount => "moe_plan_count",
            Entry::PlanScan => "moe_plan_scan",
            Entry::DispatchSend => "moe_dispatch_send",
            Entry::DispatchRecv => "moe_dispatch_recv",
            Entry::Dispatch => "moe_dispatch",
            Entry::CombineSend => "moe_combine_send",
            Entry::CombineRecv => "moe_combine_recv",
            Entry::Combine => "moe_combine",
        }
    }

    /// Whether it waits for peers: what must be on the GPU while they make progress.
    pub fn waits(self) -> bool {
        !matches!(self, Entry::PlanCount | Entry::PlanScan)
    }

    /// Whether a program for this path has it.
    pub fn is_of(self, path: Path) -> bool {
        path == Path::Bandwidth || !matches!(self, Entry::PlanCount | Entry::PlanScan)
    }
}

/// A call, as the user makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Tokens leave.
    DispatchSend,
    /// Tokens arrive.
    DispatchRecv,
    /// Both.
    Dispatch,
    /// Answers leave.
    CombineSend,
    /// Answers arrive.
    CombineRecv,
    /// Both.
    Combine,
}

impl Operation {
    /// The kernels that it consists of, in the order in which they go on the stream.
    pub fn entries(self, path: Path) -> &'static [Entry] {
        let planned = path == Path::Bandwidth;
        match self {
            Operation::DispatchSend if planned => {
                &[Entry::PlanCount, Entry::PlanScan, Entry::DispatchSend]
            }
            Operation::Dispatch if planned => &[Entry::PlanCount, Entry::PlanScan, Entry::Dispatch],
            Operation::DispatchSend => &[Entry::DispatchSend],
            Operation::Dispatch => &[Entry::Dispatch],
            Operation::DispatchRecv => &[Entry::DispatchRecv],
            Operation::CombineSend => &[Entry::CombineSend],
            Operation::CombineRecv => &[Entry::CombineRecv],
            Operation::Combine => &[Entry::Combine],
        }
    }
}

/// A block of a kernel, as the program says it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Threads.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: u32,
    /// Each of them.
    pub block: Block,
}

/// How `entry` is launched for a batch of `given` tokens.
#[inline]
pub fn launch_of(entry: Entry, block: Block, path: Path, sms: Sms, given: u32) -> Launch {
    let grid = match entry {
        // A block for each chunk; the last one also sends the counts, of no tokens too.
        Entry::PlanCount | Entry::PlanScan => given.div_ceil(CHUNK).max(1),
        Entry::DispatchSend | Entry::DispatchRecv | Entry::Dispatch => sms.of_dispatch(path),
        Entry::CombineSend | Entry::CombineRecv | Entry::Combine => sms.of_combine(path),
    };
    Launch { grid, block }
}

/// Streaming multiprocessors that launches may occupy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sms {
    there: u32,
    asked: Option<u32>,
}

/// Blocks of dispatch and of combine on the bandwidth path, unless told otherwise: enough for NVLink,
/// and the rest of the GPU is left to the experts.
const DISPATCH_SMS: u32 = 32;
const COMBINE_SMS: u32 = 64;

impl Sms {
    /// Of `there` that the GPU has, `asked` if the user says so. `sharing` ranks have the same GPU: their
    /// kernels wait for each other, so all of them must find room at once.
    ///
    /// # Errors
    /// [`Error::Zero`] and [`Error::DeviceLimit`].
    pub fn new(there: u32, sharing: u32, asked: Option<u32>) -> Result<Sms, Error> {
        match asked {
            Some(0) => Err(Error::Zero { field: "num_sms" }),
            Some(given) if given > there => Err(Error::DeviceLimit {
                field: "num_sms",
                given: given.into(),
                limit: there.into(),
                reason: "the GPU has no more",
            }),
            _ => Ok(Sms { there: (there / sharing.max(1)).max(1), asked }),
        }
    }

    /// Those of a call of `operation` that asks for `asked`.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] for more than all of its calls may take: they would not be in the account of what
    /// can be on the GPU at once.
    #[inline]
    pub fn of_call(
        self,
        path: Path,
        operation: Operation,
        asked: Option<u32>,
    ) -> Result<Sms, Error> {
        let Some(given) = asked else { return Ok(self) };
        let limit = match operation {
            Operation::DispatchSend | Operation::DispatchRecv | Operation::Dispatch => {
                self.of_dispatch(path)
            }
            Operation::CombineSend | Operation::CombineRecv | Operation::Combine => {
                self.of_combine(path)
            }
        };
        match given {
            0 => Err(Error::Zero { field: "num_sms" }),
            _ if given > limit => Err(Error::DeviceLimit {
                field: "num_sms of a call",
                given: given.into(),
                limit: limit.into(),
                reason: "its all-to-all was made with no more",
            }),
            _ => Ok(Sms { asked, ..self }),
        }
    }

    /// Those of dispatch.
    pub fn of_dispatch(self, path: Path) -> u32 {
        self.of(path, DISPATCH_SMS)
    }

    /// Those of combine.
    pub fn of_combine(self, path: Path) -> u32 {
        self.of(path, COMBINE_SMS)
    }

    fn of(self, path: Path, usual: u32) -> u32 {
        let most = if path == Path::Bandwidth { usual.min(self.there) } else { self.there };
        self.asked.unwrap_or(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(entry: Entry, path: Path, sms: Sms, given: u32) -> u32 {
        let block = Block { threads: 256, shared: 1024 };
        let launch = launch_of(entry, block, path, sms, given);
        assert_eq!(launch.block, block);
        launch.grid
    }

    #[test]
    fn small_batches_take_the_whole_gpu_and_large_ones_leave_most_of_it_alone() {
        let sms = Sms::new(132, 1, None).unwrap();
        for path in [Path::Packets, Path::Latency] {
            assert_eq!(grid(Entry::Dispatch, path, sms, 8), 132);
            assert_eq!(grid(Entry::Combine, path, sms, 8), 132);
        }
        assert_eq!(grid(Entry::DispatchSend, Path::Bandwidth, sms, 4096), DISPATCH_SMS);
        assert_eq!(grid(Entry::Combine, Path::Bandwidth, sms, 4096), COMBINE_SMS);
        let few = Sms::new(132, 1, Some(20)).unwrap();
        assert_eq!(grid(Entry::DispatchRecv, Path::Bandwidth, few, 4096), 20);
        assert_eq!(grid(Entry::CombineSend, Path::Latency, few, 8), 20);
        // A slice of a GPU may have fewer than the default.
        let slice = Sms::new(16, 1, None).unwrap();
        assert_eq!(grid(Entry::Combine, Path::Bandwidth, slice, 4096), 16);
    }

    #[test]
    fn a_call_may_ask_for_fewer_than_its_all_to_all_has() {
        let sms = Sms::new(132, 1, None).unwrap();
        let of = |operation, asked| sms.of_call(Path::Bandwidth, operation, asked);
        let few = of(Operation::DispatchRecv, Some(4)).unwrap();
        assert_eq!(grid(Entry::DispatchRecv, Path::Bandwidth, few, 4096), 4);
        assert_eq!(of(Operation::Combine, None).unwrap(), sms);
        assert!(of(Operation::Combine, Some(COMBINE_SMS)).is_ok());
        let error = of(Operation::Dispatch, Some(COMBINE_SMS)).unwrap_err().to_string();
        assert!(error.contains("num_sms of a call is 64") && error.contains("32"), "{error}");
        assert!(matches!(of(Operation::Combine, Some(0)), Err(Error::Zero { field: "num_sms" })));
        // Plans have a block for each chunk, however few there are.
        assert_eq!(grid(Entry::PlanScan, Path::Bandwidth, few, 4096), 64);
    }

    #[test]
    fn ranks_that_share_a_gpu_share_its_sms() {
        let half = Sms::new(132, 2, None).unwrap();
        assert_eq!(grid(Entry::Dispatch, Path::Latency, half, 8), 66);
        assert_eq!(grid(Entry::Combine, Path::Bandwidth, half, 8), COMBINE_SMS);
        let crowd = Sms::new(4, 8, None).unwrap();
        assert_eq!(grid(Entry::Dispatch, Path::Latency, crowd, 8), 1);
    }

    #[test]
    fn plans_have_a_block_for_each_chunk_of_the_batch() {
        let sms = Sms::new(132, 1, None).unwrap();
        for (given, blocks) in [(0, 1), (1, 1), (64, 1), (65, 2), (4096, 64)] {
            assert_eq!(grid(Entry::PlanCount, Path::Bandwidth, sms, given), blocks);
            assert_eq!(grid(Entry::PlanScan, Path::Bandwidth, sms, given), blocks);
        }
        let names = |operation: Operation| -> Vec<&str> {
            operation.entries(Path::Bandwidth).iter().map(|entry| entry.name()).collect()
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
        for path in Path::ALL {
            assert!(all.iter().flat_map(|o| o.entries(path)).all(|entry| entry.is_of(path)));
        }
    }

    #[test]
    fn sms_that_there_are_not_are_refused() {
        assert!(matches!(Sms::new(132, 1, Some(0)), Err(Error::Zero { field: "num_sms" })));
        let message = Sms::new(132, 1, Some(133)).unwrap_err().to_string();
        assert!(message.contains("num_sms is 133; on a device it is at most 132"), "{message}");
    }
}
