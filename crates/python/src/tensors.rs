//! Addresses of PyTorch tensors, through the C functions of DLPack's exchange API: a read takes tens of nanoseconds
//! and no attribute of Python.

use crate::memory::{DlDevice, DlTensor};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The attribute of a class that has the functions, and the name of its capsule.
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const CAPSULE: &[u8] = b"dlpack_exchange_api\0";
/// The version of DLPack whose table is below.
const MAJOR: u32 = 1;

/// Fills in the description of a tensor object; -1 with an exception on failure.
type Borrow = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    earlier: *const Header,
}

/// The part of DLPack's `DLPackExchangeAPI` that is used here.
#[repr(C)]
struct Functions {
    header: Header,
    /// Functions that make and take tensors; unused.
    owning: [*const c_void; 3],
    borrow: Option<Borrow>,
}

/// A class of tensors that can be read.
pub struct Reader {
    class: Py<PyType>,
    borrow: Borrow,
}

impl Reader {
    /// Reader of a class; `None` if the class has no such functions of a supported version.
    pub fn of(class: &Bound<'_, PyType>) -> Option<Reader> {
        let capsule = class.getattr(ATTRIBUTE).ok()?;
        let name = CAPSULE.as_ptr().cast::<c_char>();
        // SAFETY: a live object; the call itself checks that it is a capsule of that name.
        let mut header =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name) }.cast::<Header>();
        if header.is_null() {
            drop(PyErr::take(class.py()));
            return None;
        }
        // SAFETY: a capsule of that name holds a table that begins with a header and lives as long as the process,
        // as do those of earlier versions that it names; only a table of this version is read further.
        let borrow = unsafe {
            while (*header).major != MAJOR {
                header = (*header).earlier.cast_mut();
                if header.is_null() {
                    return None;
                }
            }
            (*header.cast::<Functions>()).borrow?
        };
        Some(Reader { class: class.clone().unbind(), borrow })
    }

    /// The tensor that an object is, if it is exactly of this class and in memory that DLPack describes.
    #[inline]
    pub fn read<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Tensor<'a>> {
        if !std::ptr::eq(object.get_type_ptr(), self.class.as_ptr().cast()) {
            return None;
        }
        let mut tensor = MaybeUninit::uninit();
        // SAFETY: an object of the class that the function is of, and the GIL is held; it fills in the tensor.
        let failed = unsafe { (self.borrow)(object.as_ptr().cast(), tensor.as_mut_ptr()) };
        if failed != 0 {
            drop(PyErr::take(object.py()));
            return None;
        }
        // SAFETY: filled in, since the function returned 0.
        Some(Tensor { described: unsafe { tensor.assume_init() }, object: PhantomData })
    }
}

/// Element type, in DLPack's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The kind.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
}

/// A tensor, while the object lives that it was read from.
pub struct Tensor<'a> {
    described: DlTensor,
    object: PhantomData<&'a ()>,
}

impl Tensor<'_> {
    /// Elements in each dimension.
    #[inline]
    pub fn shape(&self) -> &[i64] {
        self.entries(self.described.shape)
    }

    /// Its address if it is of this format, on this device and contiguous, and of this shape. 0 if it has no
    /// elements.
    #[inline]
    pub fn address(&self, device: DlDevice, format: Format, shape: &[i64]) -> Option<u64> {
        let DlTensor { code, bits, lanes, data, byte_offset, .. } = self.described;
        let fits = self.described.device == device
            && (code, bits, lanes) == (format.code, format.bits, 1)
            && self.shape() == shape
            && self.is_contiguous();
        fits.then_some(data as u64 + byte_offset)
    }

    #[inline]
    fn is_contiguous(&self) -> bool {
        let strides = self.entries(self.described.strides);
        let mut expected = 1;
        // DLPack may leave strides out of a contiguous tensor.
        strides.is_empty()
            || self.shape().iter().zip(strides).rev().all(|(&extent, &stride)| {
                let right = extent == 1 || stride == expected;
                expected *= extent;
                right
            })
    }

    #[inline]
    fn entries(&self, first: *const i64) -> &[i64] {
        if first.is_null() {
            return &[];
        }
        // SAFETY: DLPack guarantees as many entries of shape and strides as there are dimensions; they belong to the
        // tensor, whose object lives.
        unsafe { std::slice::from_raw_parts(first, self.described.dimensions.max(0) as usize) }
    }
}

/// True if a tensor requires a gradient.
#[inline]
pub fn requires_gradient(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}
