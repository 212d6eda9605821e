//! The kernels of a shape on one GPU: compiled, loaded and launched.

use crate::device::all_to_all::Site;
use crate::device::arguments::{ArgumentBlock, DispatchInputs, DispatchOutputs, WORDS};
use crate::device::config::{MOST_RANKS, Path};
use crate::device::launch::{Block, Entry, Launch, Operation, Sms, launch_of};
use crate::device::shape::DeviceShape;
use crate::device::sources::{PROGRAM, SOURCES};
use crate::error::Error;
use std::sync::Arc;
use weft_cuda::{
    Context, Device, Function, Module, PinnedMemory, Stream, copy_async, is_capturing,
};
use weft_gpu::domain::{Domain, Resident};
use weft_gpu::jit::{self, Cache, Request};

/// Where the program says how they are launched: u32 pairs in the order of [`Entry::ALL`], threads and bytes.
const BLOCKS: &str = "weft_moe_launch";
type Pairs = [[u32; 2]; Entry::ALL.len()];

const MOST_WORDS: usize = MOST_RANKS as usize + WORDS;

/// What it took to get the kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Build {
    /// Seconds.
    pub seconds: f64,
    /// Whether they had been compiled before.
    pub cached: bool,
}

/// Kernels, ready to be launched once there is a heap.
pub(super) struct Program {
    context: Arc<Context>,
    kernels: [Option<(Function, Block)>; Entry::ALL.len()],
    path: Path,
    sms: Sms,
    build: Build,
}

/// What the kernels call the GPU. Those that move rows use instructions of just this generation.
fn arch((major, minor): (u32, u32)) -> String {
    let only = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{only}")
}

impl Program {
    /// Compiles and loads the kernels of `shape`, or takes them from the cache.
    pub fn new(
        shape: &DeviceShape,
        device: Device,
        sms: Sms,
        cache: &Cache,
    ) -> Result<Program, Error> {
        let context = Context::primary(device)?;
        let request = Request {
            defines: shape.defines(),
            ..Request::kernel(PROGRAM, SOURCES, &arch(device.compute_capability()))
        };
        let compiled = jit::cubin(&request, cache)?;
        let module = Module::load(&context, &compiled.cubin)?;
        let (path, pairs) = (shape.path(), read_pairs(&context, &module)?);
        let mut kernels = [const { None }; Entry::ALL.len()];
        for entry in Entry::ALL.into_iter().filter(|entry| entry.is_of(path)) {
            let function = module.function(entry.name())?;
            let [threads, shared] = pairs[entry as usize];
            let limit = device.max_shared_per_block();
            let needed = shared + function.shared_bytes()?;
            if needed > limit {
                return Err(Error::DeviceLimit {
                    field: "the shared memory of a block, which hidden and top_k decide,",
                    given: needed.into(),
                    limit: limit.into(),
                    reason: "the GPU has no more",
                });
            }
            // This also loads the kernel now. CUDA would otherwise do so at the first launch, and
            // may then wait for kernels that run: for a peer's, which waits for this one.
            function.set_dynamic_shared(shared)?;
            log::debug!(
                "{}: {threads} threads, {shared} bytes of shared memory, {} registers, {} bytes spilt",
                entry.name(),
                function.registers()?,
                function.local_bytes()?,
            );
            kernels[entry as usize] = Some((function, Block { threads, shared }));
        }
        let build = Build { seconds: compiled.seconds, cached: compiled.cached };
        Ok(Program { context, kernels, path, sms, build })
    }

    /// Its largest launch, for the account of what must be on the GPU at once.
    pub fn resident(&self, shape: &DeviceShape, concurrent: bool) -> Result<Resident, Error> {
        let config = shape.config();
        let name = format!(
            "the all-to-all of hidden {}, top_k {}, max_tokens {}",
            config.hidden, config.top_k, config.max_tokens
        );
        let mut largest: Option<Resident> = None;
        // Those of the plan wait for nobody.
        let waiting = Entry::ALL.iter().filter(|entry| entry.waits());
        for &entry in waiting {
            let Some((function, block)) = &self.kernels[entry as usize] else { continue };
            let grid = launch_of(entry, *block, self.path, self.sms, config.max_tokens).grid;
            let Block { threads, shared } = *block;
            let per_sm = function.blocks_per_sm(threads, shared)?;
            let registers = function.registers()?;
            let (name, shared) = (name.clone(), shared + function.shared_bytes()?);
            let one = Resident { name, grid, per_sm, threads, registers, shared, concurrent };
            let part = |one: &Resident| u64::from(one.grid) * 64 / u64::from(one.per_sm.max(1));
            if largest.as_ref().is_none_or(|other| part(&one) > part(other)) {
                largest = Some(one);
            }
        }
        Ok(largest.unwrap_or(Resident {
            name,
            grid: 0,
            per_sm: 1,
            threads: 0,
            registers: 0,
            shared: 0,
            concurrent,
        }))
    }
}

