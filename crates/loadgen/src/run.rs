//! A test: LoadGen's callbacks, and the run itself.

use crate::error::{Error, Result};
use crate::library::{Callbacks, LoadGen, Sample};
use crate::settings::Settings;
use crate::summary::Summary;
use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, TryLockError};

/// System that a test measures. It answers every sample, also one whose inference failed: LoadGen waits without a
/// limit.
pub trait SystemUnderTest: Sync {
    /// Name in the logs; in the Network division it contains "Network SUT".
    fn name(&self) -> String;

    /// Begin samples, whose answers go to [`LoadGen::complete`]. It returns soon: LoadGen's clock runs.
    fn issue(&self, samples: &[Sample]);

    /// The last samples were issued: hold none back.
    fn flush(&self);
}

/// Data set samples.
pub trait SampleLibrary: Sync {
    /// Name in the logs.
    fn name(&self) -> String;

    /// Data set size in samples.
    fn total(&self) -> usize;

    /// Samples that fit into memory at a time.
    fn performance(&self) -> usize;

    /// Brings samples into memory, outside measured time.
    fn load(&self, indices: &[usize]);

    /// Drop samples from memory.
    fn unload(&self, indices: &[usize]);
}

/// LoadGen runs one test at a time in a process. LoadGen's longest configuration file: 1 MiB.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
static RUNNING: Mutex<()> = Mutex::new(());

/// A test.
#[derive(Debug, Clone)]
pub struct Test {
    /// Settings.
    pub settings: Settings,
    /// Model name, which selects lines in configuration files.
    pub model: String,
    /// `user.conf`. With one, LoadGen's own mlperf.conf applies too, as in official runs.
    pub user_conf: Option<PathBuf>,
    /// `audit.config`, which need not exist.
    pub audit_config: PathBuf,
    /// Existing log directory.
    pub log_directory: PathBuf,
}

impl Test {
    /// Runs the test until the last answer, and reads the summary.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] during another test; [`Error::NoFile`], [`Error::Samples`] and [`Error::Refused`] before
    /// any query; [`Error::Summary`] if the logs cannot be read, or the run measured only accuracy.
    ///
    /// # Aborts
    ///
    /// If a callback panics: LoadGen cannot end a test before the answer to each query.
    pub fn run(
        &self,
        loadgen: LoadGen,
        system: &dyn SystemUnderTest,
        samples: &dyn SampleLibrary,
    ) -> Result<Summary> {
        let _one = match RUNNING.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(Error::Busy),
        };
        for (what, path) in
            [("log directory", Some(&self.log_directory)), ("user.conf", self.user_conf.as_ref())]
        {
            if let Some(path) = path
                && !path.exists()
            {
                return Err(Error::NoFile { what, path: path.clone() });
            }
        }
        // LoadGen reads lines as long as there are any.
        for (what, path) in [
            ("user.conf", self.user_conf.as_deref()),
            ("audit.config", Some(&*self.audit_config).filter(|path| path.exists())),
        ] {
            let read = path.map(|path| weft_environment::read(path, MAX_CONFIG_BYTES));
            if let (Some(path), Some(Err(problem))) = (path, read) {
                return Err(Error::Unreadable { what, path: path.to_owned(), problem });
            }
        }
        let (total, performance) = (samples.total(), samples.performance());
        if performance == 0 || performance > total {
            return Err(Error::Samples { total, performance });
        }
        let context = Context { system, samples };
        let sut_name = text("the name of the system under test", &system.name())?;
        let qsl_name = text("the name of the sample library", &samples.name())?;
        let model = text("the name of the model", &self.model)?;
        let user_conf = self
            .user_conf
            .as_deref()
            .map(|path| bytes("the path of user.conf", path))
            .transpose()?;
        let audit = bytes("the path of audit.config", &self.audit_config)?;
        let directory = bytes("the log directory", &self.log_directory)?;
        let callbacks = Callbacks {
            context: (&raw const context).cast(),
            sut_name: sut_name.as_ptr(),
            issue,
            flush,
            qsl_name: qsl_name.as_ptr(),
            total_samples: total,
            performance_samples: performance,
            load,
            unload,
        };
        let mut problem = vec![0_u8; 1024];
        // SAFETY: all pointers are valid during the call, strings end with zero, and `context` is what the
        // callbacks take.
        let code = unsafe {
            (loadgen.run)(
                &raw const callbacks,
                &raw const self.settings,
                model.as_ptr(),
                user_conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr()),
                audit.as_ptr(),
                directory.as_ptr(),
                problem.as_mut_ptr().cast(),
                problem.len(),
            )
        };
        if code != 0 {
            let end = problem.iter().position(|&byte| byte == 0).unwrap_or(problem.len());
            return Err(Error::Refused(String::from_utf8_lossy(&problem[..end]).into_owned()));
        }
        Summary::read(&self.log_directory.join("mlperf_log_summary.txt"))
    }
}

fn text(what: &'static str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::ZeroByte { what })
}

fn bytes(what: &'static str, path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::ZeroByte { what })
}

/// Callback argument.
struct Context<'a> {
    system: &'a dyn SystemUnderTest,
    samples: &'a dyn SampleLibrary,
}

/// A C slice.
///
/// # Safety
///
/// `data` is valid for `count` elements while the result lives.
unsafe fn slice<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts(data, count) }
}

// A panic in these callbacks aborts the process: Rust does not unwind through `extern "C"`.

unsafe extern "C" fn issue(context: *const c_void, samples: *const Sample, count: usize) {
    // SAFETY: LoadGen passes the `Test::run` context, which is alive, and valid samples.
    let (context, samples) = unsafe { (&*context.cast::<Context>(), slice(samples, count)) };
    context.system.issue(samples);
}

unsafe extern "C" fn flush(context: *const c_void) {
    // SAFETY: as in `issue`.
    let context = unsafe { &*context.cast::<Context>() };
    context.system.flush();
}

unsafe extern "C" fn load(context: *const c_void, indices: *const usize, count: usize) {
    // SAFETY: as in `issue`.
    let (context, indices) = unsafe { (&*context.cast::<Context>(), slice(indices, count)) };
    context.samples.load(indices);
}

unsafe extern "C" fn unload(context: *const c_void, indices: *const usize, count: usize) {
    // SAFETY: as in `issue`.
    let (context, indices) = unsafe { (&*context.cast::<Context>(), slice(indices, count)) };
    context.samples.unload(indices);
}
