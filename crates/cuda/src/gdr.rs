//! GDRCopy (libgdrapi), loaded at run time: words in GPU memory that the host stores to.
//!
//! GDRCopy's driver maps GPU memory for the host over PCIe. [`MappedWords`] raises words there without a call of CUDA,
//! and kernels poll them without crossing PCIe. The mapping is write-combined, so a plain store may pass earlier
//! ones, and may stay in the processor for long: each word is stored between two store fences. Only x86-64 is supported.
//!
//! Functions and types are those in
//! [gdrapi.h](https://github.com/NVIDIA/gdrcopy/blob/master/include/gdrapi.h) from 2.0 on. This has run over a stand-in for
//! the library, never on GDRCopy.

use crate::error::{Error, Result};
use crate::library::{functions, open, too_old};
use libloading::os::unix::Library;
use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::io::ErrorKind;
use std::path::Path;

/// Environment variable: the libgdrapi file to load.
pub const PATH: &str = "WEFT_LIBGDRAPI";
/// GPU page: memory is mapped in whole ones.
pub const PAGE_BYTES: usize = 1 << 16;

const NAME: &str = "libgdrapi.so.2";
const LIBRARY: &str = "GDRCopy (libgdrapi.so.2)";
const DRIVER: &str = "/dev/gdrdrv";
const INVALID: u32 = libc::EINVAL.unsigned_abs();
const NO_MEMORY: u32 = libc::ENOMEM.unsigned_abs();

/// `gdr_t`.
type Handle = *mut c_void;

/// `gdr_mh_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PinHandle(c_ulong);

/// `gdr_info_t`. The first version ends with `flags`; later ones have `mapping_type`, which `gdr_get_info` does not write.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Info {
    va: u64,
    mapped_size: u64,
    page_size: u32,
    tm_cycles: u64,
    cycles_per_ms: u32,
    flags: c_uint,
    mapping_type: c_uint,
    reserved: u32,
}

functions! {
    /// libgdrapi functions. Each returns an `errno`.
    Api;
    gdr_close(Handle);
    gdr_pin_buffer(Handle, c_ulong, usize, u64, u32, *mut PinHandle);
    gdr_unpin_buffer(Handle, PinHandle);
    gdr_get_info(Handle, PinHandle, *mut Info);
    gdr_map(Handle, PinHandle, *mut *mut c_void, usize);
    gdr_unmap(Handle, PinHandle, *mut c_void, usize);
}

/// `gdr_open`, which returns a pointer.
type Open = unsafe extern "C" fn() -> Handle;

/// Connection to GDRCopy's driver; closed on drop. A forked child neither closes it nor may use it.
pub struct Gdr {
    api: Api,
    handle: Handle,
    process: u32,
}

// SAFETY: any thread may call libgdrapi on a handle, one at a time: this value's calls take it by value or in `drop`.
unsafe impl Send for Gdr {}
// SAFETY: nothing is called through a shared reference.
unsafe impl Sync for Gdr {}

impl Gdr {
    /// Loads libgdrapi, or the library that `WEFT_LIBGDRAPI` names, and connects to the driver. For example, `weft doctor`
    /// reports the error.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`] without the library, [`Error::NoGdrDriver`], [`Error::TooOld`]; [`Error::Unsupported`] on other
    /// processors.
    pub fn open() -> Result<Self> {
        match weft_environment::path(PATH) {
            Some(path) => Self::open_at(&path),
            None => Self::connect([Path::new(NAME)]),
        }
    }

    /// Loads the library at a path, a regular file, and connects to the driver.
    ///
    /// # Errors
    ///
    /// As [`Gdr::open`].
    pub fn open_at(path: &Path) -> Result<Self> {
        // The loader would wait for a pipe's writer.
        weft_environment::open(path)
            .map_err(|error| absent(format!("{}: {error}", path.display())))?;
        Self::connect([path])
    }

    fn connect<'a>(names: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Error::Unsupported {
                device: format!("this processor ({})", std::env::consts::ARCH),
                what: "store to GPU memory over GDRCopy",
                remedy: "use pinned host memory",
            });
        }
        let library: Library = open(names).map_err(absent)?;
        let missing = too_old(LIBRARY, "GDRCopy 2.0 or newer");
        // SAFETY: the library is libgdrapi, and never unloaded: it is forgotten below.
        let api = unsafe { Api::look_up(&library) }.map_err(&missing)?;
        // SAFETY: as above; gdrapi.h declares this signature.
        let connect =
            *unsafe { library.get::<Open>("gdr_open") }.map_err(|_| missing("gdr_open"))?;
        std::mem::forget(library);
        // SAFETY: any thread may open connections.
        let handle = unsafe { connect() };
        if handle.is_null() {
            return Err(Error::NoGdrDriver { why: refusal() });
        }
        Ok(Self { api, handle, process: std::process::id() })
    }

    /// True in the process that opened it: the driver rejects calls by others.
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for Gdr {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: opened once by this value, and used last here.
            report("gdr_close", unsafe { (self.api.gdr_close)(self.handle) });
        }
    }
}

