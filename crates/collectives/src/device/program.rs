//! Kernels on one GPU: compiled and loaded by reduction and element type, and launched.

use super::arguments::{ArgumentBlock, TensorsOfRanks, argument};
use super::copies::{Copies, CopyStreams};
use super::error::DeviceError;
use super::family::FAMILY;
use super::layout::Layout;
use super::plan::{BulkKernel, Kernel, LaunchPlan};
use super::transfers::{self, TransferBlock, TransferPlan};
use crate::reduction::{Element, Reduction};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use weft_cuda::{Context, Device, Function, Module, RelaxedCapture, Start, Stream};
use weft_gpu::jit::{self, Cache, CompileRequest};
use weft_gpu::kernels::SourceFile;

/// Path and text of each source file.
pub const SOURCES: &[SourceFile] = weft_gpu::sources![
    "collectives/arguments.cuh",
    "collectives/bulk.cuh",
    "collectives/channel.cuh",
    "collectives/chunks.cuh",
    "collectives/direct.cuh",
    "collectives/elements.cuh",
    "collectives/float8.cuh",
    "collectives/packets.cuh",
    "collectives/transfer_arguments.cuh",
    "exchange.cu",
    "reduce.cu",
    "transfers.cu",
];

/// Reduction and element type.
pub type Arithmetic = (Reduction, Element);

/// Compile request for a reduction's kernels, or for the kernels without arithmetic.
fn request(layout: &Layout, arithmetic: Option<Arithmetic>, arch: &str) -> CompileRequest<'static> {
    let mut defines = layout.defines(FAMILY.first_phase, FAMILY.first_code);
    let name = match arithmetic {
        Some((reduction, element)) => {
            let number = |all: usize| all.to_string();
            let element = Element::ALL.iter().position(|known| *known == element);
            let reduction = Reduction::ALL.iter().position(|known| *known == reduction);
            defines.push(("WEFT_ELEMENT".into(), number(element.unwrap_or(0))));
            defines.push(("WEFT_REDUCTION".into(), number(reduction.unwrap_or(0))));
            "reduce.cu"
        }
        None => "exchange.cu",
    };
    CompileRequest { defines, ..CompileRequest::kernel(name, SOURCES, arch) }
}

/// Compile request for the kernels for `ranks` ranks and grids of at most `blocks` blocks, for tests without a GPU.
pub fn compile_request(
    ranks: u32,
    blocks: u32,
    arithmetic: Option<Arithmetic>,
    arch: &str,
) -> CompileRequest<'static> {
    request(&Layout::new(ranks.max(1), blocks.max(1)), arithmetic, arch)
}

/// Compile request for the send and receive kernel, like [`compile_request`].
pub fn transfers_request(ranks: u32, blocks: u32, arch: &str) -> CompileRequest<'static> {
    transfers_of(&Layout::new(ranks.max(1), blocks.max(1)), arch)
}

fn transfers_of(layout: &Layout, arch: &str) -> CompileRequest<'static> {
    let defines = layout.defines(FAMILY.first_phase, FAMILY.first_code);
    CompileRequest { defines, ..CompileRequest::kernel("transfers.cu", SOURCES, arch) }
}

/// Loaded kernel, with threads and dynamic shared memory per block.
struct LoadedKernel {
    kernel: Kernel,
    function: Function,
    /// Variant with bulk copies.
    bulk: Option<(Function, [u32; 2])>,
}

/// Loaded kernels in one program.
struct Loaded(Vec<LoadedKernel>);

