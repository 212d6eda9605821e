//! Memory shared with Python without copies: the user's arrays as regions, Weft's memory as buffers, DLPack
//! tensors as addresses.

use crate::errors::raise;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::ffi::{c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use weft_fabric::{Error, Memory, MemoryKind};

/// The error with a remedy for device memory that no enabled provider can use.
pub fn with_remedy(error: Error, device: Option<u32>) -> Error {
    match (error, device) {
        (Error::Unusable { provider, key, detail }, Some(device)) => {
            let detail = format!(
                "{detail}; to send it from cuda:{device} itself, add copy to the providers \
                 (WEFT_PROVIDERS=copy,tcp), use tcp (WEFT_PROVIDERS=tcp, and WEFT_STAGED not 0), \
                 or set WEFT_STAGED=1 on all ranks"
            );
            Error::Unusable { provider, key, detail }
        }
        (error, _) => error,
    }
}

/// The user's bytes, on the host or on the device with this ordinal, kept alive by the Python object that
/// owns them.
///
/// # Errors
/// `ValueError` if the address is zero though there are bytes.
pub fn lent(
    address: usize,
    length: usize,
    owner: Py<PyAny>,
    device: Option<u32>,
) -> PyResult<Memory> {
    let address = match NonNull::new(address as *mut u8) {
        Some(address) => address,
        None if length == 0 => NonNull::dangling(),
        None => return Err(PyValueError::new_err("an array at address zero")),
    };
    let owner = Box::new(owner);
    // SAFETY: the Python layer took address, length and device from the array `owner`, which keeps the
    // bytes where they are while it lives.
    Ok(unsafe {
        match device {
            None => Memory::user_buffer(address, length, MemoryKind::Host, owner),
            Some(device) => Memory::on_device(address, length, device, None, owner),
        }
    })
}

/// Byte range in a region's memory, as a Python buffer; writable unless it is the user's and read-only.
#[pyclass(frozen, module = "weft._native")]
pub struct View {
    memory: Arc<Memory>,
    range: Range<usize>,
    writable: bool,
}

impl View {
    /// Bytes `range` of `memory`.
    pub fn new(memory: Arc<Memory>, range: Range<usize>, writable: bool) -> View {
        View { memory, range, writable }
    }
}

#[pymethods]
impl View {
    fn __len__(&self) -> usize {
        self.range.len()
    }

    /// CUDA's array interface, from which `torch.as_tensor` and CuPy make a byte array without a copy. The
    /// array keeps this object alive, and this object keeps the memory alive.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.memory.host().is_some() {
            return Err(PyAttributeError::new_err(
                "CPU memory: only memory of a device has this interface; use the buffer protocol",
            ));
        }
        let interface = PyDict::new(py);
        let address = self.memory.address() + self.range.start as u64;
        interface.set_item("shape", (self.range.len(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (address, !self.writable))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    /// SAFETY (as PyO3 demands for this slot): fills `view` with a reference to `self`, whose memory
    /// stays mapped while the buffer holds that reference.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let Some(base) = this.memory.host() else {
            return Err(PyBufferError::new_err(
                "memory of a device: the CPU cannot read it; use __cuda_array_interface__",
            ));
        };
        // SAFETY: `range` was checked against the memory when the view was made.
        let first = unsafe { base.as_ptr().add(this.range.start) };
        let (first, length) = (first.cast(), this.range.len() as ffi::Py_ssize_t);
        let (owner, read_only) = (slf.as_ptr(), c_int::from(!this.writable));
        let fill = ffi::PyBuffer_FillInfo;
        // SAFETY: `view` is the interpreter's, `first` and `length` describe memory that lives as
        // long as `slf`, and the call takes a reference to it.
        let filled = unsafe { fill(view, owner, first, length, read_only, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// A device, as DLPack numbers it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    pub kind: i32,
    pub number: i32,
}

/// A tensor, as DLPack describes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device: DlDevice,
    pub dimensions: i32,
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}

/// DLPack's name for an unversioned tensor that is not yet consumed.
const DLPACK_NAME: &[u8] = b"dltensor\0";
/// Memory that the CPU can load and store: host memory, and memory pinned by CUDA or ROCm.
const DLPACK_CPU: [i32; 3] = [1, 3, 11];
/// CUDA device memory.
pub const DLPACK_CUDA: i32 = 2;

/// A tensor's address, shape, dtype and bytes.
type Tensor = (usize, Vec<i64>, String, usize);

/// Address, shape, dtype and bytes from a DLPack capsule whose tensor is contiguous, and in memory on the
/// CPU or, if one is given, on that CUDA device; `what` names it in errors. The capsule is not consumed: it owns the
/// tensor, so keep it as long as the address is used.
#[pyfunction]
#[pyo3(signature = (capsule, what, device=None))]
pub fn dlpack_tensor(
    capsule: &Bound<'_, PyCapsule>,
    what: &str,
    device: Option<i32>,
) -> PyResult<Tensor> {
    let py = capsule.py();
    let name = DLPACK_NAME.as_ptr().cast::<c_char>();
    // SAFETY: a live capsule; the name is checked by the call itself.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name) };
    if pointer.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a capsule with that name holds a DLManagedTensor, which begins with a DLTensor, and
    // owns it while the capsule lives.
    let tensor = unsafe { &*pointer.cast::<DlTensor>() };
    let DlDevice { kind, number } = tensor.device;
    match device {
        None if !DLPACK_CPU.contains(&kind) => {
            let message = format!("{what} is not in CPU memory: copy it there first");
            return Err(raise(py, "RegionError", &message));
        }
        Some(device) if (kind, number) != (DLPACK_CUDA, device) => {
            let message = format!(
                "{what}: its DLPack capsule is of device type {kind}, number {number}; CUDA device \
                 {device}, which its __dlpack_device__ names, is expected"
            );
            return Err(raise(py, "RegionError", &message));
        }
        _ => {}
    }
    let dimensions = if tensor.shape.is_null() { 0 } else { tensor.dimensions.max(0) as usize };
    // SAFETY: DLPack guarantees `ndim` entries in shape, and in strides unless that is null.
    let (shape, strides): (&[i64], &[i64]) = unsafe {
        let entries = |first: *const i64| {
            if first.is_null() { &[][..] } else { std::slice::from_raw_parts(first, dimensions) }
        };
        (entries(tensor.shape), entries(tensor.strides))
    };
    let elements = shape
        .iter()
        .try_fold(1_usize, |product, extent| product.checked_mul(usize::try_from(*extent).ok()?));
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    let bytes = elements.and_then(|elements| Some(elements.checked_mul(bits)?.div_ceil(8)));
    let Some(bytes) = bytes else {
        let message = format!("{what}: a shape of more bytes than an address space has");
        return Err(raise(py, "ShapeError", &message));
    };
    let mut expected = 1;
    for (extent, stride) in shape.iter().zip(strides).rev().filter(|_| bytes > 0) {
        if *extent > 1 && *stride != expected {
            let message = format!("{what} is not contiguous: pass a contiguous copy of it");
            return Err(raise(py, "ShapeError", &message));
        }
        expected *= extent;
    }
    let kind = match (tensor.code, tensor.lanes) {
        (0, 1) => "int",
        (1, 1) => "uint",
        (2, 1) => "float",
        (4, 1) => "bfloat",
        _ => "opaque",
    };
    let address = tensor.data as usize + tensor.byte_offset as usize;
    Ok((address, shape.to_vec(), format!("{kind}{}", tensor.bits), bytes))
}
