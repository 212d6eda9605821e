//! Run-time kernel compilation for the program's shapes, with a cache.
//!
//! A [`CompileRequest`] names a source, the shape's constants and the architecture; [`cubin`] returns the machine
//! code, from the [`Cache`] if present. The key is a digest over everything that determines the code: the program's
//! text and included texts, all options and the compiler version. So entries never become stale, and ranks, programs
//! and Weft versions share one folder.
//!
//! - `request.rs`: requests, the files that a program includes, keys
//! - `compiler.rs`: NVRTC, or a stand-in in tests
//! - `cache.rs`: the folder, entries and the replacement of damaged ones
//! - `folder.rs`: the open folder, with owner and mode checked
//! - `lock.rs`: file lock, so that racing processes compile once
//! - `replaced.rs`: `WEFT_KERNELS` folder sources, in place of library sources

mod cache;
mod compiler;
mod folder;
mod lock;
mod replaced;
mod request;

pub use cache::Cache;
pub use compiler::{Compiler, Nvrtc};
pub use request::CompileRequest;

use crate::error::Result;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use weft_cuda::{Device, Start};

/// Architecture for a compute capability, with instructions for one generation only (`a`), such as bulk copies. For
/// example, `(9, 0)` is `sm_90a`.
pub fn architecture((major, minor): (u32, u32)) -> String {
    let only = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{only}")
}

/// Kernel start rule on a device. `WEFT_DEPENDENT_LAUNCH=0` has each kernel start after the previous one has ended.
///
/// # Errors
/// [`crate::Error::Variable`] if `WEFT_DEPENDENT_LAUNCH` is neither 0 nor 1.
pub fn launch_start(device: Device) -> Result<Start> {
    let is_on = weft_environment::flag("WEFT_DEPENDENT_LAUNCH", true)?;
    let is_dependent = device.has_dependent_launch() && is_on;
    Ok(if is_dependent { Start::Dependent } else { Start::AfterPrevious })
}

/// Compiled request.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Machine code for the requested architecture.
    pub cubin: Vec<u8>,
    /// True if it came from the cache.
    pub cached: bool,
    /// Seconds taken.
    pub seconds: f64,
}

/// Request result from [`prepare`].
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// Request name.
    pub name: String,
    /// Code path.
    pub path: PathBuf,
    /// True if it was in the cache already.
    pub cached: bool,
    /// Seconds taken.
    pub seconds: f64,
}

/// Machine code for a request, compiled by NVRTC; see [`cubin_with`].
///
/// # Errors
/// Errors from [`cubin_with`]; [`Error::Cuda`] without NVRTC, or with the compiler's log.
pub fn cubin(request: &CompileRequest<'_>, cache: &Cache) -> Result<Compiled> {
    cubin_with(request, cache, &Nvrtc)
}

/// Compiles requests ahead of time with NVRTC on all cores, without a GPU; see [`prepare_with`].
///
/// # Errors
/// The first error from [`prepare_with`] and NVRTC, in request order.
pub fn prepare(requests: &[CompileRequest<'_>], cache: &Cache) -> Result<Vec<Prepared>> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = requests.get(at) else { return made };
            let prepared = prepare_with(std::slice::from_ref(request), cache, &Nvrtc);
            made.push((at, prepared.map(|mut one| one.remove(0))));
        }
    };
    let mut made: Vec<(usize, Result<Prepared>)> = std::thread::scope(|scope| {
        // Helpers for this thread, which compiles what they leave where no more threads can be started.
        let helper = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..cores.min(requests.len())).map_while(helper).collect();
        let own = work();
        let results = helpers.into_iter().map(|helper| helper.join());
        let others = results.flat_map(|it| it.unwrap_or_else(|panic| resume_unwind(panic)));
        own.into_iter().chain(others).collect()
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, prepared)| prepared).collect()
}

/// Machine code for a request, from the cache or compiled by `compiler`. Racing threads and processes with one cache
/// compile it once; an unusable cache costs only time and a warning.
///
/// # Errors
/// [`Error::NoKernel`] and [`Error::Define`] for an invalid request, and the compiler's.
pub fn cubin_with(
    request: &CompileRequest<'_>,
    cache: &Cache,
    compiler: &dyn Compiler,
) -> Result<Compiled> {
    let begin = Instant::now();
    request.validate()?;
    let key = request.key(&compiler.version()?);
    let found = cache.find(key);
    let cached = found.is_some();
    let (cubin, cached) = match found {
        Some(cubin) => (cubin, cached),
        None => cache.fill(key, || compiler.compile(request))?,
    };
    Ok(Compiled { cubin, cached, seconds: begin.elapsed().as_secs_f64() })
}

/// Compiles a program's requests ahead of time, to avoid a pause in the first step. The key includes the compiler
/// version: prepare with the version that the program will load.
///
/// # Errors
/// Errors from [`cubin_with`]; [`Error::Cache`] if the code cannot be cached.
pub fn prepare_with(
    requests: &[CompileRequest<'_>],
    cache: &Cache,
    compiler: &dyn Compiler,
) -> Result<Vec<Prepared>> {
    let version = compiler.version()?;
    let prepare = |request: &CompileRequest<'_>| {
        let Compiled { cached, seconds, .. } = cubin_with(request, cache, compiler)?;
        let path = cache.kept(request.key(&version))?;
        Ok(Prepared { name: request.name.to_owned(), path, cached, seconds })
    };
    requests.iter().map(prepare).collect()
}

#[cfg(test)]
mod tests {
    use super::request::tests::request;
    use super::*;

    #[test]
    fn gpus_with_instructions_of_their_own_are_named_with_them() {
        assert_eq!(architecture((9, 0)), "sm_90a");
        assert_eq!(architecture((10, 0)), "sm_100a");
        assert_eq!(architecture((8, 0)), "sm_80");
    }

    #[test]
    fn an_invalid_request_is_rejected_before_compilation() {
        struct Never;
        impl Compiler for Never {
            fn version(&self) -> Result<String> {
                Ok("never".into())
            }
            fn compile(&self, _: &CompileRequest<'_>) -> Result<Vec<u8>> {
                panic!("compiled an invalid request")
            }
        }
        let refused = |request: CompileRequest<'_>| {
            cubin_with(&request, &Cache::none(), &Never).unwrap_err().to_string()
        };
        let missing = refused(CompileRequest { name: "c.cu", ..request() });
        assert!(missing.contains("\"c.cu\"") && missing.contains("a.cu, b.cuh"), "{missing}");
        for name in ["", "8A", "A-B", "A B", "A=1\n"] {
            let defines = vec![(name.to_owned(), "1".to_owned())];
            let message = refused(CompileRequest { defines, ..request() });
            assert!(message.contains("cannot be defined"), "{message}");
        }
        assert!(
            CompileRequest::kernel("no such kernel", request().files, "sm_90a").text().is_err()
        );
    }
}
