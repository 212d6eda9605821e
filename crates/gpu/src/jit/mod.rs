//! Kernels are compiled where they run, for the shapes that the program has.
//!
//! A [`Request`] names a source, the constants of the shape and the architecture; [`cubin`] gives the
//! machine code, out of the [`Cache`] if the same was compiled before. The key is a digest of all that
//! the code depends on: the program's text and those that it includes, every option and the compiler's
//! version. So nothing must ever be invalidated, and ranks, programs and versions of Weft share one folder.
//!
//! - `cache.rs`: the folder, its entries and what is done about damaged ones
//! - `includes.rs`: files that a program includes
//! - `lock.rs`: racing processes compile once
//! - `replaced.rs`: sources under work, in place of those carried in the library
//! - [`Compiler`]: what compiles; [`Nvrtc`], or a stand-in

mod cache;
mod includes;
mod lock;
mod nvrtc;
mod replaced;

pub use cache::Cache;
pub use nvrtc::Nvrtc;

use crate::error::{Error, Result};
use crate::kernels;
use sha2::{Digest as _, Sha256};
use std::path::PathBuf;
use std::time::Instant;

/// What is to be compiled, and for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Which of `files` is the program; the others, and [`kernels::HEADERS`], are what it may include.
    pub name: &'a str,
    /// Path and text of each source file of the caller.
    pub files: &'a [(&'a str, &'a str)],
    /// Constants, by name and value, defined before the first line.
    pub defines: Vec<(String, String)>,
    /// The architecture, such as `sm_90a`.
    pub arch: String,
    /// Further options of the compiler.
    pub options: Vec<String>,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Machine code for the architecture of the request.
    pub cubin: Vec<u8>,
    /// Whether it was compiled before.
    pub cached: bool,
    /// Seconds that it took to get it.
    pub seconds: f64,
}

/// What became of a request to [`prepare`].
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The request's name.
    pub name: String,
    /// Where its code lies.
    pub path: PathBuf,
    /// Whether it was there already.
    pub cached: bool,
    /// Seconds that it took.
    pub seconds: f64,
}

/// What turns a request into machine code.
pub trait Compiler: Sync {
    /// Its name and version: another version gives another key.
    fn version(&self) -> Result<String>;
    /// Compiles.
    fn compile(&self, request: &Request<'_>) -> Result<Vec<u8>>;
}

impl<'a> Request<'a> {
    /// The program `name` of `files`, for an architecture.
    pub fn kernel(name: &'a str, files: &'a [(&'a str, &'a str)], arch: &str) -> Request<'a> {
        Request { name, files, defines: Vec::new(), arch: arch.to_owned(), options: Vec::new() }
    }

    /// Path and text of every file there is: the caller's, then the headers. A file of the folder
    /// `WEFT_KERNELS` takes the place of the one with its path.
    pub fn sources(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let files = self.files.iter().chain(kernels::HEADERS);
        files.map(|(path, text)| (*path, replaced::text(path).unwrap_or(text)))
    }

    /// The text of the program.
    ///
    /// # Errors
    /// [`Error::NoKernel`] if no file has its name.
    pub fn text(&self) -> Result<&'a str> {
        let mut own = self.sources().take(self.files.len());
        let found = own.find(|(path, _)| *path == self.name);
        found.map(|(_, text)| text).ok_or_else(|| Error::NoKernel {
            name: self.name.to_owned(),
            known: match self.files {
                [] => "none".to_owned(),
                files => files.iter().map(|(path, _)| *path).collect::<Vec<_>>().join(", "),
            },
        })
    }

    /// The compiler's options, the defines among them.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments =
            vec![format!("--gpu-architecture={}", self.arch), "--std=c++20".to_owned()];
        // What is marked for neither side is for the device: constexpr functions, lambdas.
        arguments.push("--device-as-default-execution-space".to_owned());
        arguments.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments.extend_from_slice(&self.options);
        arguments
    }

    fn validate(&self) -> Result<()> {
        self.text()?;
        for (name, _) in &self.defines {
            let mut letters = name.chars();
            let starts = letters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
            if !starts || !letters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(Error::Define { name: name.clone() });
            }
        }
        Ok(())
    }

    /// A digest of all that the machine code depends on.
    fn key(&self, compiler: &str) -> Key {
        let mut digest = Sha256::new();
        let mut add = |text: &str| {
            digest.update((text.len() as u64).to_le_bytes());
            digest.update(text);
        };
        add("weft kernel 2");
        add(compiler);
        add(self.name);
        add(self.text().unwrap_or_default());
        let included = self.included();
        add(&included.len().to_string());
        for (path, text) in included {
            add(path);
            add(text);
        }
        self.arguments().iter().for_each(|argument| add(argument));
        Key(digest.finalize().into())
    }
}

