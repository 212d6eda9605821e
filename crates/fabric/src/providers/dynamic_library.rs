//! Libraries loaded at run time: `dlopen` with errors as text.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Loads a library. `flags` go to `dlopen`.
///
/// # Errors
/// The loader's reason.
pub fn open(name: &str, flags: c_int) -> Result<*mut c_void, String> {
    open_bytes(name.as_bytes(), flags)
}

/// Loads a library that the user names: a regular file, since the loader would wait for a pipe's writer,
/// or a name without a folder, which the loader searches.
///
/// # Errors
/// Reason from the system or the loader.
pub fn open_file(path: &Path, flags: c_int) -> Result<*mut c_void, String> {
    let name = path.as_os_str().as_bytes();
    if name.contains(&b'/') {
        weft_environment::open(path).map_err(|error| error.to_string())?;
    }
    open_bytes(name, flags)
}

fn open_bytes(name: &[u8], flags: c_int) -> Result<*mut c_void, String> {
    let name = CString::new(name).map_err(|_| "path with a zero byte".to_owned())?;
    // SAFETY: loading runs the library's initialisers, which any program may run at any time.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if handle.is_null() { Err(last_error()) } else { Ok(handle) }
}

fn last_error() -> String {
    // SAFETY: returns null or a string that is valid until this thread's next such call.
    unsafe {
        let error = libc::dlerror();
        if error.is_null() {
            return "the loader reports no reason".into();
        }
        CStr::from_ptr(error).to_string_lossy().into_owned()
    }
}

/// Function by name, with a symbol version if one is given.
///
/// # Safety
/// `F` is the function's type, and `handle` a library that is never unloaded.
pub unsafe fn function<F: Copy>(
    handle: *mut c_void,
    name: &CStr,
    version: Option<&CStr>,
) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the handle is open; both strings end with a zero.
    let symbol = unsafe {
        match version {
            None => libc::dlsym(handle, name.as_ptr()),
            Some(version) => libc::dlvsym(handle, name.as_ptr(), version.as_ptr()),
        }
    };
    if symbol.is_null() {
        let name = name.to_string_lossy();
        return Err(format!("missing symbol {name}: {}", last_error()));
    }
    // SAFETY: `F` is a pointer to this function by the caller's contract.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&symbol) })
}

/// File that contains a function; `default` where the loader has no name for it.
pub fn path_of(function: *const c_void, default: &str) -> PathBuf {
    // SAFETY: all zero is a valid value; `dladdr` fills it in if it returns other than zero, with a
    // string that lives as long as the library.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(function, &mut found) == 0 || found.dli_fname.is_null() {
            return PathBuf::from(default);
        }
        PathBuf::from(CStr::from_ptr(found.dli_fname).to_string_lossy().into_owned())
    }
}
