//! Kernel launches, and counts on the host.

use crate::device::abi::arguments::{
    ArgumentBlock, CombineOutputs, DeviceCounts, DispatchInputs, DispatchOutputs, PlanLocation,
    WORDS,
};
use crate::device::launch::config::LaunchConfig;
use crate::device::launch::grid::{
    BlockSize, Kernel, LaunchSize, Operation, SmBudget, launch_size,
};
use crate::device::launch::program::{BuildInfo, Program, host_count_words};
use crate::device::shape::DeviceShape;
use crate::device::shape::checks::MOST_RANKS;
use crate::error::Error;
use std::hint;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use weft_cuda::{Stream, is_capturing};
use weft_gpu::domain::Domain;

const MOST_WORDS: usize = MOST_RANKS as usize + WORDS;

/// Ticket flag: there was no round to count.
const NOT_COUNTED: u32 = 1 << 31;
/// Host polls before it sleeps, and the sleep length.
const SPIN_LOOKS: u32 = 10_000;
const SLEEP: Duration = Duration::from_micros(100);

/// Call arguments; the rest of the kernel argument is constant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallArguments {
    pub inputs: DispatchInputs,
    pub received: DispatchOutputs,
    pub outputs: u64,
    pub combined: CombineOutputs,
    /// The layer's replica table, or 0.
    pub map: u64,
    pub release: bool,
}

/// A program, and the constant part of the argument.
pub(crate) struct Launcher {
    program: Program,
    /// Channel 0 on every rank.
    peers: Vec<u64>,
    /// By channel.
    numbers: Vec<u32>,
    /// Experts on this rank, and the largest number on any rank.
    experts: (usize, u32),
    positions: u32,
    /// Number of the last request for counts; the result carries it.
    ticket: Mutex<u32>,
    fixed: ArgumentBlock,
}

impl Launcher {
    pub fn new(
        program: Program,
        shape: &DeviceShape,
        peers: Vec<u64>,
        number: u32,
        domain: &Domain,
    ) -> Launcher {
        let (table, watch, rank) = (domain.table(), domain.failures().watch(), domain.rank());
        let (record, abort) = (watch.record_address(), watch.abort_address());
        let fixed = ArgumentBlock { table, record, abort, rank, ..ArgumentBlock::default() };
        let channels = 0..shape.config().channels;
        let numbers = channels.map(|channel| shape.channel_number(number, channel)).collect();
        let experts = shape.placement().experts_of(rank).len();
        let experts = (experts, shape.local_experts());
        let (positions, ticket) = (shape.positions(), Mutex::new(0));
        Launcher { program, peers, numbers, experts, positions, ticket, fixed }
    }

    pub fn build(&self) -> BuildInfo {
        self.program.build
    }

    /// SMs for a dispatch.
    pub fn num_sms(&self) -> u32 {
        self.program.sms.of_dispatch(self.program.path)
    }

    /// Waits until the device is idle.
    pub fn settle(&self) -> Result<(), Error> {
        Ok(self.program.context.synchronize()?)
    }

    /// True if a stream is under capture; `None` if the state is unavailable, as for the default stream
    /// during another capture.
    pub fn is_captured(&self, stream: Stream) -> Option<bool> {
        let _bound = self.program.context.enter().ok()?;
        is_capturing(stream).ok()
    }

    /// Launches a call's kernels on a stream.
    ///
    /// # Safety
    /// The addresses in `call` are device addresses and stay valid until the kernels have ended, with the
    /// byte counts that follow from the shape and `given`; the heap and the watch live as long; the stream
    /// belongs to the program's context.
    pub unsafe fn launch(
        &self,
        operation: Operation,
        launch_config: LaunchConfig,
        call: &CallArguments,
    ) -> Result<(), Error> {
        let Program { path, sms, .. } = &self.program;
        let sms = sms.of_call(*path, operation, launch_config.num_sms)?;
        let sequence = operation.kernels(*path).iter().copied();
        // SAFETY: the caller's contract.
        unsafe { self.launch_sequence(sequence, launch_config, sms, call) }
    }

    /// [`Launcher::launch`] for a kernel sequence.
    unsafe fn launch_sequence(
        &self,
        sequence: impl Iterator<Item = Kernel>,
        launch_config: LaunchConfig,
        sms: SmBudget,
        call: &CallArguments,
    ) -> Result<(), Error> {
        let Program { kernels, path, .. } = &self.program;
        let LaunchConfig { stream, channel, plan: PlanLocation { address: plan, kept }, .. } =
            launch_config;
        // The channel was checked.
        let number = self.numbers.get(channel as usize).copied().unwrap_or(0);
        let positions =
            launch_config.positions.unwrap_or(self.positions).min(self.positions).into();
        let kept_word = kept.into();
        let fixed =
            ArgumentBlock { channel, number, plan, kept: kept_word, positions, ..self.fixed };
        let argument = argument(&self.peers, fixed, call);
        for kernel in sequence.filter(|kernel| kernel.waits() || !kept) {
            // `Program::new` loads every kernel on the path.
            let Some((function, block)) = &kernels[kernel as usize] else { continue };
            let LaunchSize { grid, block } =
                launch_size(kernel, *block, *path, sms, call.inputs.given);
            let BlockSize { threads, shared } = block;
            // SAFETY: the argument is laid out as the kernels' struct (see `ArgumentBlock`); its addresses
            // are the caller's contract. All kernels execute `griddepcontrol.wait` first (`order.cuh`).
            unsafe {
                let size = [grid, threads, shared];
                function.launch(size, self.program.start, stream, argument.as_ptr().cast())
            }?;
        }
        Ok(())
    }
}