/// Names an entry of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key([u8; 32]);

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The machine code of a request, as NVRTC makes it. Says what [`cubin_with`] says.
///
/// # Errors
/// Those of [`cubin_with`]; [`Error::Cuda`] without NVRTC, or with the compiler's log.
pub fn cubin(request: &Request<'_>, cache: &Cache) -> Result<Compiled> {
    cubin_with(request, cache, &Nvrtc)
}

/// Compiles ahead of time with NVRTC, as [`prepare_with`] does. It needs no GPU.
///
/// # Errors
/// Those of [`prepare_with`] and of NVRTC.
pub fn prepare(requests: &[Request<'_>], cache: &Cache) -> Result<Vec<Prepared>> {
    prepare_with(requests, cache, &Nvrtc)
}

/// The machine code of a request, as `compiler` makes it. Racing threads and processes that use one
/// cache compile it once; a cache that cannot be used costs time and a warning, nothing else.
///
/// # Errors
/// [`Error::NoKernel`] and [`Error::Define`] for a request that cannot be, and the compiler's.
pub fn cubin_with(
    request: &Request<'_>,
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

/// Compiles ahead of time what a program will ask for, so that its first step comes without a pause.
/// The key holds the compiler's version: prepare with the one that the program will find.
///
/// # Errors
/// Those of [`cubin_with`]; [`Error::Cache`] if the code cannot be kept, which is then the point.
pub fn prepare_with(
    requests: &[Request<'_>],
    cache: &Cache,
    compiler: &dyn Compiler,
) -> Result<Vec<Prepared>> {
    let version = compiler.version()?;
    let prepare = |request: &Request<'_>| {
        let Compiled { cached, seconds, .. } = cubin_with(request, cache, compiler)?;
        let path = cache.kept(request.key(&version))?;
        Ok(Prepared { name: request.name.to_owned(), path, cached, seconds })
    };
    requests.iter().map(prepare).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[(&str, &str)] = &[("a.cu", "#include \"b.cuh\""), ("b.cuh", "int b;")];

    fn request() -> Request<'static> {
        Request {
            name: "a.cu",
            files: FILES,
            defines: vec![("WEFT_RANKS".into(), "8".into())],
            arch: "sm_90a".into(),
            options: vec![],
        }
    }

    #[test]
    fn whatever_the_code_depends_on_is_part_of_the_key() {
        let key = request().key("nvrtc 13.0");
        assert_eq!(key, request().key("nvrtc 13.0"));
        assert_eq!(key.to_string().len(), 64);
        let mut others = vec![request().key("nvrtc 13.1")];
        let mut other = |change: fn(&mut Request<'static>)| {
            let mut changed = request();
            change(&mut changed);
            others.push(changed.key("nvrtc 13.0"));
        };
        other(|r| r.arch = "sm_100a".into());
        other(|r| r.defines[0].1 = "4".into());
        other(|r| r.options.push("-lineinfo".into()));
        other(|r| r.name = "b.cuh");
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\""), ("b.cuh", "int c;")]);
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\""), ("c.cuh", "int b;")]);
        other(|r| r.files = &[("a.cu", "#include \"b.cuh\"b"), (".cuh", "int b;")]);
        for (number, one) in others.iter().enumerate() {
            assert!(*one != key && !others[..number].contains(one), "change {number}");
        }
    }

    #[test]
    fn a_file_that_is_not_included_is_no_part_of_the_key() {
        let key = request().key("nvrtc 13.0");
        let unrelated: [(&str, &str); 3] =
            [("c.cuh", "int c;"), ("a.cu", "#include \"b.cuh\""), ("b.cuh", "int b;")];
        assert_eq!(Request { files: &unrelated, ..request() }.key("nvrtc 13.0"), key);
        let mut nested = unrelated;
        nested[2].1 = "#include \"c.cuh\"";
        let before = Request { files: &nested, ..request() }.key("nvrtc 13.0");
        let mut changed = nested;
        changed[0].1 = "int d;";
        assert_ne!(Request { files: &changed, ..request() }.key("nvrtc 13.0"), before);
    }

    #[test]
    fn a_request_that_cannot_be_is_refused_before_anything_is_compiled() {
        struct Never;
        impl Compiler for Never {
            fn version(&self) -> Result<String> {
                Ok("never".into())
            }
            fn compile(&self, _: &Request<'_>) -> Result<Vec<u8>> {
                panic!("nothing was to be compiled")
            }
        }
        let refused = |request: Request<'_>| {
            cubin_with(&request, &Cache::none(), &Never).unwrap_err().to_string()
        };
        let missing = refused(Request { name: "c.cu", ..request() });
        assert!(missing.contains("\"c.cu\"") && missing.contains("a.cu, b.cuh"), "{missing}");
        for name in ["", "8A", "A-B", "A B", "A=1\n"] {
            let defines = vec![(name.to_owned(), "1".to_owned())];
            let message = refused(Request { defines, ..request() });
            assert!(message.contains("cannot be defined"), "{message}");
        }
        assert!(Request::kernel("no such kernel", FILES, "sm_90a").text().is_err());
    }
}
