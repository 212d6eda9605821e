//! Compiles source to a cubin.

use super::find::{Nvrtc, nvrtc};
use crate::error::{Error, Result};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CString, c_char, c_int};

const COMPILATION_FAILED: u32 = 6;

/// Kernel source.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// File name in errors.
    pub name: &'a str,
    /// Text.
    pub text: &'a str,
    /// Headers that it may include, by name and text.
    pub headers: &'a [(&'a str, &'a str)],
}

/// Compiles a source for a real architecture (`--gpu-architecture=sm_90a`) and returns the cubin. Threads may
/// compile concurrently.
///
/// # Errors
///
/// [`Error::Compile`] with the compiler log; [`Error::Absent`] without NVRTC; and NVRTC errors.
pub fn compile(source: &Source<'_>, options: &[String]) -> Result<Vec<u8>> {
    let program = Program::new(nvrtc()?, source)?;
    program.compile(source, options)?;
    let cubin = program.cubin()?;
    if cubin.is_empty() {
        return Err(Error::Compile {
            name: source.name.to_owned(),
            options: options.to_vec(),
            text: "no cubin was produced: pass a real architecture, as --gpu-architecture=sm_90a"
                .to_owned(),
            log: program.log(),
        });
    }
    Ok(cubin)
}

/// Program in compilation.
struct Program {
    nvrtc: &'static Nvrtc,
    handle: nvrtcProgram,
}

/// Calls an NVRTC function; errors name it.
macro_rules! call {
    ($nvrtc:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $nvrtc.check(stringify!($name), ($nvrtc.api.$name)($($argument),*))
    };
}

impl Program {
    fn new(nvrtc: &'static Nvrtc, source: &Source<'_>) -> Result<Self> {
        let text = c_string("the source", source.text)?;
        let name = c_string("the source's name", source.name)?;
        let (names, texts): (Vec<_>, Vec<_>) = source.headers.iter().copied().unzip();
        let names = Strings::new("a header's name", &names)?;
        let texts = Strings::new("a header", &texts)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, and reads NUL-terminated strings that live through the call, as
        // many names as headers.
        unsafe {
            call!(
                nvrtc,
                nvrtcCreateProgram(
                    &raw mut handle,
                    text.as_ptr(),
                    name.as_ptr(),
                    texts.count(),
                    texts.pointers.as_ptr(),
                    names.pointers.as_ptr(),
                )
            )
        }?;
        Ok(Self { nvrtc, handle })
    }

    fn compile(&self, source: &Source<'_>, options: &[String]) -> Result<()> {
        let strings = Strings::new("the compiler's option", options)?;
        let name = source.name;
        // SAFETY: this value owns the program; the strings are NUL-terminated and live through the call.
        let code = unsafe {
            (self.nvrtc.api.nvrtcCompileProgram)(
                self.handle,
                strings.count(),
                strings.pointers.as_ptr(),
            )
        };
        let log = self.log();
        if code == COMPILATION_FAILED {
            let (name, options) = (name.to_owned(), options.to_vec());
            return Err(Error::Compile { name, options, text: self.nvrtc.text(code), log });
        }
        if !log.is_empty() {
            log::debug!("NVRTC log of {name}: {log}");
        }
        self.nvrtc.check("nvrtcCompileProgram", code).map_err(|error| match error {
            // For an unknown option, only the log names it.
            Error::Call { call, code, name, text, remedy } if !log.is_empty() => {
                Error::Call { call, code, name, text: format!("{text}: {log}"), remedy }
            }
            error => error,
        })
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: writes one length; this value owns the program.
        unsafe { call!(self.nvrtc, nvrtcGetCUBINSize(self.handle, &raw mut size)) }?;
        let mut cubin = vec![0; size];
        if size > 0 {
            // SAFETY: writes as many bytes as it has just reported.
            unsafe {
                call!(self.nvrtc, nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast::<c_char>()))
            }?;
        }
        Ok(cubin)
    }

    /// Compiler log; empty if unavailable.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: writes one length; this value owns the program.
        let queried =
            unsafe { call!(self.nvrtc, nvrtcGetProgramLogSize(self.handle, &raw mut size)) };
        if queried.is_err() || size == 0 {
            return String::new();
        }
        let mut log: Vec<u8> = vec![0; size];
        // SAFETY: writes as many bytes as it has just reported, ending with NUL.
        let copied =
            unsafe { call!(self.nvrtc, nvrtcGetProgramLog(self.handle, log.as_mut_ptr().cast())) };
        if copied.is_err() {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: this value owns the program and uses it last here. An error has no remedy here.
        let _ = unsafe { call!(self.nvrtc, nvrtcDestroyProgram(&raw mut self.handle)) };
    }
}

/// C strings, and an address array.
struct Strings {
    pointers: Vec<*const c_char>,
    _strings: Vec<CString>,
}

impl Strings {
    fn new(what: &'static str, texts: &[impl AsRef<str>]) -> Result<Self> {
        let strings =
            texts.iter().map(|text| c_string(what, text.as_ref())).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            pointers: strings.iter().map(|string| string.as_ptr()).collect(),
            _strings: strings,
        })
    }

    fn count(&self) -> c_int {
        c_int::try_from(self.pointers.len()).unwrap_or(c_int::MAX)
    }
}

fn c_string(what: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Text { what, text: text.chars().take(80).collect() })
}