/// Pinned GPU memory; unpinned on drop.
struct Pinned {
    gdr: Gdr,
    handle: PinHandle,
}

impl Pinned {
    fn pin(gdr: Gdr, address: u64, bytes: usize) -> Result<Self> {
        let mut handle = PinHandle(0);
        // SAFETY: writes one handle; the driver checks the address.
        let code =
            unsafe { (gdr.api.gdr_pin_buffer)(gdr.handle, address, bytes, 0, 0, &raw mut handle) };
        check("gdr_pin_buffer", code)?;
        Ok(Self { gdr, handle })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gdr.is_own() {
            let gdr = &self.gdr;
            // SAFETY: pinned once by this value, and unmapped before.
            report("gdr_unpin_buffer", unsafe {
                (gdr.api.gdr_unpin_buffer)(gdr.handle, self.handle)
            });
        }
    }
}

/// u32 words in GPU memory that the host stores to. On drop they are unmapped, then unpinned, then the connection is closed.
pub struct MappedWords {
    pinned: Pinned,
    mapping: *mut c_void,
    bytes: usize,
    first: *mut u32,
    words: usize,
}

// SAFETY: a mapping and handles, which belong to no thread.
unsafe impl Send for MappedWords {}
// SAFETY: through a shared reference words are only stored, each by one instruction.
unsafe impl Sync for MappedWords {}

impl MappedWords {
    /// Maps the words at the start of GPU memory.
    ///
    /// # Safety
    ///
    /// The memory covers whole pages with [`PAGE_BYTES`] and is freed only after this value has been dropped. Stores do not
    /// break what other users assume.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] for no words; [`Error::NotMapped`] for an address that does not begin a page, or that the driver maps
    /// elsewhere; [`Error::Call`] for memory that it cannot pin or map.
    pub unsafe fn map(gdr: Gdr, address: u64, words: usize) -> Result<Self> {
        let wanted = words * size_of::<u32>();
        if wanted == 0 {
            let (what, problem) = ("words in GPU memory", "expected at least 1");
            return Err(Error::Size { what, bytes: wanted, problem });
        }
        if !address.is_multiple_of(PAGE_BYTES as u64) {
            return Err(Error::NotMapped { address, problem: "expected a multiple of 64 KiB" });
        }
        let bytes = wanted.next_multiple_of(PAGE_BYTES);
        let pinned = Pinned::pin(gdr, address, bytes)?;
        let (api, handle, pin) = (&pinned.gdr.api, pinned.gdr.handle, pinned.handle);
        let mut mapping = std::ptr::null_mut();
        // SAFETY: writes one address; the memory has just been pinned.
        check("gdr_map", unsafe { (api.gdr_map)(handle, pin, &raw mut mapping, bytes) })?;
        // From here on, errors unmap it.
        let mut mapped = Self { pinned, mapping, bytes, first: mapping.cast(), words };
        let mut info = Info::default();
        let (api, handle) = (&mapped.pinned.gdr.api, mapped.pinned.gdr.handle);
        // SAFETY: writes one structure, whose last fields later versions have added.
        check("gdr_get_info", unsafe { (api.gdr_get_info)(handle, pin, &raw mut info) })?;
        // The mapping begins at the start of a page, which may lie before the address.
        let offset = address.checked_sub(info.va).filter(|offset| {
            offset + wanted as u64 <= info.mapped_size
                && offset.is_multiple_of(size_of::<u32>() as u64)
        });
        let Some(offset) = offset else {
            return Err(Error::NotMapped { address, problem: "GDRCopy mapped other memory" });
        };
        mapped.first = mapped.mapping.wrapping_byte_add(offset as usize).cast();
        Ok(mapped)
    }