impl Launcher {
    /// Launches the count transfer to the host and waits for it; `None` if no tokens are in flight. `look`
    /// fails once the group has failed.
    pub fn counts(
        &self,
        launch_config: LaunchConfig,
        timeout: Duration,
        look: impl Fn() -> Result<(), Error>,
    ) -> Result<Option<DeviceCounts>, Error> {
        // One request at a time, so that tickets rise.
        let mut ticket = self.ticket.lock().unwrap_or_else(PoisonError::into_inner);
        *ticket = (*ticket % (NOT_COUNTED - 1)) + 1;
        let (experts, most) = self.experts;
        let at = launch_config.channel as usize * host_count_words(most) * 4;
        let address = self.program.host_counts.device_address() + at as u64;
        let (counts, offsets) = (address + 8, address + 8 + 4 * u64::from(most));
        let received =
            DispatchOutputs { rows: address, counts, offsets, ..DispatchOutputs::default() };
        let inputs = DispatchInputs { given: *ticket, ..DispatchInputs::default() };
        let call = CallArguments { inputs, received, ..CallArguments::default() };
        // SAFETY: the channel's part of pinned memory lives as long as the program; the kernel reads no
        // array.
        unsafe {
            self.launch_sequence(
                [Kernel::Counts].into_iter(),
                launch_config,
                self.program.sms,
                &call,
            )
        }?;
        // SAFETY: as above; the host reads by atomics, or after the device has written everything.
        let host_counts = |word: usize| unsafe {
            AtomicU32::from_ptr(self.program.host_counts.host().add(at).cast::<u32>().add(word))
        };
        let (begun, mut looks) = (Instant::now(), 0u32);
        let seen = loop {
            let seen = host_counts(1).load(Acquire);
            if seen & !NOT_COUNTED == *ticket {
                break seen;
            }
            look()?;
            if begun.elapsed() >= timeout {
                let (channel, seconds) = (launch_config.channel, timeout.as_secs_f64());
                return Err(Error::CountsLate { channel, seconds });
            }
            match looks {
                ..SPIN_LOOKS => hint::spin_loop(),
                _ => thread::sleep(SLEEP),
            }
            looks = looks.saturating_add(1);
        };
        let words = |first: usize, count: usize| {
            (first..first + count).map(|word| host_counts(word).load(Relaxed)).collect()
        };
        let counts = DeviceCounts {
            experts: words(2, experts),
            offsets: words(2 + most as usize, experts + 1),
            needed: host_counts(0).load(Relaxed),
        };
        Ok((seen & NOT_COUNTED == 0).then_some(counts))
    }
}

/// The kernels' argument, without allocation: the peers, then the block.
fn argument(peers: &[u64], fixed: ArgumentBlock, call: &CallArguments) -> [u64; MOST_WORDS] {
    let CallArguments { outputs, map, release, .. } = *call;
    let block = ArgumentBlock { outputs, map, release: release.into(), ..fixed };
    let mut words = [0; MOST_WORDS];
    words[..peers.len()].copy_from_slice(peers);
    let block = block.of_call(&call.inputs, &call.received, &call.combined).words();
    words[peers.len()..peers.len() + WORDS].copy_from_slice(&block);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_the_peers_and_then_the_block() {
        let fixed = ArgumentBlock { table: 20, rank: 1, channel: 2, ..ArgumentBlock::default() };
        let inputs = DispatchInputs { tokens: 31, given: 5, ..DispatchInputs::default() };
        let combined = CombineOutputs { combined: 52, ..CombineOutputs::default() };
        let call =
            CallArguments { inputs, combined, map: 53, release: true, ..CallArguments::default() };
        let expected = ArgumentBlock {
            table: 20,
            rank: 1,
            channel: 2,
            tokens: 31,
            given: 5,
            combined: 52,
            map: 53,
            release: 1,
            ..ArgumentBlock::default()
        };
        for ranks in [1, 8, MOST_RANKS as usize] {
            let peers: Vec<u64> = (100..).take(ranks).collect();
            let words = argument(&peers, fixed, &call);
            assert_eq!(words[..ranks], peers);
            assert_eq!(words[ranks..ranks + WORDS], expected.words());
            assert!(words[ranks + WORDS..].iter().all(|&word| word == 0));
        }
    }
}
