//! libibverbs, loaded at run time.
//!
//! A copy already loaded into the process is used in any case; otherwise `WEFT_LIBIBVERBS` names the
//! library, and without it the loader's default path is searched.

use super::super::dynamic_library::{function, open, open_file, path_of};
use super::{fork, sys};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Environment variable: library path.
pub const PATH: &str = "WEFT_LIBIBVERBS";
const NAME: &str = "libibverbs.so.1";

/// Device in a list that libibverbs returned.
pub type RawDevice = *mut c_void;

/// `ibv_reg_dmabuf_mr`: domain, offset in the dma-buf, length, address, descriptor, access.
pub type RegDmaBuf =
    unsafe extern "C" fn(*mut sys::Pd, u64, usize, u64, c_int, c_int) -> *mut sys::Mr;

/// Functions that the library exports. Data path functions stand in a context's table.
pub struct Library {
    pub get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut RawDevice,
    pub free_device_list: unsafe extern "C" fn(*mut RawDevice),
    pub get_device_name: unsafe extern "C" fn(RawDevice) -> *const c_char,
    pub open_device: unsafe extern "C" fn(RawDevice) -> *mut sys::Context,
    pub close_device: unsafe extern "C" fn(*mut sys::Context) -> c_int,
    pub query_device: unsafe extern "C" fn(*mut sys::Context, *mut sys::DeviceAttr) -> c_int,
    pub query_port: unsafe extern "C" fn(*mut sys::Context, u8, *mut sys::PortAttr) -> c_int,
    pub query_gid_ex:
        unsafe extern "C" fn(*mut sys::Context, u32, u32, *mut sys::GidEntry, u32, usize) -> c_int,
    pub get_async_event: unsafe extern "C" fn(*mut sys::Context, *mut sys::AsyncEvent) -> c_int,
    pub ack_async_event: unsafe extern "C" fn(*mut sys::AsyncEvent),
    pub alloc_pd: unsafe extern "C" fn(*mut sys::Context) -> *mut sys::Pd,
    pub dealloc_pd: unsafe extern "C" fn(*mut sys::Pd) -> c_int,
    pub reg_mr_iova2:
        unsafe extern "C" fn(*mut sys::Pd, *mut c_void, usize, u64, c_uint) -> *mut sys::Mr,
    /// Since rdma-core 34.
    pub reg_dmabuf_mr: Option<RegDmaBuf>,
    pub dereg_mr: unsafe extern "C" fn(*mut sys::Mr) -> c_int,
    pub create_comp_channel: unsafe extern "C" fn(*mut sys::Context) -> *mut sys::CompletionChannel,
    pub destroy_comp_channel: unsafe extern "C" fn(*mut sys::CompletionChannel) -> c_int,
    pub create_cq: unsafe extern "C" fn(
        *mut sys::Context,
        c_int,
        *mut c_void,
        *mut sys::CompletionChannel,
        c_int,
    ) -> *mut sys::Cq,
    pub destroy_cq: unsafe extern "C" fn(*mut sys::Cq) -> c_int,
    pub get_cq_event: unsafe extern "C" fn(
        *mut sys::CompletionChannel,
        *mut *mut sys::Cq,
        *mut *mut c_void,
    ) -> c_int,
    pub ack_cq_events: unsafe extern "C" fn(*mut sys::Cq, c_uint),
    pub create_srq: unsafe extern "C" fn(*mut sys::Pd, *mut sys::SrqInitAttr) -> *mut sys::Srq,
    pub destroy_srq: unsafe extern "C" fn(*mut sys::Srq) -> c_int,
    pub create_qp: unsafe extern "C" fn(*mut sys::Pd, *mut sys::QpInitAttr) -> *mut sys::Qp,
    pub modify_qp: unsafe extern "C" fn(*mut sys::Qp, *mut sys::QpAttr, c_int) -> c_int,
    pub destroy_qp: unsafe extern "C" fn(*mut sys::Qp) -> c_int,
    pub wc_status_str: unsafe extern "C" fn(c_uint) -> *const c_char,
    pub event_type_str: unsafe extern "C" fn(c_uint) -> *const c_char,
    /// The kernel copies registered pages for forked children.
    pub copies_at_fork: bool,
    /// File that it was loaded from.
    pub path: PathBuf,
}