    /// Word count.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.words
    }

    /// Stores a word, behind all earlier stores by this thread.
    ///
    /// # Panics
    ///
    /// For a word beyond the last.
    pub fn set(&self, at: usize, value: u32) {
        assert!(at < self.words, "word {at} of {}", self.words);
        let word = self.first.wrapping_add(at);
        // SAFETY: an aligned word in the mapping, which lives as long as `self`; the caller of `map` permits stores.
        unsafe { store_fenced(word, value) };
    }

    /// Loads a word, across PCIe. Loads by this thread that follow are not moved before it.
    ///
    /// # Panics
    ///
    /// For a word beyond the last.
    pub fn get(&self, at: usize) -> u32 {
        assert!(at < self.words, "word {at} of {}", self.words);
        let word = self.first.wrapping_add(at);
        // SAFETY: an aligned word in the mapping, which lives as long as `self`.
        let value = unsafe { word.read_volatile() };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        value
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        let gdr = &self.pinned.gdr;
        if gdr.is_own() {
            // SAFETY: mapped once by this value, which uses it last here. The fields' destructors unpin it, and close.
            report("gdr_unmap", unsafe {
                (gdr.api.gdr_unmap)(gdr.handle, self.pinned.handle, self.mapping, self.bytes)
            });
        }
    }
}

impl std::fmt::Debug for MappedWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappedWords({})", self.words)
    }
}

impl std::fmt::Debug for Gdr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gdr({:?})", self.handle)
    }
}

/// Stores a word between two store fences. Write-combined stores are ordered neither behind earlier ones nor among
/// themselves, and the second fence sends this one out.
///
/// # Safety
/// The word is aligned and mapped.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn store_fenced(word: *mut u32, value: u32) {
    // SAFETY: stores one word, which the caller has checked, and changes neither flags nor stack. The compiler moves no
    // access across it.
    unsafe {
        std::arch::asm!(
            "sfence",
            "mov dword ptr [{word}], {value:e}",
            "sfence",
            word = in(reg) word,
            value = in(reg) value,
            options(nostack, preserves_flags),
        );
    }
}

/// [`Gdr::open`] refuses other processors.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn store_fenced(_: *mut u32, _: u32) {
    unreachable!("words are mapped only on x86-64");
}

fn absent(why: String) -> Error {
    let remedy = "install GDRCopy's library, or name it: WEFT_LIBGDRAPI";
    Error::Absent { library: LIBRARY, why, remedy }
}

/// Reason for which `gdr_open` failed; it reports none.
fn refusal() -> String {
    match std::fs::OpenOptions::new().read(true).write(true).open(DRIVER) {
        Ok(_) => "the module does not fit libgdrapi.so.2".to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => "no such device".to_owned(),
        Err(error) => text_of(error.raw_os_error().unwrap_or_default()),
    }
}

fn check(call: &'static str, code: u32) -> Result<()> {
    // Some functions return a negative errno.
    match code.cast_signed().unsigned_abs() {
        0 => Ok(()),
        code => Err(Error::Call {
            call,
            code,
            name: "GDRCopy".to_owned(),
            text: text_of(code.cast_signed()),
            remedy: remedy(code),
        }),
    }
}

/// Logs a failure for which a destructor has no remedy.
fn report(call: &'static str, code: u32) {
    if let Err(error) = check(call, code) {
        log::warn!("{error}");
    }
}

/// Text for an `errno`, for example `Invalid argument`.
fn text_of(code: c_int) -> String {
    let text = std::io::Error::from_raw_os_error(code).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Remedy for an `errno`; empty if unknown.
fn remedy(code: u32) -> &'static str {
    match code {
        INVALID => "GDRCopy maps memory of data centre and RTX GPUs only",
        NO_MEMORY => "the GPU's PCIe window may be full: `nvidia-smi -q -d MEMORY` shows BAR1",
        _ => "",
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_stored_between_two_store_fences() {
        const FENCE: [u8; 3] = [0x0f, 0xae, 0xf8];
        let mut words = [1u32, 2, 3];
        // SAFETY: the middle word.
        unsafe { store_fenced(&raw mut words[1], 7) };
        assert_eq!(words, [1, 7, 3]);
        let code: *const u8 = (store_fenced as *const ()).cast();
        // SAFETY: code is readable, and the function begins here.
        let code = unsafe { std::slice::from_raw_parts(code, 64) };
        let mut fences = code.windows(3).enumerate().filter(|(_, bytes)| *bytes == FENCE);
        let (first, _) = fences.next().expect("a fence before the store");
        let (second, _) = fences.next().expect("a fence behind it");
        // One `mov` of two to seven bytes.
        assert!((5..=10).contains(&(second - first)), "{code:x?}");
    }

    #[test]
    fn a_refusal_has_a_text() {
        assert_eq!(text_of(libc::EINVAL), "Invalid argument");
        let error = check("gdr_map", (-libc::EINVAL).cast_unsigned()).unwrap_err().to_string();
        assert_eq!(
            error,
            "gdr_map failed: Invalid argument (GDRCopy, 22); GDRCopy maps memory of data centre and RTX GPUs only"
        );
    }
}
