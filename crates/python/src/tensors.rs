//! PyTorch tensor addresses, through the C functions in DLPack's exchange API: a read takes tens of nanoseconds
//! and no Python attribute.

use crate::memory::{DlDevice, DlTensor};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The class attribute that has the functions, and the capsule name.
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const CAPSULE: &[u8] = b"dlpack_exchange_api\0";
/// DLPack version for the table below.
const MAJOR: u32 = 1;

/// Fills in a tensor object's description; -1 with an exception on failure.
type Borrow = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    earlier: *const Header,
}

/// The part in DLPack's `DLPackExchangeAPI` that is used here.
#[repr(C)]
struct Functions {
    header: Header,
    /// Functions that make and take tensors; unused.
    owning: [*const c_void; 3],
    borrow: Option<Borrow>,
}

/// A tensor class that can be read.
pub struct Reader {
    class: Py<PyType>,
    borrow: Borrow,
}

impl Reader {
    /// Reader for a class; `None` if the class has no such functions in a supported version.
    pub fn of(class: &Bound<'_, PyType>) -> Option<Reader> {
        let capsule = class.getattr(ATTRIBUTE).ok()?;
        let name = CAPSULE.as_ptr().cast::<c_char>();
        // SAFETY: a live object; the call itself checks that it is a capsule with that name.
        let mut header =
            unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name) }.cast::<Header>();
        if header.is_null() {
            drop(PyErr::take(class.py()));
            return None;
        }
        // SAFETY: a capsule with that name holds a table that begins with a header and lives as long as the process,
        // as do tables for earlier versions that it names; only a table with this version is read further.
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

    /// The tensor that an object is, if it is exactly in this class and in memory that DLPack describes.
    #[inline]
    pub fn read<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Tensor<'a>> {
        if !std::ptr::eq(object.get_type_ptr(), self.class.as_ptr().cast()) {
            return None;
        }
        let mut tensor = MaybeUninit::uninit();
        // SAFETY: an object in the class that the function belongs to, and the GIL is held; it fills in the tensor.
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
    /// Element bits.
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

    /// Address if the tensor has this format and shape, is on this device and contiguous. 0 if it has no
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
        // DLPack may omit a contiguous tensor's strides.
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
        // SAFETY: DLPack guarantees as many entries in shape and strides as there are dimensions; they belong to the
        // tensor, whose object lives.
        unsafe { std::slice::from_raw_parts(first, self.described.dimensions.max(0) as usize) }
    }
}

/// True if a tensor requires a gradient.
#[inline]
pub fn requires_gradient(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.is_truthy()
}
