//! LoadGen library and shim, loaded at run time.

use crate::error::{Error, Result};
use crate::settings::Settings;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

/// A sample that LoadGen issues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sample {
    /// Response id, unique in a test.
    pub id: usize,
    /// Index in the sample library.
    pub index: usize,
}

/// The answer to a sample.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Response {
    id: usize,
    data: usize,
    size: usize,
    tokens: i64,
}

impl Response {
    /// The answer to the sample with an id. LoadGen logs the bytes in accuracy runs, and a random subset
    /// in performance runs.
    pub fn new(id: usize, answer: &[u8]) -> Self {
        Self { id, data: answer.as_ptr() as usize, size: answer.len(), tokens: 0 }
    }

    /// Adds a token count, for token latencies.
    pub fn with_tokens(mut self, tokens: u32) -> Self {
        self.tokens = i64::from(tokens);
        self
    }
}

/// Callback table that LoadGen calls; the layout is in `shim.h`.
#[repr(C)]
pub(crate) struct Callbacks {
    pub(crate) context: *const c_void,
    pub(crate) sut_name: *const c_char,
    pub(crate) issue: unsafe extern "C" fn(*const c_void, *const Sample, usize),
    pub(crate) flush: unsafe extern "C" fn(*const c_void),
    pub(crate) qsl_name: *const c_char,
    pub(crate) total_samples: usize,
    pub(crate) performance_samples: usize,
    pub(crate) load: unsafe extern "C" fn(*const c_void, *const usize, usize),
    pub(crate) unload: unsafe extern "C" fn(*const c_void, *const usize, usize),
}

/// `shim.h` interface version that this file declares.
const ABI: u32 = 1;

/// Signature for running a test.
pub(crate) type Run = unsafe extern "C" fn(
    *const Callbacks,
    *const Settings,
    *const c_char,
    *const c_char,
    *const c_char,
    *const c_char,
    *mut c_char,
    usize,
) -> c_int;

/// MLPerf's LoadGen.
#[derive(Clone, Copy)]
pub struct LoadGen {
    version: unsafe extern "C" fn() -> *const c_char,
    defaults: unsafe extern "C" fn(*mut Settings),
    pub(crate) run: Run,
    complete: unsafe extern "C" fn(*const Response, usize),
    first_token: unsafe extern "C" fn(*const Response, usize),
    register_thread: unsafe extern "C" fn(),
}

impl std::fmt::Debug for LoadGen {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "LoadGen({})", self.version())
    }
}

impl LoadGen {
    /// Load the library that `weft.loadgen.built` compiled. It stays loaded.
    ///
    /// # Errors
    ///
    /// [`Error::Library`] if it does not load, or has another shim version.
    ///
    /// # Safety
    ///
    /// The file is a LoadGen library: loading runs code in it, and the functions have the declared
    /// signatures.
    pub unsafe fn load(path: &Path) -> Result<Self> {
        let failed = |problem: String| Error::Library { path: path.to_owned(), problem };
        // SAFETY: the caller guarantees which library it is.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| failed(error.to_string()))?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the library has the signatures that this file declares, and is never unloaded.
                *unsafe { library.get($name) }.map_err(|error| failed(error.to_string()))?
            };
        }
        let abi: unsafe extern "C" fn() -> u32 = function!(b"weft_loadgen_abi");
        // SAFETY: no preconditions.
        let found = unsafe { abi() };
        if found != ABI {
            return Err(failed(format!("its shim has version {found}, expected {ABI}")));
        }
        let this = Self {
            version: function!(b"weft_loadgen_version"),
            defaults: function!(b"weft_loadgen_defaults"),
            run: function!(b"weft_loadgen_run"),
            complete: function!(b"weft_loadgen_complete"),
            first_token: function!(b"weft_loadgen_first_token"),
            register_thread: function!(b"weft_loadgen_register_thread"),
        };
        std::mem::forget(library);
        Ok(this)
    }

    /// LoadGen version.
    pub fn version(&self) -> String {
        // SAFETY: the function returns a string that lives as long as the library.
        unsafe { CStr::from_ptr((self.version)()) }.to_string_lossy().into_owned()
    }

    /// LoadGen's own settings for a scenario and a mode.
    pub fn settings(&self, scenario: crate::Scenario, mode: crate::Mode) -> Settings {
        let mut settings = std::mem::MaybeUninit::uninit();
        // SAFETY: the function writes every field; the enumerations have LoadGen's values.
        let mut settings = unsafe {
            (self.defaults)(settings.as_mut_ptr());
            settings.assume_init()
        };
        settings.scenario = scenario;
        settings.mode = mode;
        settings
    }

    /// Gives answers, once per sample, during the test, from any thread. LoadGen has finished with the
    /// bytes when this returns.
    pub fn complete(&self, responses: &[Response]) {
        // SAFETY: the slice is valid, and the layouts agree.
        unsafe { (self.complete)(responses.as_ptr(), responses.len()) }
    }

    /// Gives first tokens before [`LoadGen::complete`]; only with token latencies.
    pub fn first_token(&self, responses: &[Response]) {
        // SAFETY: as in `complete`.
        unsafe { (self.first_token)(responses.as_ptr(), responses.len()) }
    }

    /// Lets LoadGen issue queries from this thread until the test ends. It is one of
    /// `server_num_issue_query_threads`.
    pub fn issue_from_this_thread(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.register_thread)() }
    }
}
