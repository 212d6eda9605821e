//! Finding NVRTC.

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
    /// What is called of NVRTC.
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

// Not in `Api`: it takes a result, which for cudarc is an enumeration.
type Describe = unsafe extern "C" fn(u32) -> *const c_char;

/// NVRTC, loaded.
pub(super) struct Nvrtc {
    pub(super) api: Api,
    pub(super) version: (u32, u32),
    pub(super) location: PathBuf,
    error_text: Describe,
}

/// What is known of where NVRTC may be, and NVRTC once it was found.
struct Search {
    folders: Vec<PathBuf>,
    found: Option<&'static Nvrtc>,
}

static SEARCH: Mutex<Search> = Mutex::new(Search { folders: Vec::new(), found: None });

/// Has NVRTC looked for in this folder too; once NVRTC was found, it says nothing any more.
pub fn add_search_path(folder: impl Into<PathBuf>) {
    let folder = folder.into();
    let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if !search.folders.contains(&folder) {
        search.folders.push(folder);
    }
}

/// NVRTC: what the process has loaded already (PyTorch may have), what is in the folders that were
/// given, in CUDA_HOME, and what the system has, in this order.
pub(super) fn nvrtc() -> Result<&'static Nvrtc> {
    let mut search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = search.found {
        return Ok(found);
    }
    let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
    let nvrtc = Nvrtc::new(find(&search.folders, home.as_deref())?)?;
    load_builtins(&nvrtc);
    Ok(search.found.insert(Box::leak(Box::new(nvrtc))))
}

/// Looks in all places. What was not found can be found later, so that is not kept.
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

/// Files in folders that have them, then names that the system's loader may know.
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
        // Compiling goes on in no thread of its own, but libraries of this size are not unloaded.
        let library = Box::leak(Box::new(library));
        let missing = too_old(LIBRARY, "NVRTC of CUDA 12.0 or newer");
        // SAFETY: it is NVRTC, and never unloaded.
        let api = unsafe { Api::look_up(library) }.map_err(&missing)?;
        // SAFETY: as above; nvrtc.h declares it so, with an enumeration for the argument.
        let error_text = *unsafe { library.get::<Describe>("nvrtcGetErrorString") }
            .map_err(|_| missing("nvrtcGetErrorString"))?;
        let location = path_of(api.nvrtcVersion as *const c_void);
        let mut nvrtc = Self { api, version: (0, 0), location, error_text };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two integers.
        let code = unsafe { (nvrtc.api.nvrtcVersion)(&raw mut major, &raw mut minor) };
        nvrtc.check("nvrtcVersion", code)?;
        nvrtc.version = (major.unsigned_abs(), minor.unsigned_abs());
        Ok(nvrtc)
    }

    /// Makes an error of a result.
    pub(super) fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // NVRTC's text is the result's name, in capitals.
        let name = self.text(code);
        let text = format!("NVRTC {}.{} refused", self.version.0, self.version.1);
        Err(Error::Call { call, code, name, text, remedy: remedy(code) })
    }

    /// NVRTC's name of a result.
    pub(super) fn text(&self, code: u32) -> String {
        // SAFETY: any number may be asked for.
        let text = unsafe { (self.error_text)(code) };
        if text.is_null() {
            return "an error that NVRTC cannot name".to_owned();
        }
        // SAFETY: NVRTC's strings end with a 0 and are never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// NVRTC opens its other half by a bare name, which the system's loader knows of a toolkit that is
/// installed, but not of NVIDIA's Python packages: one that is open already is found by its name.
fn load_builtins(nvrtc: &Nvrtc) {
    let (major, minor) = nvrtc.version;
    let file = nvrtc.location.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    match open_with(&file, RTLD_LAZY | RTLD_LOCAL) {
        Ok(library) => std::mem::forget(library),
        // Then compiling fails, with the reason, if it is nowhere else.
        Err(problem) => log::debug!("{problem}"),
    }
}

/// The file that a function was loaded from; empty if the loader does not say.
fn path_of(function: *const c_void) -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: it writes one description, of an address in a library that is never unloaded.
    let known = unsafe { libc::dladdr(function, info.as_mut_ptr()) } != 0;
    // SAFETY: it is made of addresses, all of them zero at first, which is a value.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !known || name.is_null() {
        return PathBuf::new();
    }
    // SAFETY: the loader's name of the library ends with a 0 and lives as long as the library.
    PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()))
}

/// What to do about an error of NVRTC's, or nothing.
fn remedy(code: u32) -> &'static str {
    match code {
        1 => "the compiler is out of memory: free some of the host's",
        5 => "this NVRTC does not know an option: a newer one does",
        7 => "libnvrtc-builtins is missing beside NVRTC: install NVRTC anew",
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
        let found = candidates(&[root.join("nowhere"), given.clone()], Some(&home));
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
