//! Modules and kernels.

use crate::context::Context;
use crate::driver::call;
use crate::error::{Error, Result};
use crate::stream::Stream;
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUmodule,
};
use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

const ELF: &[u8] = b"\x7fELF";
const ELF_HEADER_BYTES: usize = 64;

/// Cubin loaded into a context; unloaded with the last function.
pub struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

// SAFETY: CUDA lets any thread use a module.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin from [`nvrtc::compile`](crate::nvrtc::compile). It must be complete, since the driver reads no
    /// length.
    ///
    /// # Errors
    ///
    /// [`Error::Cubin`] for an invalid cubin, and CUDA errors, such as one for another device.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Arc<Self>> {
        check_cubin(cubin)?;
        let mut handle = std::ptr::null_mut();
        let _bound = context.enter()?;
        // SAFETY: writes one handle, and reads a cubin whose sections lie within the slice.
        unsafe { call!(context.driver, cuModuleLoadData(&raw mut handle, cubin.as_ptr().cast())) }?;
        Ok(Arc::new(Self { context: context.clone(), handle }))
    }

    /// Kernel with this name (declared `extern "C"`).
    ///
    /// # Errors
    ///
    /// CUDA errors, such as an unknown name.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function> {
        let c_name = CString::new(name)
            .map_err(|_| Error::Text { what: "the kernel's name", text: name.to_owned() })?;
        let mut handle = std::ptr::null_mut();
        let _bound = self.context.enter()?;
        // SAFETY: writes one handle, and reads a NUL-terminated name.
        unsafe {
            call!(
                self.context.driver,
                cuModuleGetFunction(&raw mut handle, self.handle, c_name.as_ptr())
            )
        }?;
        Ok(Function { module: self.clone(), handle })
    }

    /// A variable's address and size in bytes (`__device__` or `__constant__`, declared `extern "C"`), valid for
    /// the module's lifetime.
    ///
    /// # Errors
    ///
    /// CUDA errors, such as an unknown name.
    pub fn variable(&self, name: &str) -> Result<(u64, usize)> {
        let c_name = CString::new(name)
            .map_err(|_| Error::Text { what: "the variable's name", text: name.to_owned() })?;
        let (mut address, mut bytes) = (0, 0);
        let _bound = self.context.enter()?;
        // SAFETY: writes two numbers, and reads a NUL-terminated name.
        unsafe {
            call!(
                self.context.driver,
                cuModuleGetGlobal_v2(
                    &raw mut address,
                    &raw mut bytes,
                    self.handle,
                    c_name.as_ptr()
                )
            )
        }?;
        Ok((address, bytes))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.enter() else { return };
        // SAFETY: this value owns it, and no function is left. An error means that CUDA is shut down already.
        let _ = unsafe { call!(self.context.driver, cuModuleUnload(self.handle)) };
    }
}

/// Kernel start relative to the previous kernel on the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// After it ends.
    AfterPrevious,
    /// Once all its blocks have ended, or have executed `griddepcontrol.launch_dependents`: programmatic dependent
    /// launch. A device without it ([`Device::has_dependent_launch`](crate::Device::has_dependent_launch)) rejects it.
    Dependent,
}

/// Kernel.
#[derive(Clone)]
pub struct Function {
    module: Arc<Module>,
    handle: CUfunction,
}

// SAFETY: CUDA lets any thread use a function.
unsafe impl Send for Function {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Function {}

impl Function {
    /// Permits launches with up to `bytes` bytes dynamic shared memory; 48 KiB need no call.
    ///
    /// # Errors
    ///
    /// CUDA errors, such as a size beyond the device's limit.
    pub fn set_dynamic_shared(&self, bytes: u32) -> Result<()> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        let _bound = self.module.context.enter()?;
        // SAFETY: the function lives as long as the module, which this value holds.
        unsafe {
            call!(self.module.context.driver, cuFuncSetAttribute(self.handle, attribute, bytes))
        }
    }

    /// Registers per thread.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn registers(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Local memory per thread, in bytes, such as spilled registers.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn local_bytes(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    }

    /// Static shared memory per block, in bytes.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn shared_bytes(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    }

