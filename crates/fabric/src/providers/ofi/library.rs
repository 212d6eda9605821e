//! libfabric, loaded at run time.
//!
//! A copy already loaded into the process is used in any case: two copies would each have separate
//! threads, caches and signal handlers. Otherwise `WEFT_LIBFABRIC` names the library; without it the
//! default paths are tried.

use super::super::dynamic_library::{function, open, open_file, path_of};
use super::{signals, sys};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Environment variable: library path.
pub const PATH: &str = "WEFT_LIBFABRIC";
/// Minimum supported version.
const MIN_VERSION: u32 = sys::version(1, 17);
/// Maximum requested API version; later libraries provide it.
const MAX_API: u32 = sys::version(1, 21);
/// Symbol version whose layouts `sys.rs` declares.
const SYMBOL_VERSION: &CStr = c"FABRIC_1.3";
const NAME: &str = "libfabric.so.1";
/// Paths that EFA's installer uses.
const EFA_PATHS: [&str; 2] =
    ["/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1"];

type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const sys::Info,
    *mut *mut sys::Info,
) -> c_int;

/// Functions that the library exports; all others are reached through library objects.
pub struct Library {
    pub getinfo: GetInfo,
    pub freeinfo: unsafe extern "C" fn(*mut sys::Info),
    pub dupinfo: unsafe extern "C" fn(*const sys::Info) -> *mut sys::Info,
    pub fabric:
        unsafe extern "C" fn(*mut sys::FabricAttr, *mut *mut sys::Fabric, *mut c_void) -> c_int,
    strerror: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Library version.
    version: u32,
    path: PathBuf,
}

impl Library {
    /// This process's library, loaded at the first call.
    ///
    /// # Errors
    /// Reason why it is missing.
    pub fn get() -> Result<&'static Library, &'static str> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(|| signals::preserving_actions(load)).as_ref().map_err(String::as_str)
    }

    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    /// API version to request.
    pub fn api(&self) -> u32 {
        self.version.min(MAX_API)
    }

    /// File that it was loaded from.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Message for an error number, positive or negative.
    pub fn describe(&self, error: c_int) -> String {
        // SAFETY: returns a static string for every number.
        let text = unsafe { CStr::from_ptr((self.strerror)(error.abs())) };
        text.to_string_lossy().into_owned()
    }
}

fn load() -> Result<Library, String> {
    let held = open(NAME, libc::RTLD_NOW | libc::RTLD_NOLOAD);
    let handle = held.or_else(|_| match weft_environment::path(PATH) {
        Some(path) => open_file(&path, libc::RTLD_NOW).map_err(|why| {
            let path = path.display();
            format!("{PATH}={path}: {why}; name a file of libfabric, or unset {PATH}")
        }),
        None => open_default(),
    })?;
    // SAFETY: the library is libfabric, whose functions have these types since symbol version 1.3, and is
    // never unloaded.
    let library = unsafe {
        let version: unsafe extern "C" fn() -> u32 = function(handle, c"fi_version", None)?;
        Library {
            getinfo: function(handle, c"fi_getinfo", Some(SYMBOL_VERSION))?,
            freeinfo: function(handle, c"fi_freeinfo", Some(SYMBOL_VERSION))?,
            dupinfo: function(handle, c"fi_dupinfo", Some(SYMBOL_VERSION))?,
            fabric: function(handle, c"fi_fabric", None)?,
            strerror: function(handle, c"fi_strerror", None)?,
            version: version(),
            path: path_of(version as *const c_void, NAME),
        }
    };
    if library.version < MIN_VERSION {
        let (major, minor) = library.version();
        let path = library.path.display();
        return Err(format!(
            "{path} is libfabric {major}.{minor}: Weft needs 1.17 or later; name a newer one in {PATH}"
        ));
    }
    Ok(library)
}

/// Loads the library from the first default path that has it.
fn open_default() -> Result<*mut c_void, String> {
    let mut problems = Vec::new();
    for path in std::iter::once(NAME).chain(EFA_PATHS) {
        match open(path, libc::RTLD_NOW) {
            Ok(handle) => return Ok(handle),
            Err(why) => problems.push(why),
        }
    }
    let why = problems.swap_remove(0);
    Err(format!("{why}; install libfabric (Debian: libfabric1), or set {PATH} to its file"))
}

/// Error from the call `name` for a negative `result`.
pub fn check(name: &str, result: c_int) -> Result<(), String> {
    if result >= 0 {
        return Ok(());
    }
    let what = Library::get().map_or_else(|_| result.to_string(), |it| it.describe(result));
    Err(format!("{name}: {what}"))
}
