//! NVML, for `weft doctor`: MIG mode, and NVLink between GPUs.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::library::{self, functions, too_old};
use std::ffi::{CStr, CString, c_char, c_uint, c_void};

const LIBRARY: &str = "NVIDIA's management library (libnvidia-ml.so.1)";
const NOT_SUPPORTED: u32 = 3;
const P2P_OVER_NVLINK: u32 = 2;
const P2P_OK: u32 = 0;

type Handle = *mut c_void;

functions! {
    /// NVML functions.
    Api;
    nvmlInit_v2();
    nvmlShutdown();
    nvmlSystemGetDriverVersion(*mut c_char, c_uint);
    nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Handle);
    nvmlDeviceGetMigMode(Handle, *mut c_uint, *mut c_uint);
    nvmlDeviceGetP2PStatus(Handle, Handle, c_uint, *mut c_uint);
}

// Not in `Api`: it returns text.
type Describe = unsafe extern "C" fn(u32) -> *const c_char;

/// NVML session; shut down on drop.
pub struct Nvml {
    api: Api,
    error_text: Describe,
}

/// Calls an NVML function; errors name it.
macro_rules! call {
    ($nvml:expr, $name:ident($($argument:expr),* $(,)?)) => {
        $nvml.check(stringify!($name), ($nvml.api.$name)($($argument),*))
    };
}

impl Nvml {
    /// Loads and initialises NVML.
    ///
    /// # Errors
    ///
    /// [`Error::Absent`] without NVML, [`Error::TooOld`], and NVML errors.
    pub fn open() -> Result<Self> {
        let library = library::open(["libnvidia-ml.so.1"]).map_err(|why| Error::Absent {
            library: LIBRARY,
            why,
            remedy: "install NVIDIA's driver, or start the container with the capability \"utility\"",
        })?;
        // Opens are reference-counted; it is never unloaded.
        let library = Box::leak(Box::new(library));
        let missing = too_old(LIBRARY, "a driver for CUDA 12.0 or newer");
        // SAFETY: the library is NVML, and never unloaded.
        let api = unsafe { Api::look_up(library) }.map_err(&missing)?;
        // SAFETY: as above; nvml.h declares this signature, with an enumeration as the argument.
        let error_text = *unsafe { library.get::<Describe>("nvmlErrorString") }
            .map_err(|_| missing("nvmlErrorString"))?;
        // SAFETY: any thread may initialise NVML, repeatedly.
        let code = unsafe { (api.nvmlInit_v2)() };
        if code != 0 {
            return Err(failure("nvmlInit_v2", code, error_text));
        }
        Ok(Self { api, error_text })
    }

    /// NVIDIA driver version, for example `580.95.05`.
    ///
    /// # Errors
    ///
    /// NVML errors.
    pub fn driver_version(&self) -> Result<String> {
        let mut version: [c_char; 96] = [0; 96];
        // SAFETY: writes at most 95 characters, ending with NUL.
        unsafe { call!(self, nvmlSystemGetDriverVersion(version.as_mut_ptr(), 95)) }?;
        // SAFETY: NUL-terminated, since the last character was not written.
        Ok(unsafe { CStr::from_ptr(version.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// MIG mode on a device's GPU; `None` without MIG support.
    ///
    /// # Errors
    ///
    /// NVML errors: a container may have slices without the GPU.
    pub fn mig_mode(&self, device: Device) -> Result<Option<bool>> {
        let handle = self.handle(device)?;
        let (mut now, mut pending) = (0, 0);
        // SAFETY: writes two integers; the handle came from NVML.
        match unsafe { call!(self, nvmlDeviceGetMigMode(handle, &raw mut now, &raw mut pending)) } {
            Ok(()) => Ok(Some(now != 0)),
            Err(Error::Call { code: NOT_SUPPORTED, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// True if two GPUs have peer access over NVLink, directly or through switches.
    ///
    /// # Errors
    ///
    /// NVML errors.
    pub fn over_nvlink(&self, one: Device, other: Device) -> Result<bool> {
        let (one, other) = (self.handle(one)?, self.handle(other)?);
        let mut status = P2P_OK;
        // SAFETY: writes one integer; the handles came from NVML.
        match unsafe {
            call!(self, nvmlDeviceGetP2PStatus(one, other, P2P_OVER_NVLINK, &raw mut status))
        } {
            Ok(()) => Ok(status == P2P_OK),
            Err(Error::Call { code: NOT_SUPPORTED, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn handle(&self, device: Device) -> Result<Handle> {
        let bus_id = CString::new(device.bus_id()).unwrap_or_default();
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle, and reads a NUL-terminated string.
        unsafe { call!(self, nvmlDeviceGetHandleByPciBusId_v2(bus_id.as_ptr(), &raw mut handle)) }?;
        Ok(handle)
    }

    fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(failure(call, code, self.error_text)) }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialised once by this value. An error has no remedy here.
        unsafe { (self.api.nvmlShutdown)() };
    }
}

fn failure(call: &'static str, code: u32, describe: Describe) -> Error {
    // SAFETY: valid for any number.
    let text = unsafe { describe(code) };
    let text = if text.is_null() {
        "no text".to_owned()
    } else {
        // SAFETY: NVML strings are NUL-terminated and never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Error::Call { call, code, name: "NVML".to_owned(), text, remedy: remedy(code) }
}

/// Remedy for an NVML result code; empty if unknown.
fn remedy(code: u32) -> &'static str {
    match code {
        4 => "the container or the system forbids it: check its permissions",
        9 => "NVIDIA's driver is not loaded: check `nvidia-smi`",
        15 => "a GPU has fallen off the bus: restart the machine",
        18 => "the driver was updated while it was loaded: restart the machine",
        _ => "",
    }
}
