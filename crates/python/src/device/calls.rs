//! Device all-to-all launches with tensors: one call from Python checks the tensors and launches.
//!
//! A call returns `None` or `false`, without a launch, if a tensor differs from the required format, shape or device, or
//! if the channel's last call was on another stream. The Python layer then checks step by step, which raises the error or
//! puts the streams in order.

use super::all_to_all::DeviceAllToAll;
use crate::memory::{DLPACK_CUDA, DlDevice};
use crate::tensors::{Format, Reader, requires_gradient};
use pyo3::prelude::*;
use pyo3::types::PyType;
use std::sync::atomic::{AtomicU64, Ordering};
use weft_cuda::Stream;
use weft_moe::device::{
    CombineOutputs, DeviceAllToAll as Moe, DispatchInputs, DispatchOutputs, IdWidth, LaunchConfig,
};
use weft_moe::{DType, Float8, ScaleType, TokenType};

const BYTES: Format = Format { code: 1, bits: 8 };
const INT32: Format = Format { code: 0, bits: 32 };
const INT64: Format = Format { code: 0, bits: 64 };
const FLOAT32: Format = Format { code: 2, bits: 32 };
/// DLPack's CPU memory.
const CPU: DlDevice = DlDevice { kind: 1, number: 0 };
/// Row alignment in bytes: kernels move rows in 16-byte vectors.
const ROW_ALIGNMENT: u64 = 16;
/// No stream has this handle.
const NONE: u64 = u64::MAX;

/// Dispatch and combine on a `DeviceAllToAll` with tensors: see `weft.moe.device.launcher`.
#[pyclass(frozen, module = "weft._native")]
pub struct DeviceCalls {
    all_to_all: Py<DeviceAllToAll>,
    reader: Reader,
    device: DlDevice,
    formats: Formats,
    sizes: Sizes,
    offsets: OutputOffsets,
    streams: Box<[LastStreams]>,
}

/// Element counts in a call's arrays.
struct Formats {
    tokens: Format,
    /// Of scales, if tokens come with some; what is one byte may be given as such.
    scales: Option<Format>,
    ids: Format,
    /// Of the buffer that dispatch writes to.
    buffer: Format,
    outputs: Format,
    combined: Format,
}

/// Extents of a call's arrays.
struct Sizes {
    max_tokens: i64,
    hidden: i64,
    top_k: i64,
    scales: i64,
    positions: i64,
}

/// Dispatch output offsets in the buffer, in bytes, and the buffer's elements.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct OutputOffsets {
    tokens: Option<u64>,
    scales: Option<u64>,
    counts: u64,
    offsets: u64,
    rows: u64,
    weights: u64,
    experts: Option<u64>,
    elements: i64,
}

/// The stream in a channel's last call, by kind: see `weft.gpu.order`.
struct LastStreams {
    eager: AtomicU64,
    captured: AtomicU64,
}

impl LastStreams {
    fn of(&self, captured: bool) -> &AtomicU64 {
        if captured { &self.captured } else { &self.eager }
    }
}

/// Reason for no launch by native code.
enum Declined {
    /// A tensor or a stream that the Python layer has to look at.
    Unfit,
    Raised(PyErr),
}

impl From<PyErr> for Declined {
    fn from(error: PyErr) -> Declined {
        Declined::Raised(error)
    }
}

type Checked<T> = Result<T, Declined>;

/// `None` for a call that is left to the Python layer.
#[inline]
fn launched<T>(call: impl FnOnce() -> Checked<T>) -> PyResult<Option<T>> {
    match call() {
        Ok(result) => Ok(Some(result)),
        Err(Declined::Unfit) => Ok(None),
        Err(Declined::Raised(error)) => Err(error),
    }
}

/// Dispatch tensors: tokens, scales, ids, weights, count.
type Batch<'a, 'py> = (
    &'a Bound<'py, PyAny>,
    Option<&'a Bound<'py, PyAny>>,
    &'a Bound<'py, PyAny>,
    Option<&'a Bound<'py, PyAny>>,
    Option<&'a Bound<'py, PyAny>>,
);

