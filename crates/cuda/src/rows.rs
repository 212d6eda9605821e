//! Row copies between host and device memory: one call for rows at equal distances.

use crate::driver::{call, driver};
use crate::error::Result;
use crate::stream::{Stream, copy_async};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

/// Longest row distance for which every device has one copy; longer ones are copied row by row.
const MAX_PITCH: u64 = i32::MAX as u64;

/// Rows with equal length, at equal distances in host memory and in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First row in host memory.
    pub host: u64,
    /// Bytes from one row to the next in host memory.
    pub host_pitch: u64,
    /// First row in device memory.
    pub device: u64,
    /// Bytes from one row to the next in device memory.
    pub device_pitch: u64,
    /// Row bytes; at most both distances if there are several rows.
    pub length: u64,
    /// Row count.
    pub count: u64,
}

/// Copy direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the device.
    ToDevice,
    /// From the device to the host.
    ToHost,
}

/// Copies rows between host memory and memory of the current context's device. The copy is asynchronous if the host memory is
/// pinned, and may block otherwise. As for all functions on streams, the caller is responsible for the addresses.
///
/// # Errors
///
/// CUDA errors, including from earlier asynchronous work.
pub fn copy_rows_async(rows: Rows, direction: Direction, stream: Stream) -> Result<()> {
    let Rows { host, host_pitch, device, device_pitch, length, count } = rows;
    if length == 0 || count == 0 {
        return driver().map(drop);
    }
    if count == 1 || host_pitch.max(device_pitch) > MAX_PITCH {
        return (0..count).try_for_each(|row| {
            let (host, device) = (host + row * host_pitch, device + row * device_pitch);
            let (to, from) = match direction {
                Direction::ToDevice => (device, host),
                Direction::ToHost => (host, device),
            };
            copy_async(to, from, length as usize, stream)
        });
    }
    let pointer = std::ptr::with_exposed_provenance_mut(host as usize);
    // One address counts at each end, by memory type.
    let mut copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: pointer,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: host_pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: pointer,
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: device_pitch as usize,
        WidthInBytes: length as usize,
        Height: count as usize,
    };
    if direction == Direction::ToHost {
        std::mem::swap(&mut copy.srcMemoryType, &mut copy.dstMemoryType);
        std::mem::swap(&mut copy.srcPitch, &mut copy.dstPitch);
    }
    // SAFETY: the code that created the stream and the addresses is responsible for them: see `stream.rs`.
    unsafe { call!(driver()?, cuMemcpy2DAsync_v2(&raw const copy, stream.raw())) }
}