    /// Occupancy: resident blocks per SM, for `block` threads and `shared` bytes dynamic
    /// shared memory.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn blocks_per_sm(&self, block: u32, shared: u32) -> Result<u32> {
        let mut blocks: c_int = 0;
        let block = i32::try_from(block).unwrap_or(i32::MAX);
        let _bound = self.module.context.enter()?;
        // SAFETY: writes one integer; the function lives as long as the module, which this value holds.
        unsafe {
            call!(
                self.module.context.driver,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &raw mut blocks,
                    self.handle,
                    block,
                    shared as usize
                )
            )
        }?;
        Ok(blocks.unsigned_abs())
    }

    /// Launches the kernel on a stream: `grid` blocks with `block` threads each, and `shared` bytes dynamic shared
    /// memory. The only argument is passed by value and read from `argument` before this returns.
    ///
    /// # Errors
    ///
    /// CUDA errors, including from earlier asynchronous work.
    ///
    /// # Safety
    ///
    /// The kernel takes one argument, and `argument` points to a value with exactly that layout; addresses in it are
    /// valid on the device until the kernel has ended. The stream is 0 or lives. A kernel that starts as
    /// [`Start::Dependent`] executes `griddepcontrol.wait` in all threads before it accesses memory that
    /// earlier work on the stream accesses.
    pub unsafe fn launch(
        &self,
        [grid, block, shared]: [u32; 3],
        start: Start,
        stream: Stream,
        argument: *const c_void,
    ) -> Result<()> {
        let context = &self.module.context;
        let mut arguments = [argument.cast_mut()];
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream.raw(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(start == Start::Dependent),
        };
        let _bound = context.enter()?;
        // SAFETY: the function lives as long as the module, which this holds; configuration and attribute are
        // local; it reads the only argument, for which the caller is responsible.
        unsafe {
            call!(
                context.driver,
                cuLaunchKernelEx(
                    &raw const config,
                    self.handle,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        let mut value: c_int = 0;
        let _bound = self.module.context.enter()?;
        // SAFETY: writes one integer; the function lives as long as the module, which this value holds.
        unsafe {
            call!(
                self.module.context.driver,
                cuFuncGetAttribute(&raw mut value, attribute, self.handle)
            )
        }?;
        Ok(value.unsigned_abs())
    }
}

/// Checks that bytes are a complete ELF file, as cubins are: the header tables, the last part in such a file, must lie
/// within them.
pub(crate) fn check_cubin(cubin: &[u8]) -> Result<()> {
    let refuse = |problem| Error::Cubin { bytes: cubin.len(), problem };
    if cubin.len() < ELF_HEADER_BYTES || !cubin.starts_with(ELF) {
        return Err(refuse("no ELF header"));
    }
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| cubin[at + byte]));
    let half = |at: usize| u64::from(u16::from_le_bytes([cubin[at], cubin[at + 1]]));
    // e_phoff with e_phentsize and e_phnum, then e_shoff with e_shentsize and e_shnum.
    for (table, size, count) in [(32, 54, 56), (40, 58, 60)] {
        let end = word(table).checked_add(half(size) * half(count));
        if end.is_none_or(|end| end > cubin.len() as u64) {
            return Err(refuse("it is truncated"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_elf_files_go_to_the_driver() {
        let problem = |cubin: &[u8]| match check_cubin(cubin) {
            Err(Error::Cubin { problem, .. }) => problem,
            other => panic!("{other:?}"),
        };
        assert_eq!(problem(b""), "no ELF header");
        assert_eq!(problem(&[b'x'; 128]), "no ELF header");
        let mut cubin = vec![0; 192];
        cubin[..4].copy_from_slice(ELF);
        cubin[40..48].copy_from_slice(&64_u64.to_le_bytes());
        cubin[58..60].copy_from_slice(&64_u16.to_le_bytes());
        cubin[60..62].copy_from_slice(&2_u16.to_le_bytes());
        assert_eq!(check_cubin(&cubin), Ok(()));
        assert_eq!(problem(&cubin[..191]), "it is truncated");
        cubin[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(problem(&cubin), "it is truncated");
    }
}