impl DeviceCalls {
    /// Launch configuration of a call, if the channel's last call in this kind was on the same stream.
    #[inline]
    fn launch_config(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        num_sms: Option<u32>,
    ) -> Checked<LaunchConfig> {
        if self.device != CPU && !self.follows(py, channel, stream)? {
            return Err(Declined::Unfit);
        }
        Ok(LaunchConfig { num_sms, ..LaunchConfig::new(Stream(stream), channel) })
    }

    /// Address of a tensor with this format and shape. A tensor without elements is left to the caller.
    #[inline]
    fn address(&self, tensor: &Bound<'_, PyAny>, format: Format, shape: &[i64]) -> Checked<u64> {
        let read = self.reader.read(tensor).ok_or(Declined::Unfit)?;
        let address = read.address(self.device, format, shape);
        address.filter(|&address| address != 0).ok_or(Declined::Unfit)
    }

    /// Same as `address`, for a float tensor, which may require a gradient.
    #[inline]
    fn floats(&self, tensor: &Bound<'_, PyAny>, format: Format, shape: &[i64]) -> Checked<u64> {
        let address = self.address(tensor, format, shape)?;
        if requires_gradient(tensor)? { Err(Declined::Unfit) } else { Ok(address) }
    }

    /// Same as `floats`, for rows that kernels move in `ROW_ALIGNMENT`-byte vectors.
    #[inline]
    fn rows(&self, tensor: &Bound<'_, PyAny>, format: Format, shape: &[i64]) -> Checked<u64> {
        let address = self.floats(tensor, format, shape)?;
        if address.is_multiple_of(ROW_ALIGNMENT) { Ok(address) } else { Err(Declined::Unfit) }
    }

    /// Address of the actual token count, 0 if it is not given.
    #[inline]
    fn count(&self, count: Option<&Bound<'_, PyAny>>) -> Checked<u64> {
        count.map_or(Ok(0), |count| self.address(count, INT32, &[1]))
    }

    /// Batch addresses.
    #[inline]
    fn inputs(&self, batch: Batch<'_, '_>, layer: u32) -> Checked<DispatchInputs> {
        let (tokens, scales, ids, weights, count) = batch;
        let (formats, sizes) = (&self.formats, &self.sizes);
        let read = self.reader.read(tokens).ok_or(Declined::Unfit)?;
        let rows = read.shape().first().copied().ok_or(Declined::Unfit)?;
        if rows > sizes.max_tokens {
            return Err(Declined::Unfit);
        }
        let scales = match (scales, formats.scales) {
            (Some(scales), Some(format)) => self.scales(scales, format, &[rows, sizes.scales])?,
            (None, None) => 0,
            _ => return Err(Declined::Unfit),
        };
        let weights = weights.map(|weights| self.floats(weights, FLOAT32, &[rows, sizes.top_k]));
        Ok(DispatchInputs {
            tokens: self.rows(tokens, formats.tokens, &[rows, sizes.hidden])?,
            scales,
            ids: self.address(ids, formats.ids, &[rows, sizes.top_k])?,
            weights: weights.unwrap_or(Ok(0))?,
            count: self.count(count)?,
            // At most `max_tokens`, a 32-bit number.
            given: rows as u32,
            layer,
        })
    }

    /// Same as `floats`, for scales; one-byte scales may be given as bytes.
    #[inline]
    fn scales(&self, scales: &Bound<'_, PyAny>, format: Format, shape: &[i64]) -> Checked<u64> {
        match self.floats(scales, format, shape) {
            Err(Declined::Unfit) if format.bits == 8 => self.address(scales, BYTES, shape),
            address => address,
        }
    }

    /// Dispatch output addresses in the buffer.
    #[inline]
    fn outputs(&self, buffer: &Bound<'_, PyAny>) -> Checked<DispatchOutputs> {
        let OutputOffsets { tokens, scales, counts, offsets, rows, weights, experts, elements } =
            self.offsets;
        let base = self.address(buffer, self.formats.buffer, &[elements])?;
        Ok(DispatchOutputs {
            tokens: tokens.map_or(0, |at| base + at),
            scales: scales.map_or(0, |at| base + at),
            counts: base + counts,
            offsets: base + offsets,
            rows: base + rows,
            weights: base + weights,
            experts: experts.map_or(0, |at| base + at),
            load: 0,
            load_bytes: 4,
        })
    }

