//! Kernels for a shape on one GPU: compilation and loading.

use crate::device::abi::sources::{PROGRAM, SOURCES};
use crate::device::launch::grid::{BlockSize, Kernel, SmBudget, launch_size};
use crate::device::options::types::TransferPath;
use crate::device::shape::DeviceShape;
use crate::error::Error;
use std::sync::Arc;
use weft_cuda::{Context, Device, Function, Module, PinnedMemory, Start, Stream, copy_async};
use weft_gpu::domain::OperatorLaunch;
use weft_gpu::jit::{self, Cache, CompileRequest};

/// Symbol with the block sizes: u32 pairs (threads, bytes) in [`Kernel::ALL`] order.
const BLOCKS: &str = "weft_moe_launch";
type Pairs = [[u32; 2]; Kernel::ALL.len()];

/// Kernel compile time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BuildInfo {
    /// Seconds.
    pub seconds: f64,
    /// True if they came from the cache.
    pub cached: bool,
}

/// Loaded kernels for a shape.
pub(crate) struct Program {
    pub(super) context: Arc<Context>,
    pub(super) kernels: [Option<(Function, BlockSize)>; Kernel::ALL.len()],
    pub(super) path: TransferPath,
    pub(super) sms: SmBudget,
    /// Launch start rule.
    pub(super) start: Start,
    pub(super) build: BuildInfo,
    /// Counts on the host, by channel.
    pub(super) host_counts: PinnedMemory,
}

impl Program {
    /// Compiles and loads the kernels for `shape`, or takes them from the cache.
    pub fn new(
        shape: &DeviceShape,
        device: Device,
        sms: SmBudget,
        cache: &Cache,
    ) -> Result<Program, Error> {
        let context = Context::primary(device)?;
        let request = CompileRequest {
            defines: shape.defines(),
            ..CompileRequest::kernel(
                PROGRAM,
                SOURCES,
                &jit::architecture(device.compute_capability()),
            )
        };
        let compiled = jit::cubin(&request, cache)?;
        let module = Module::load(&context, &compiled.cubin)?;
        let (path, pairs) = (shape.path(), read_pairs(&context, &module)?);
        let mut kernels = [const { None }; Kernel::ALL.len()];
        for kernel in Kernel::ALL.into_iter().filter(|kernel| kernel.is_of(path)) {
            let function = module.function(kernel.name())?;
            let [threads, shared] = pairs[kernel as usize];
            let limit = device.max_shared_per_block();
            let needed = shared + function.shared_bytes()?;
            if needed > limit {
                return Err(Error::DeviceLimit {
                    field: "the shared memory per block, which hidden and top_k decide,",
                    given: needed.into(),
                    limit: limit.into(),
                    reason: "the GPU has no more",
                });
            }
            // Loads the kernel now. CUDA would otherwise load it at the first launch, and may then wait for
            // running kernels: for a peer's kernel, which waits for this one.
            function.set_dynamic_shared(shared)?;
            log::debug!(
                "{}: {threads} threads, {shared} bytes of shared memory, {} registers, {} bytes spilled",
                kernel.name(),
                function.registers()?,
                function.local_bytes()?,
            );
            kernels[kernel as usize] = Some((function, BlockSize { threads, shared }));
        }
        let config = shape.config();
        let sms = sms.for_batch(path, config.ranks, config.max_tokens, shape.reply_bytes());
        let build = BuildInfo { seconds: compiled.seconds, cached: compiled.cached };
        let bytes = shape.config().channels as usize * host_count_words(shape.local_experts()) * 4;
        let host_counts = PinnedMemory::alloc(&context, bytes)?;
        let start = jit::launch_start(device)?;
        Ok(Program { context, kernels, path, sms, start, build, host_counts })
    }

    /// The largest launch, for the residency account.
    pub fn resident(&self, shape: &DeviceShape, concurrent: bool) -> Result<OperatorLaunch, Error> {
        let config = shape.config();
        let name = format!(
            "the all-to-all with hidden {}, top_k {}, max_tokens {}",
            config.hidden, config.top_k, config.max_tokens
        );
        let mut largest: Option<OperatorLaunch> = None;
        // The plan's kernels do not wait.
        let waiting = Kernel::ALL.iter().filter(|kernel| kernel.waits());
        for &kernel in waiting {
            let Some((function, block)) = &self.kernels[kernel as usize] else { continue };
            let grid = launch_size(kernel, *block, self.path, self.sms, config.max_tokens).grid;
            let BlockSize { threads, shared } = *block;
            let per_sm = function.blocks_per_sm(threads, shared)?;
            let registers = function.registers()?;
            let (name, shared) = (name.clone(), shared + function.shared_bytes()?);
            let one = OperatorLaunch { name, grid, per_sm, threads, registers, shared, concurrent };
            let part =
                |one: &OperatorLaunch| u64::from(one.grid) * 64 / u64::from(one.per_sm.max(1));
            if largest.as_ref().is_none_or(|other| part(&one) > part(other)) {
                largest = Some(one);
            }
        }
        Ok(largest.unwrap_or(OperatorLaunch {
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

/// Words per channel in [`Program::host_counts`]: needed room, ticket (written last), counts, offsets.
pub(crate) fn host_count_words(local_experts: u32) -> usize {
    2 * local_experts as usize + 3
}

/// Reads the block sizes from the program.
fn read_pairs(context: &Arc<Context>, module: &Module) -> Result<Pairs, Error> {
    const BYTES: usize = size_of::<Pairs>();
    let (address, bytes) = module.variable(BLOCKS)?;
    if bytes != BYTES {
        let (cubin, problem) = (bytes, "expected the program of this version of Weft");
        return Err(weft_cuda::Error::Cubin { bytes: cubin, problem }.into());
    }
    let _current = context.enter()?;
    let pinned = PinnedMemory::alloc(context, BYTES)?;
    let stream = Stream::create(context)?;
    copy_async(pinned.device_address(), address, BYTES, stream.stream())?;
    stream.synchronize()?;
    // SAFETY: the allocation has this size and page alignment, and the copy into it is complete.
    Ok(unsafe { pinned.host().cast::<Pairs>().read() })
}