/// What the program says of its kernels.
fn read_pairs(context: &Arc<Context>, module: &Module) -> Result<Pairs, Error> {
    const BYTES: usize = size_of::<Pairs>();
    let (address, bytes) = module.variable(BLOCKS)?;
    if bytes != BYTES {
        let (cubin, problem) = (bytes, "it is of another version of Weft");
        return Err(weft_cuda::Error::Cubin { bytes: cubin, problem }.into());
    }
    let _current = context.enter()?;
    let pinned = PinnedMemory::alloc(context, BYTES)?;
    let stream = Stream::create(context)?;
    copy_async(pinned.device_address(), address, BYTES, stream.stream())?;
    stream.synchronize()?;
    // SAFETY: as many bytes as were allocated, on a page's boundary, and the copy into them is done.
    Ok(unsafe { pinned.host().cast::<Pairs>().read() })
}

/// What a call gives the kernels; the rest of their argument never changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Call {
    pub channel: u32,
    pub inputs: DispatchInputs,
    pub received: DispatchOutputs,
    pub outputs: u64,
    pub combined: u64,
    pub release: bool,
}

/// A program, and the part of its argument that never changes.
pub(super) struct Launcher {
    program: Program,
    /// Channel 0 of every rank.
    peers: Vec<u64>,
    fixed: ArgumentBlock,
}

impl Launcher {
    pub fn new(program: Program, peers: Vec<u64>, domain: &Domain) -> Launcher {
        let (table, watch, rank) = (domain.table(), domain.alarm().watch(), domain.rank());
        let (record, abort) = (watch.record_address(), watch.abort_address());
        let fixed = ArgumentBlock { table, record, abort, rank, ..ArgumentBlock::default() };
        Launcher { program, peers, fixed }
    }

    pub fn build(&self) -> Build {
        self.program.build
    }

    /// SMs of a dispatch.
    pub fn num_sms(&self) -> u32 {
        self.program.sms.of_dispatch(self.program.path)
    }

    /// Waits until the device has done all that was asked of it.
    pub fn settle(&self) -> Result<(), Error> {
        Ok(self.program.context.synchronize()?)
    }

    /// Whether what is put on a stream goes into a graph, as far as can be told: the default stream cannot be asked
    /// while another is being captured.
    pub fn may_be_captured(&self, stream: Stream) -> bool {
        let Ok(_bound) = self.program.context.enter() else { return true };
        is_capturing(stream).unwrap_or(true)
    }

    /// Puts the kernels of a call on a stream.
    ///
    /// # Safety
    /// The addresses of `call` are the device's and stay good until the kernels have ended, each with as
    /// many bytes as the shape and `given` say; the heap and the watch live as long; the stream is
    /// one of the program's context.
    pub unsafe fn launch(
        &self,
        operation: Operation,
        site: Site,
        call: &Call,
    ) -> Result<(), Error> {
        let Program { kernels, path, sms, .. } = &self.program;
        let (stream, sms) = (site.stream, sms.of_call(*path, operation, site.num_sms)?);
        let argument = argument(&self.peers, self.fixed, call);
        for &entry in operation.entries(*path) {
            // Every entry of the path is there: see `Program::new`.
            let Some((function, block)) = &kernels[entry as usize] else { continue };
            let Launch { grid, block } = launch_of(entry, *block, *path, sms, call.inputs.given);
            let Block { threads, shared } = block;
            // SAFETY: the argument has the layout of the kernels' struct (see `ArgumentBlock`), and
            // the caller answers for what it names.
            unsafe { function.launch(grid, threads, shared, stream, argument.as_ptr().cast()) }?;
        }
        Ok(())
    }
}

/// The kernels' argument, without an allocation: the peers, then the block.
fn argument(peers: &[u64], fixed: ArgumentBlock, call: &Call) -> [u64; MOST_WORDS] {
    let Call { channel, outputs, combined, release, .. } = *call;
    let block = ArgumentBlock { channel, outputs, combined, release: release.into(), ..fixed };
    let mut words = [0; MOST_WORDS];
    words[..peers.len()].copy_from_slice(peers);
    let block = block.of_call(&call.inputs, &call.received).words();
    words[peers.len()..peers.len() + WORDS].copy_from_slice(&block);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_the_peers_and_then_the_block() {
        let fixed = ArgumentBlock { table: 20, rank: 1, ..ArgumentBlock::default() };
        let inputs = DispatchInputs { tokens: 31, given: 5, ..DispatchInputs::default() };
        let call = Call { channel: 2, inputs, combined: 52, release: true, ..Call::default() };
        let expected = ArgumentBlock {
            table: 20,
            rank: 1,
            channel: 2,
            tokens: 31,
            given: 5,
            combined: 52,
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

    #[test]
    fn gpus_with_instructions_of_their_own_are_named_with_them() {
        assert_eq!(arch((9, 0)), "sm_90a");
        assert_eq!(arch((10, 0)), "sm_100a");
        assert_eq!(arch((8, 0)), "sm_80");
    }
}