impl Loaded {
    /// Launches a kernel with a plan's size. Every kernel in a plan is loaded with its program.
    ///
    /// # Safety
    /// Same as [`Function::launch`].
    unsafe fn launch(
        &self,
        kernel: Kernel,
        plan: &LaunchPlan,
        aligned: bool,
        start: Start,
        stream: Stream,
        argument: &[u64],
    ) -> Result<(), DeviceError> {
        let Some(known) = self.0.iter().find(|known| known.kernel == kernel) else {
            return Ok(());
        };
        let plain = (&known.function, [plan.threads, 0]);
        let bulk = known.bulk.as_ref().filter(|_| aligned);
        let (function, [threads, shared]) =
            bulk.map_or(plain, |(function, size)| (function, *size));
        let size = [plan.grid, threads, shared];
        // SAFETY: the caller's contract.
        Ok(unsafe { function.launch(size, start, stream, argument.as_ptr().cast()) }?)
    }
}

/// Kernels for a layout on a GPU.
pub(super) struct Programs {
    context: Arc<Context>,
    device: Device,
    layout: Layout,
    cache: Cache,
    start: Start,
    copy_streams: CopyStreams,
    exchange: Loaded,
    transfers: Function,
    reduce: Mutex<HashMap<Arithmetic, Arc<Loaded>>>,
}

impl Programs {
    /// Compiles and loads the kernels without arithmetic.
    pub fn new(layout: Layout, device: Device) -> Result<Programs, DeviceError> {
        let context = Context::primary(device)?;
        let cache = Cache::from_env();
        let exchange = load(&context, device, &layout, &cache, None)?;
        let transfers = load_transfers(&context, device, &layout, &cache)?;
        let start = jit::launch_start(device)?;
        let reduce = Mutex::default();
        let copy_streams = CopyStreams::new(context.clone(), layout.ranks);
        Ok(Programs {
            context,
            device,
            layout,
            cache,
            start,
            copy_streams,
            exchange,
            transfers,
            reduce,
        })
    }

    /// Compiles and loads a reduction's kernels, unless they are loaded.
    pub fn prepare(&self, arithmetic: Arithmetic) -> Result<(), DeviceError> {
        self.reducing(arithmetic).map(drop)
    }

    fn reducing(&self, arithmetic: Arithmetic) -> Result<Arc<Loaded>, DeviceError> {
        let mut known = self.reduce.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = known.get(&arithmetic) {
            return Ok(loaded.clone());
        }
        let (context, device) = (&self.context, self.device);
        let loaded = load(context, device, &self.layout, &self.cache, Some(arithmetic))?;
        let loaded = Arc::new(loaded);
        known.insert(arithmetic, loaded.clone());
        Ok(loaded)
    }

    /// Maximum dynamic shared memory per block over the kernels without arithmetic, in bytes.
    pub fn most_shared(&self) -> u32 {
        let bulk = self.exchange.0.iter().filter_map(|known| known.bulk.as_ref());
        bulk.map(|(_, [_, shared])| *shared).max().unwrap_or(0)
    }

    /// Waits until the device is idle.
    pub fn settle(&self) -> Result<(), DeviceError> {
        Ok(self.context.synchronize()?)
    }

    /// True if a stream is captured, or cannot report whether it is.
    pub fn is_captured(&self, stream: Stream) -> bool {
        let known =
            self.context.enter().ok().and_then(|_bound| weft_cuda::is_capturing(stream).ok());
        known.unwrap_or(true)
    }

    /// Launches a call.
    ///
    /// # Safety
    /// The addresses in `block`, and the memory and tensor addresses on all ranks, are valid on the device until the
    /// kernel has ended, with the bytes in the plan's messages; the stream belongs to the context.
    pub unsafe fn launch(
        &self,
        plan: &LaunchPlan,
        (peers, tensors): (&[u64], Option<&TensorsOfRanks>),
        block: &ArgumentBlock,
        arithmetic: Option<Arithmetic>,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        let words = argument(peers, tensors, &plan.messages, block);
        let aligned = block.aligned != 0;
        if let (Kernel::CopyEntry, Some(tensors)) = (plan.kernel, tensors) {
            let copies = Copies::new(plan, block.rank, block.input, block.output, &tensors.outputs);
            let captured = self.is_captured(stream);
            // SAFETY: as below. The exit follows copies, which have no programmatic end.
            let launch = |kernel, start| unsafe {
                self.exchange.launch(kernel, plan, aligned, start, stream, &words)
            };
            let entry = || launch(Kernel::CopyEntry, self.start);
            let exit = || launch(Kernel::CopyExit, Start::AfterPrevious);
            return self.copy_streams.run(&copies, stream, captured, entry, exit);
        }
        let arithmetic = arithmetic.filter(|_| !Kernel::EXCHANGE.contains(&plan.kernel));
        let reducing = arithmetic.map(|arithmetic| self.reducing(arithmetic)).transpose()?;
        let loaded = reducing.as_deref().unwrap_or(&self.exchange);
        // SAFETY: the argument has the layout of the kernels' struct; the caller's contract covers the addresses. All
        // kernels execute `griddepcontrol.wait` before they access memory.
        unsafe { loaded.launch(plan.kernel, plan, aligned, self.start, stream, &words) }
    }