    /// Expert output address.
    #[inline]
    fn expert_outputs(&self, outputs: &Bound<'_, PyAny>) -> Checked<u64> {
        self.rows(outputs, self.formats.outputs, &[self.sizes.positions, self.sizes.hidden])
    }

    /// Addresses of the combined result and its actual token count.
    #[inline]
    fn combined(
        &self,
        combined: &Bound<'_, PyAny>,
        count: Option<&Bound<'_, PyAny>>,
        given: u32,
    ) -> Checked<CombineOutputs> {
        let shape = [given.into(), self.sizes.hidden];
        let combined = self.rows(combined, self.formats.combined, &shape)?;
        Ok(CombineOutputs { combined, added: [0; 3], count: self.count(count)?, given })
    }
}

#[pymethods]
impl DeviceCalls {
    /// All-to-all calls with tensors from a class on a CUDA device, or on the CPU; `None` if tensors from the class
    /// cannot be read.
    #[staticmethod]
    fn of(
        all_to_all: Bound<'_, DeviceAllToAll>,
        class: &Bound<'_, PyType>,
        device: Option<i32>,
        offsets: OutputOffsets,
    ) -> Option<DeviceCalls> {
        let reader = Reader::of(class)?;
        let shape = all_to_all.get().shape();
        let config = shape.config();
        let scaled = if config.casts() { None } else { config.scaled() };
        let formats = Formats {
            tokens: element(config.token_type),
            buffer: if offsets.tokens.is_some() { element(config.wire) } else { INT32 },
            scales: scaled.map(|scaled| match scaled.scale {
                ScaleType::F32 => FLOAT32,
                ScaleType::Ue8m0 => Format { code: 14, bits: 8 },
            }),
            ids: match config.ids {
                IdWidth::I32 => INT32,
                IdWidth::I64 => INT64,
            },
            outputs: plain(config.combine_dtype),
            combined: plain(config.output_dtype),
        };
        let sizes = Sizes {
            max_tokens: config.max_tokens.into(),
            hidden: config.hidden.into(),
            top_k: config.top_k.into(),
            scales: scaled.map_or(0, |scaled| scaled.blocks(config.hidden as usize) as i64),
            positions: shape.positions().into(),
        };
        let none = || LastStreams { eager: AtomicU64::new(NONE), captured: AtomicU64::new(NONE) };
        let streams = (0..config.channels).map(|_| none()).collect();
        let device = device.map_or(CPU, |number| DlDevice { kind: DLPACK_CUDA, number });
        let all_to_all = all_to_all.unbind();
        Some(DeviceCalls { all_to_all, reader, device, formats, sizes, offsets, streams })
    }

    /// True if the last call on a channel, in the same kind (eager or captured) as a call now, was on this stream.
    fn follows(&self, py: Python<'_>, channel: u32, stream: u64) -> PyResult<bool> {
        let Some(streams) = self.streams.get(channel as usize) else { return Ok(false) };
        let captured = self.all_to_all.get().call(py, |moe| moe.is_captured(Stream(stream)))?;
        let last = captured.map(|captured| streams.of(captured).load(Ordering::Relaxed));
        Ok(last == Some(stream))
    }

    /// Records the stream in a channel's last call.
    fn follow(&self, channel: u32, stream: u64, captured: bool) {
        if let Some(streams) = self.streams.get(channel as usize) {
            streams.of(captured).store(stream, Ordering::Relaxed);
        }
    }

    /// Starts the dispatch send half. Returns the token count.
    #[allow(clippy::too_many_arguments)]
    fn dispatch_send(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        tokens: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        ids: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        count: Option<&Bound<'_, PyAny>>,
        layer: u32,
        num_sms: Option<u32>,
    ) -> PyResult<Option<u32>> {
        launched(|| {
            let inputs = self.inputs((tokens, scales, ids, weights, count), layer)?;
            let launch = self.launch_config(py, stream, channel, num_sms)?;
            // SAFETY: the tensors were read just now, and torch keeps the memory for work on the stream.
            self.all_to_all.get().call(py, |moe| unsafe { moe.dispatch_send(launch, &inputs) })?;
            Ok(inputs.given)
        })
    }

