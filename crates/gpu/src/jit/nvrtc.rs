//! CUDA's own compiler.

use super::{Compiler, Request};
use crate::error::Result;
use weft_cuda::nvrtc::{self, Source};

/// NVRTC, as [`weft_cuda::nvrtc`] finds it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn version(&self) -> Result<String> {
        let (major, minor) = nvrtc::version()?;
        Ok(format!("nvrtc {major}.{minor}"))
    }

    fn compile(&self, request: &Request<'_>) -> Result<Vec<u8>> {
        let text = request.text()?;
        let headers = request.included();
        let source = Source { name: request.name, text, headers: &headers };
        Ok(nvrtc::compile(&source, &request.arguments())?)
    }
}