    /// Launches a batch with sends and receives.
    ///
    /// # Safety
    /// Same as [`Programs::launch`], for the tensors in the plan.
    pub unsafe fn launch_transfers(
        &self,
        plan: &TransferPlan,
        peers: &[u64],
        block: &TransferBlock,
        stream: Stream,
    ) -> Result<(), DeviceError> {
        let words = transfers::argument(peers, &plan.transfers, block);
        let size = [plan.grid, transfers::THREADS, 0];
        // SAFETY: as above.
        Ok(unsafe { self.transfers.launch(size, self.start, stream, words.as_ptr().cast()) }?)
    }
}

fn load_transfers(
    context: &Arc<Context>,
    device: Device,
    layout: &Layout,
    cache: &Cache,
) -> Result<Function, DeviceError> {
    let request = transfers_of(layout, &jit::architecture(device.compute_capability()));
    let compiled = jit::cubin(&request, cache)?;
    let _relaxed = RelaxedCapture::new()?;
    let module = Module::load(context, &compiled.cubin)?;
    let function = module.function(transfers::KERNEL)?;
    // Loads the kernel now, as below.
    function.set_dynamic_shared(0)?;
    Ok(function)
}

fn load(
    context: &Arc<Context>,
    device: Device,
    layout: &Layout,
    cache: &Cache,
    arithmetic: Option<Arithmetic>,
) -> Result<Loaded, DeviceError> {
    let request = request(layout, arithmetic, &jit::architecture(device.compute_capability()));
    let compiled = jit::cubin(&request, cache)?;
    // A stream may be captured in this moment.
    let _relaxed = RelaxedCapture::new()?;
    let module = Module::load(context, &compiled.cubin)?;
    let kernels: &[Kernel] = if arithmetic.is_some() { &Kernel::REDUCE } else { &Kernel::EXCHANGE };
    let function = |name: &str, shared: u32| -> Result<Function, DeviceError> {
        let function = module.function(name)?;
        // Loads the kernel now: at the first launch, CUDA might wait for running kernels.
        function.set_dynamic_shared(shared)?;
        let (registers, spilled) = (function.registers()?, function.local_bytes()?);
        log::debug!("{name}: {registers} registers, {spilled} bytes spilled");
        Ok(function)
    };
    let has_bulk = device.compute_capability().0 >= 9;
    let loaded = |kernel: Kernel| -> Result<LoadedKernel, DeviceError> {
        let mut bulk = None;
        if let Some(BulkKernel { name, threads, stages }) = kernel.bulk().filter(|_| has_bulk) {
            let shared = stages * layout.chunk_capacity;
            let fixed = module.function(name)?.shared_bytes()?;
            // GPUs with less shared memory take the kernels without bulk copies.
            if shared + fixed <= device.max_shared_per_block() {
                bulk = Some((function(name, shared)?, [threads, shared]));
            }
        }
        let function = function(kernel.name(), 0)?;
        Ok(LoadedKernel { kernel, function, bulk })
    };
    Ok(Loaded(kernels.iter().copied().map(loaded).collect::<Result<_, _>>()?))
}