    /// Starts the dispatch receive half, into a buffer.
    fn dispatch_recv(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        buffer: &Bound<'_, PyAny>,
        num_sms: Option<u32>,
    ) -> PyResult<bool> {
        let call = launched(|| {
            let outputs = self.outputs(buffer)?;
            let launch = self.launch_config(py, stream, channel, num_sms)?;
            let all_to_all = self.all_to_all.get();
            // SAFETY: as in `dispatch_send`; the buffer was made for a call like this, or is the caller's.
            Ok(all_to_all.wait(py, |moe| unsafe { moe.dispatch_recv(launch, &outputs) })?)
        });
        Ok(call?.is_some())
    }

    /// Starts both dispatch halves. Returns the token count.
    #[allow(clippy::too_many_arguments)]
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        tokens: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        ids: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        count: Option<&Bound<'_, PyAny>>,
        layer: u32,
        buffer: &Bound<'_, PyAny>,
        num_sms: Option<u32>,
    ) -> PyResult<Option<u32>> {
        launched(|| {
            let inputs = self.inputs((tokens, scales, ids, weights, count), layer)?;
            let (outputs, launch) =
                (self.outputs(buffer)?, self.launch_config(py, stream, channel, num_sms)?);
            // SAFETY: as in the halves.
            let work = |moe: &Moe| unsafe { moe.dispatch(launch, &inputs, &outputs) };
            self.all_to_all.get().wait(py, work)?;
            Ok(inputs.given)
        })
    }

    /// Starts the combine send half.
    fn combine_send(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        outputs: &Bound<'_, PyAny>,
        num_sms: Option<u32>,
    ) -> PyResult<bool> {
        let call = launched(|| {
            let outputs = self.expert_outputs(outputs)?;
            let launch = self.launch_config(py, stream, channel, num_sms)?;
            // SAFETY: as in `dispatch_send`.
            let work = |moe: &Moe| unsafe { moe.combine_send(launch, outputs, false) };
            Ok(self.all_to_all.get().call(py, work)?)
        });
        Ok(call?.is_some())
    }

    /// Starts the combine receive half.
    #[allow(clippy::too_many_arguments)]
    fn combine_recv(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        combined: &Bound<'_, PyAny>,
        count: Option<&Bound<'_, PyAny>>,
        given: u32,
        num_sms: Option<u32>,
    ) -> PyResult<bool> {
        let call = launched(|| {
            let combined = self.combined(combined, count, given)?;
            let launch = self.launch_config(py, stream, channel, num_sms)?;
            // SAFETY: as in `dispatch_recv`.
            let work = |moe: &Moe| unsafe { moe.combine_recv(launch, &combined, false) };
            Ok(self.all_to_all.get().wait(py, work)?)
        });
        Ok(call?.is_some())
    }

    /// Starts both combine halves.
    #[allow(clippy::too_many_arguments)]
    fn combine(
        &self,
        py: Python<'_>,
        stream: u64,
        channel: u32,
        outputs: &Bound<'_, PyAny>,
        combined: &Bound<'_, PyAny>,
        count: Option<&Bound<'_, PyAny>>,
        given: u32,
        num_sms: Option<u32>,
    ) -> PyResult<bool> {
        let call = launched(|| {
            let outputs = self.expert_outputs(outputs)?;
            let combined = self.combined(combined, count, given)?;
            let launch = self.launch_config(py, stream, channel, num_sms)?;
            // SAFETY: as in the halves.
            let work = |moe: &Moe| unsafe { moe.combine(launch, outputs, &combined, false) };
            Ok(self.all_to_all.get().wait(py, work)?)
        });
        Ok(call?.is_some())
    }
}

fn plain(dtype: DType) -> Format {
    match dtype {
        DType::F32 => FLOAT32,
        DType::F16 => Format { code: 2, bits: 16 },
        DType::BF16 => Format { code: 4, bits: 16 },
    }
}

fn element(of: TokenType) -> Format {
    match of {
        TokenType::Plain(dtype) => plain(dtype),
        TokenType::Scaled(scaled) => match scaled.format {
            Float8::E4M3 => Format { code: 10, bits: 8 },
            Float8::E5M2 => Format { code: 12, bits: 8 },
        },
    }
}
