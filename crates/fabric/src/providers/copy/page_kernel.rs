//! Page lists as kernel launches: a copy engine takes about 2 us of the host for each copy, however short.
//!
//! Pages collect until the queue's next event and become one launch, or several for long lists, on at most
//! `WEFT_COPY_SMS` SMs. Without NVRTC, and on an unknown GPU, the copy engines move them.

use super::engine::PageCopy;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use weft_cuda::{Context, Function, Module, OwnedStream, PinnedMemory, Start, Stream, nvrtc};

const SOURCE: &str = include_str!("pages.cu");
const SMS: &str = "WEFT_COPY_SMS";
/// Default and maximum for `WEFT_COPY_SMS`.
const DEFAULT_SMS: u32 = 24;
const MAX_SMS: u32 = 1024;
/// Pages from this length on go to the copy engine.
pub(super) const LONGEST_PAGE: u64 = 512 << 10;
/// Lists shorter than this go to the copy engine.
pub(super) const SHORTEST_LIST: usize = 4;
/// Pages in one launch.
pub(super) const LONGEST_LIST: usize = 1024;
/// Launches in flight; page lists beyond these go to the copy engine.
const TABLES: usize = 32;
const TABLE_BYTES: usize = LONGEST_LIST * size_of::<PageCopy>();
const THREADS: u32 = 512;
/// Pages that a block takes at a time. Each word of the table entries has a thread.
const TILE: usize = 64;
/// Longest chunk that a warp copies at a time.
const LONGEST_CHUNK: u64 = 8 << 10;

/// Kernel argument.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageList {
    table: u64,
    count: u32,
    tile: u32,
    chunks: u32,
    chunk: u32,
}

/// A list's division over blocks and warps.
fn divide(table: u64, pages: &[PageCopy], sms: u32) -> (u32, PageList) {
    let longest = pages.iter().map(|page| page.length).max().unwrap_or(0).max(1);
    let chunks = longest.div_ceil(LONGEST_CHUNK);
    let chunk = longest.div_ceil(chunks).next_multiple_of(16);
    let tile = pages.len().div_ceil(sms as usize).clamp(1, TILE);
    let blocks = pages.len().div_ceil(tile).clamp(1, sms as usize) as u32;
    let (tile, chunks, chunk) = (tile as u32, chunks as u32, chunk as u32);
    (blocks, PageList { table, count: pages.len() as u32, tile, chunks, chunk })
}

/// SMs that launches may occupy, by `WEFT_COPY_SMS`; 0: copy engines only.
pub(crate) fn sms_from_env() -> Result<u32, String> {
    let text = weft_environment::text(SMS).map_err(|error| error.to_string())?;
    let Some(text) = text else { return Ok(DEFAULT_SMS) };
    let number = text.parse().ok().filter(|number| *number <= MAX_SMS);
    number.ok_or_else(|| format!("{SMS}={text}: expected 0 to {MAX_SMS}"))
}

/// The kernel on one device, with tables.
pub(super) struct PageKernel {
    function: Function,
    sms: u32,
    /// All tables, allocated at once: an allocation of pinned memory waits for kernels that run, and these
    /// may wait for the launch.
    tables: PinnedMemory,
    /// Tables that no launch reads.
    free: Vec<TableId>,
}

/// A table that a launch reads until the event behind it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TableId(u32);

impl PageKernel {
    /// Compiles the kernel, once in this process for each architecture, and loads it.
    pub fn new(
        context: &Arc<Context>,
        capability: (u32, u32),
        sms: u32,
    ) -> weft_cuda::Result<Self> {
        let function = Module::load(context, &cubin(capability)?)?.function("weft_copy_pages")?;
        let tables = PinnedMemory::alloc(context, TABLES * TABLE_BYTES)?;
        let free = (0..TABLES as u32).map(TableId).collect();
        Ok(PageKernel { function, sms, tables, free })
    }

    /// Launches the kernel for empty pages. The first launch loads it, which waits for kernels that run.
    pub fn load(&mut self, stream: &OwnedStream) -> weft_cuda::Result<()> {
        let empty = [PageCopy { to: 0, from: 0, length: 0 }; SHORTEST_LIST];
        // SAFETY: empty pages have no bytes that a kernel could access.
        let table = unsafe { self.launch(&empty, stream.stream()) }?;
        stream.synchronize()?;
        table.into_iter().for_each(|table| self.release(table));
        Ok(())
    }

