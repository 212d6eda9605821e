//! Search for NVRTC.

use crate::error::{Error, Result};
use crate::library::{functions, open_with, too_old};
use cudarc::nvrtc::sys;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use sys::{nvrtcProgram, nvrtcResult};

const LIBRARY: &str = "CUDA's compiler (NVRTC)";
const SONAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

functions! {
    /// NVRTC functions.
    Api, declared in sys as nvrtcResult;
    nvrtcVersion(*mut c_int, *mut c_int);
    nvrtcCreateProgram(
        *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char,
        *const *const c_char,
    );
    nvrtcDestroyProgram(*mut nvrtcProgram);
    nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
    nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
}

// Not in `Api`: it takes a result, which cudarc declares as an enumeration.
type Describe = unsafe extern "C" fn(u32) -> *const c_char;

/// Loaded NVRTC.
pub(super) struct Nvrtc {
    pub(super) api: Api,
    pub(super) version: (u32, u32),
    pub(super) location: PathBuf,
    error_text: Describe,
}

/// Search folders, and NVRTC once found.
struct Search {
    folders: Vec<PathBuf>,
    found: Option<&'static Nvrtc>,
}

static SEARCH: Mutex<Search> = Mutex::new(Search { folders: Vec::new(), found: None });

/// Adds a folder to the search; without effect once NVRTC was found.
pub fn add_search_path(folder: impl Into<PathBuf>) {
    let folder = folder.into();
    let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if !search.folders.contains(&folder) {
        search.folders.push(folder);
    }
}

/// This process's NVRTC, from the first that exists: a library that is loaded already (such as by PyTorch), the search
/// folders, CUDA_HOME, the system.
pub(super) fn nvrtc() -> Result<&'static Nvrtc> {
    let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = search.found {
        return Ok(found);
    }
    let home = weft_environment::path("CUDA_HOME");
    let nvrtc = Nvrtc::new(find(&search.folders, home.as_deref())?)?;
    load_builtins(&nvrtc);
    Ok(search.found.insert(Box::leak(Box::new(nvrtc))))
}

/// Searches all places. A failure is not cached, since folders may be added later.
fn find(folders: &[PathBuf], home: Option<&Path>) -> Result<Library> {
    for soname in SONAMES.map(Path::new) {
        if let Ok(library) = open_with(soname, RTLD_LAZY | RTLD_LOCAL | libc::RTLD_NOLOAD) {
            return Ok(library);
        }
    }
    let mut problems = Vec::new();
    for candidate in candidates(folders, home) {
        match open_with(&candidate, RTLD_LAZY | RTLD_LOCAL) {
            Ok(library) => return Ok(library),
            Err(problem) => problems.push(problem),
        }
    }
    Err(Error::Absent {
        library: LIBRARY,
        why: problems.join("; "),
        remedy: "install NVIDIA's package nvidia-cuda-nvrtc with pip (PyTorch for CUDA brings it), \
                 or set CUDA_HOME to a CUDA toolkit",
    })
}

/// Existing files in folders, then names for the system's loader.
fn candidates(folders: &[PathBuf], home: Option<&Path>) -> Vec<PathBuf> {
    let home = home.map(|home| home.join("lib64"));
    let toolkit = Path::new("/usr/local/cuda/lib64").to_owned();
    let in_folder = |folder: &PathBuf| SONAMES.map(|soname| folder.join(soname));
    let given =
        folders.iter().chain(home.as_ref()).flat_map(in_folder).filter(|file| file.exists());
    let system = SONAMES.map(PathBuf::from).into_iter();
    given
        .chain(system)
        .chain(in_folder(&toolkit).into_iter().filter(|file| file.exists()))
        .collect()
}

impl Nvrtc {
    fn new(library: Library) -> Result<Self> {
        // Never unloaded, like all CUDA libraries.
        let library = Box::leak(Box::new(library));
        let missing = too_old(LIBRARY, "NVRTC of CUDA 12.0 or newer");
        // SAFETY: the library is NVRTC, and never unloaded.
        let api = unsafe { Api::look_up(library) }.map_err(&missing)?;
        // SAFETY: as above; nvrtc.h declares this signature, with an enumeration as the argument.
        let error_text = *unsafe { library.get::<Describe>("nvrtcGetErrorString") }
            .map_err(|_| missing("nvrtcGetErrorString"))?;
        let location = path_of(api.nvrtcVersion as *const c_void);
        let mut nvrtc = Self { api, version: (0, 0), location, error_text };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        let code = unsafe { (nvrtc.api.nvrtcVersion)(&raw mut major, &raw mut minor) };
        nvrtc.check("nvrtcVersion", code)?;
        nvrtc.version = (major.unsigned_abs(), minor.unsigned_abs());
        Ok(nvrtc)
    }

    /// Converts a result code.
    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // NVRTC's text is the result name, in capitals.
        let name = self.text(code);
        let text = format!("NVRTC {}.{} reported an error", self.version.0, self.version.1);
        Err(Error::Call { call, code, name, text, remedy: remedy(code) })
    }

    /// Result name.
    pub(super) fn text(&self, code: u32) -> String {
        // SAFETY: valid for any number.
        let text = unsafe { (self.error_text)(code) };
        if text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: NVRTC strings are NUL-terminated and never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Loads libnvrtc-builtins beside NVRTC. NVRTC opens it by the bare name, which the system's loader resolves for an
/// installed toolkit but not for NVIDIA's Python packages; a library that is open already is found by name.
fn load_builtins(nvrtc: &Nvrtc) {
    let (major, minor) = nvrtc.version;
    let file = nvrtc.location.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    match open_with(&file, RTLD_LAZY | RTLD_LOCAL) {
        Ok(library) => std::mem::forget(library),
        // If it is missing everywhere, compilation fails with the reason.
        Err(problem) => log::debug!("{problem}"),
    }
}

/// File from which a function was loaded; empty if the loader does not report it.
fn path_of(function: *const c_void) -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: writes one description, for an address in a library that is never unloaded.
    let found = unsafe { libc::dladdr(function, info.as_mut_ptr()) } != 0;
    // SAFETY: an address structure, zeroed at first, which is a valid value.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !found || name.is_null() {
        return PathBuf::new();
    }
    // SAFETY: the loader's library name is NUL-terminated and lives as long as the library.
    PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()))
}

/// Remedy for an NVRTC result code; empty if unknown.
fn remedy(code: u32) -> &'static str {
    match code {
        1 => "the compiler is out of host memory: free some",
        5 => "an option is unknown to this NVRTC: install a newer one",
        7 => "libnvrtc-builtins is missing beside NVRTC: reinstall NVRTC",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_come_before_the_toolkit_and_the_system() {
        let root = std::env::temp_dir().join(format!("weft-nvrtc-{}", std::process::id()));
        let (given, home) = (root.join("given"), root.join("home"));
        std::fs::create_dir_all(&given).unwrap();
        std::fs::create_dir_all(home.join("lib64")).unwrap();
        std::fs::write(given.join("libnvrtc.so.12"), "").unwrap();
        std::fs::write(home.join("lib64/libnvrtc.so.13"), "").unwrap();
        let found = candidates(&[root.join("missing"), given.clone()], Some(&home));
        std::fs::remove_dir_all(&root).unwrap();
        let expected = [
            given.join("libnvrtc.so.12"),
            home.join("lib64/libnvrtc.so.13"),
            "libnvrtc.so.13".into(),
            "libnvrtc.so.12".into(),
        ];
        assert_eq!(found[..4], expected);
    }
}
