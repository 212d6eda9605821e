//! CUDA driver (libcuda), loaded once.

use crate::error::{Error, Result};
use crate::library::{functions, open, too_old};
use crate::properties::Properties;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, OnceLock};
use sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUfunction,
    CUfunction_attribute, CUipcMemHandle, CUlaunchConfig, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemRangeHandleType, CUmodule, CUpointer_attribute, CUresult,
    CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
};

const LIBRARY: &str = "the CUDA driver (libcuda.so.1)";
const NEEDS: &str = "a driver for CUDA 12.0 or newer";
const SUCCESS: u32 = 0;

functions! {
    /// libcuda functions.
    Api, declared in sys as CUresult;
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);

    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);

    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxGetDevice(*mut CUdevice);
    cuCtxSetCurrent(CUcontext);
    cuCtxSynchronize();
    cuCtxEnablePeerAccess(CUcontext, c_uint);
    cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope);
    cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);

    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
    cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
    cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
    cuIpcCloseMemHandle(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);

    cuMemGetAllocationGranularity(
        *mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags,
    );
    cuMemCreate(
        *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong,
    );
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle(
        *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong,
    );
    cuMemImportFromShareableHandle(
        *mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType,
    );
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);

    cuModuleLoadData(*mut CUmodule, *const c_void);
    cuModuleUnload(CUmodule);
    cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    cuModuleGetGlobal_v2(*mut CUdeviceptr, *mut usize, CUmodule, *const c_char);
    cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
    cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
    cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);

    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
    cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
    cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);

    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
}

// Not in `Api`: they take a result, which cudarc declares as an enumeration.
type Describe = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
// Not in `Api`: CUDA 13's headers map this name to the newer one; the library has both.
type GetUuid = unsafe extern "C" fn(*mut CUuuid, CUdevice) -> u32;
// Not in `Api`: optional.
pub(crate) type GetRangeHandle =
    unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong) -> u32;
const _: unsafe fn(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong) -> CUresult =
    sys::cuMemGetHandleForAddressRange;

/// CUDA driver.
pub struct Driver {
    pub(crate) api: Api,
    pub(crate) range_handle: Option<GetRangeHandle>,
    pub(crate) physical_uuid: Option<GetUuid>,
    error_name: Describe,
    error_text: Describe,
    version: u32,
    pub(crate) devices: Mutex<BTreeMap<u32, &'static Properties>>,
}

/// This process's driver, loaded and initialised at the first call.
///
/// # Errors
///
/// [`Error::Absent`] without a driver, [`Error::TooOld`], and errors from `cuInit`, such as no visible GPU. The
/// outcome is cached.
pub fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(Driver::load).as_ref().map_err(Clone::clone)
}

/// Calls a driver function; errors name it.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let driver: &$crate::driver::Driver = $driver;
        driver.check(stringify!($name), (driver.api.$name)($($argument),*))
    }};
}
pub(crate) use call;

impl Driver {
    fn load() -> Result<Self> {
        let library = open(["libcuda.so.1"]).map_err(|why| Error::Absent {
            library: LIBRARY,
            why,
            remedy: "install NVIDIA's driver, or start the container with its GPUs (--gpus all)",
        })?;
        // Driver threads and exit handlers outlive this library: it is never unloaded.
        let library = Box::leak(Box::new(library));
        let missing = too_old(LIBRARY, NEEDS);
        // SAFETY: the library is libcuda, and never unloaded.
        let api = unsafe { Api::look_up(library) }.map_err(&missing)?;
        // SAFETY: as above; cuda.h declares this signature, with an enumeration as the first argument.
        let error_name = unsafe { library.get("cuGetErrorName") };
        // SAFETY: as above.
        let error_text = unsafe { library.get("cuGetErrorString") };
        // SAFETY: as above; it has the newer one's signature, which is in `Api`.
        let physical_uuid = unsafe { library.get::<GetUuid>("cuDeviceGetUuid") };
        // SAFETY: as above; cuda.h declares this signature, which the constant above checks.
        let range_handle = unsafe { library.get("cuMemGetHandleForAddressRange") };
        let mut driver = Self {
            api,
            range_handle: range_handle.ok().map(|function| *function),
            physical_uuid: physical_uuid.ok().map(|function| *function),
            error_name: *error_name.map_err(|_| missing("cuGetErrorName"))?,
            error_text: *error_text.map_err(|_| missing("cuGetErrorString"))?,
            version: 0,
            devices: Mutex::default(),
        };
        let mut version = 0;
        // SAFETY: no flags are defined, and any thread may initialise the driver, more than once.
        unsafe { call!(&driver, cuInit(0)) }?;
        // SAFETY: writes one integer.
        unsafe { call!(&driver, cuDriverGetVersion(&raw mut version)) }?;
        driver.version = version.unsigned_abs();
        Ok(driver)
    }

    /// Newest supported CUDA version, as 13000 for 13.0.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Device count visible to this process.
    ///
    /// # Errors
    ///
    /// CUDA errors.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count)) }?;
        Ok(count.unsigned_abs())
    }

    /// Converts a result code.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(Error::Call {
            call,
            code,
            name: self.describe(self.error_name, code, "unknown error"),
            text: self.describe(self.error_text, code, "no text"),
            remedy: crate::error::remedy(code),
        })
    }

    fn describe(&self, function: Describe, code: u32, otherwise: &str) -> String {
        let mut text = std::ptr::null();
        // SAFETY: valid for any number; it writes a string's address, or null.
        if unsafe { function(code, &raw mut text) } != SUCCESS || text.is_null() {
            return otherwise.to_owned();
        }
        // SAFETY: driver strings are NUL-terminated and never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