    /// Adds the list's launch to a stream; `None` if it is too short for one, or all tables are in use.
    ///
    /// # Safety
    /// As for a copy of each page on that stream. The table is released only after the launch has ended.
    pub unsafe fn launch(
        &mut self,
        pages: &[PageCopy],
        stream: Stream,
    ) -> weft_cuda::Result<Option<TableId>> {
        debug_assert!(pages.len() <= LONGEST_LIST);
        if pages.len() < SHORTEST_LIST {
            return Ok(None);
        }
        let Some(id) = self.free.pop() else { return Ok(None) };
        let offset = id.0 as usize * TABLE_BYTES;
        // SAFETY: each table has room for the longest list, and no launch reads this one.
        unsafe {
            let table = self.tables.host().add(offset).cast::<PageCopy>();
            table.copy_from_nonoverlapping(pages.as_ptr(), pages.len());
        }
        let table = self.tables.device_address() + offset as u64;
        let (blocks, list) = divide(table, pages, self.sms);
        let argument = (&raw const list).cast::<c_void>();
        // SAFETY: the argument has the kernel's layout; the caller is responsible for the pages' addresses.
        let launched = unsafe {
            self.function.launch([blocks, THREADS, 0], Start::AfterPrevious, stream, argument)
        };
        if let Err(error) = launched {
            self.free.push(id);
            return Err(error);
        }
        Ok(Some(id))
    }

    /// True if launches may still run: their tables have not come back.
    pub fn is_busy(&self) -> bool {
        self.free.len() < TABLES
    }

    /// Takes back a table whose launch has ended.
    pub fn release(&mut self, table: TableId) {
        self.free.push(table);
    }
}

/// Compute capability: `(9, 0)` for Hopper.
type Capability = (u32, u32);

/// Machine code by capability.
static CUBINS: Mutex<BTreeMap<Capability, Arc<[u8]>>> = Mutex::new(BTreeMap::new());

/// The machine code for a GPU, compiled once in this process.
fn cubin(capability: Capability) -> weft_cuda::Result<Arc<[u8]>> {
    let mut cubins = CUBINS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cubin) = cubins.get(&capability) {
        return Ok(cubin.clone());
    }
    let (major, minor) = capability;
    let source = nvrtc::Source { name: "pages.cu", text: SOURCE, headers: &[] };
    let options = [
        format!("--gpu-architecture=sm_{major}{minor}"),
        "--std=c++17".to_owned(),
        format!("-DWEFT_TILE={TILE}"),
    ];
    let cubin: Arc<[u8]> = nvrtc::compile(&source, &options)?.into();
    cubins.insert(capability, cubin.clone());
    Ok(cubin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The kernel's walk over a list: the bytes of each page that some warp copies, in any order.
    fn walk(
        blocks: u32,
        list: PageList,
        pages: &[PageCopy],
        mut copied: impl FnMut(usize, u64, u64),
    ) {
        for block in 0..blocks {
            let mut start = block * list.tile;
            while start < list.count {
                let inside = list.tile.min(list.count - start);
                for each in 0..inside * list.chunks {
                    let page = (start + each / list.chunks) as usize;
                    let offset = u64::from(each % list.chunks) * u64::from(list.chunk);
                    if offset < pages[page].length {
                        let length = u64::from(list.chunk).min(pages[page].length - offset);
                        copied(page, offset, length);
                    }
                }
                start += blocks * list.tile;
            }
        }
    }

    /// NVRTC is in the folder `WEFT_NVRTC_DIR`, in this checkout's Python environment, or in the system.
    #[test]
    #[cfg_attr(miri, ignore = "isolated miri has no files")]
    fn the_kernel_compiles_for_gpus_that_are_not_here() {
        let folder = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().path();
        let environment = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/lib");
        let pythons = std::fs::read_dir(environment).into_iter().flatten().map(folder);
        for python in pythons {
            let packages = std::fs::read_dir(python.join("site-packages/nvidia"));
            for package in packages.into_iter().flatten().map(folder) {
                nvrtc::add_search_path(package.join("lib"));
            }
        }
        if let Some(folder) = weft_environment::path("WEFT_NVRTC_DIR") {
            nvrtc::add_search_path(folder);
        }
        if let Err(error) = nvrtc::version() {
            eprintln!("skipped: {error}; or set WEFT_NVRTC_DIR to the folder that has it");
            return;
        }
        for capability in [(8, 0), (9, 0), (10, 0)] {
            assert!(cubin(capability).unwrap().len() > 1000);
        }
        assert!(Arc::ptr_eq(&cubin((9, 0)).unwrap(), &cubin((9, 0)).unwrap()));
    }

    proptest! {
        #[test]
        fn every_byte_of_a_list_is_copied_once(
            lengths in prop::collection::vec(0..LONGEST_PAGE, 1..200),
            short in any::<bool>(),
            sms in 1..=200u32,
        ) {
            let limit = if short { 5000 } else { LONGEST_PAGE };
            let page = |length: &u64| PageCopy { to: 0, from: 0, length: length % limit };
            let pages: Vec<PageCopy> = lengths.iter().map(page).collect();
            let (blocks, list) = divide(0, &pages, sms);
            prop_assert!(blocks <= sms && list.tile as usize <= TILE && list.chunk % 16 == 0);
            prop_assert!(u64::from(list.chunk) <= LONGEST_CHUNK);
            let mut next = vec![0; pages.len()];
            let mut in_order = true;
            walk(blocks, list, &pages, |page, offset, length| {
                in_order &= next[page] == offset;
                next[page] += length;
            });
            let lengths: Vec<u64> = pages.iter().map(|page| page.length).collect();
            prop_assert!(in_order);
            prop_assert_eq!(next, lengths);
        }
    }
}