impl Library {
    /// This process's library, loaded at the first call.
    ///
    /// # Errors
    /// Reason why it is missing.
    pub fn get() -> Result<&'static Library, &'static str> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(load).as_ref().map_err(String::as_str)
    }

    /// Completion status in words.
    pub fn status(&self, status: c_uint) -> String {
        // SAFETY: returns a static string for every number.
        unsafe { text((self.wc_status_str)(status)) }
    }

    /// Asynchronous event kind in words.
    pub fn event(&self, kind: c_uint) -> String {
        // SAFETY: returns a static string for every number.
        unsafe { text((self.event_type_str)(kind)) }
    }
}

/// Library string.
///
/// # Safety
/// Null, or a string that is valid now.
pub unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: by the caller's contract.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

fn load() -> Result<Library, String> {
    let held = open(NAME, libc::RTLD_NOW | libc::RTLD_NOLOAD);
    let handle = held.or_else(|_| match weft_environment::path(PATH) {
        Some(path) => open_file(&path, libc::RTLD_NOW).map_err(|why| {
            let path = path.display();
            format!("{PATH}={path}: {why}; name a file of libibverbs, or unset {PATH}")
        }),
        None => open(NAME, libc::RTLD_NOW).map_err(|why| {
            format!("{why}; install libibverbs (Debian: libibverbs1), or set {PATH} to its file")
        }),
    })?;
    // SAFETY: the library is libibverbs, whose functions have these types since `IBVERBS_1.1` (those with
    // newer symbols: since these exist), and is never unloaded.
    unsafe {
        let copies_at_fork = fork::prepare(handle)?;
        let get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut RawDevice =
            function(handle, c"ibv_get_device_list", None)?;
        let path = path_of(get_device_list as *const c_void, NAME);
        Ok(Library {
            get_device_list,
            free_device_list: function(handle, c"ibv_free_device_list", None)?,
            get_device_name: function(handle, c"ibv_get_device_name", None)?,
            open_device: function(handle, c"ibv_open_device", None)?,
            close_device: function(handle, c"ibv_close_device", None)?,
            query_device: function(handle, c"ibv_query_device", None)?,
            query_port: function(handle, c"ibv_query_port", None)?,
            query_gid_ex: function(handle, c"_ibv_query_gid_ex", None)?,
            get_async_event: function(handle, c"ibv_get_async_event", None)?,
            ack_async_event: function(handle, c"ibv_ack_async_event", None)?,
            alloc_pd: function(handle, c"ibv_alloc_pd", None)?,
            dealloc_pd: function(handle, c"ibv_dealloc_pd", None)?,
            reg_mr_iova2: function(handle, c"ibv_reg_mr_iova2", None)?,
            reg_dmabuf_mr: function(handle, c"ibv_reg_dmabuf_mr", None).ok(),
            dereg_mr: function(handle, c"ibv_dereg_mr", None)?,
            create_comp_channel: function(handle, c"ibv_create_comp_channel", None)?,
            destroy_comp_channel: function(handle, c"ibv_destroy_comp_channel", None)?,
            create_cq: function(handle, c"ibv_create_cq", None)?,
            destroy_cq: function(handle, c"ibv_destroy_cq", None)?,
            get_cq_event: function(handle, c"ibv_get_cq_event", None)?,
            ack_cq_events: function(handle, c"ibv_ack_cq_events", None)?,
            create_srq: function(handle, c"ibv_create_srq", None)?,
            destroy_srq: function(handle, c"ibv_destroy_srq", None)?,
            create_qp: function(handle, c"ibv_create_qp", None)?,
            modify_qp: function(handle, c"ibv_modify_qp", None)?,
            destroy_qp: function(handle, c"ibv_destroy_qp", None)?,
            wc_status_str: function(handle, c"ibv_wc_status_str", None)?,
            event_type_str: function(handle, c"ibv_event_type_str", None)?,
            copies_at_fork,
            path,
        })
    }
}
