//! Compiler: NVRTC, or a stand-in in tests.

use super::request::CompileRequest;
use crate::error::Result;
use weft_cuda::nvrtc::{self, Source};

/// Compiler from requests to machine code.
pub trait Compiler: Sync {
    /// Name and version, which enter the key.
    fn version(&self) -> Result<String>;
    /// Compiles a request.
    fn compile(&self, request: &CompileRequest<'_>) -> Result<Vec<u8>>;
}

/// NVRTC, as [`weft_cuda::nvrtc`] loads it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn version(&self) -> Result<String> {
        let (major, minor) = nvrtc::version()?;
        Ok(format!("nvrtc {major}.{minor}"))
    }

    fn compile(&self, request: &CompileRequest<'_>) -> Result<Vec<u8>> {
        let text = request.text()?;
        let headers = request.included();
        let source = Source { name: request.name, text, headers: &headers };
        Ok(nvrtc::compile(&source, &request.arguments())?)
    }
}
