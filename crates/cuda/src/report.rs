//! CUDA report for this machine, for `weft doctor`.

use crate::device::Device;
use crate::driver::driver;
use crate::error::{Error, Result};
use crate::gdr::Gdr;
use crate::nvml::Nvml;
use crate::nvrtc;
use std::path::PathBuf;

/// Loader message for a missing library.
const NO_FILE: &str = "cannot open shared object file: No such file or directory";

/// CUDA libraries and devices on this machine. Failed queries leave an error in place, or are omitted.
#[derive(Debug)]
pub struct CudaReport {
    /// [Version](crate::Driver::version) reported by the driver.
    pub driver: Result<u32>,
    /// Devices visible to this process; empty without a driver.
    pub devices: Result<Vec<DeviceReport>>,
    /// NVIDIA driver version, from NVML.
    pub nvml: Result<String>,
    /// NVRTC version and path.
    pub nvrtc: Result<((u32, u32), PathBuf)>,
    /// Connection to GDRCopy's driver, without a look at any GPU's memory.
    pub gdrcopy: Result<()>,
}

/// Device with MIG mode and peers.
#[derive(Debug)]
pub struct DeviceReport {
    /// Device.
    pub device: Device,
    /// The GPU's MIG mode, if NVML reports it.
    pub mig_mode: Option<bool>,
    /// Ordinals for other devices to which it has peer access.
    pub reaches: Vec<u32>,
    /// Ordinals for devices with NVLink, if NVML reports it.
    pub nvlink: Option<Vec<u32>>,
}

/// Queries this machine.
pub fn query() -> CudaReport {
    let nvml = Nvml::open();
    let devices = match driver() {
        Ok(_) => devices(nvml.as_ref().ok()),
        Err(_) => Ok(Vec::new()),
    };
    CudaReport {
        driver: driver().map(|driver| driver.version()),
        devices,
        nvml: nvml.and_then(|nvml| nvml.driver_version()),
        nvrtc: nvrtc::version().and_then(|version| Ok((version, nvrtc::location()?))),
        gdrcopy: Gdr::open().map(drop),
    }
}

/// Short error text for tables: for example, a missing library becomes "not installed".
pub fn brief(error: &Error) -> String {
    match error {
        Error::Absent { why, .. } if why.split("; ").all(|why| why.ends_with(NO_FILE)) => {
            "not installed".to_owned()
        }
        Error::Absent { why, .. } => why.clone(),
        Error::NoGdrDriver { why } => format!("/dev/gdrdrv: {why}"),
        error => error.to_string(),
    }
}

fn devices(nvml: Option<&Nvml>) -> Result<Vec<DeviceReport>> {
    let driver = driver()?;
    let devices = (0..driver.device_count()?)
        .map(|ordinal| driver.device(ordinal))
        .collect::<Result<Vec<_>>>()?;
    devices.iter().map(|&device| describe(device, &devices, nvml)).collect()
}

fn describe(device: Device, all: &[Device], nvml: Option<&Nvml>) -> Result<DeviceReport> {
    let others = || all.iter().copied().filter(|&other| other != device);
    let mut reaches = Vec::new();
    for other in others() {
        if device.can_access(other)? {
            reaches.push(other.ordinal());
        }
    }
    let over_nvlink = |nvml: &Nvml| {
        let mut joined = Vec::new();
        for other in others() {
            if nvml.over_nvlink(device, other)? {
                joined.push(other.ordinal());
            }
        }
        Ok::<_, Error>(joined)
    };
    Ok(DeviceReport {
        device,
        mig_mode: nvml.and_then(|nvml| nvml.mig_mode(device).ok().flatten()),
        reaches,
        nvlink: nvml.and_then(|nvml| over_nvlink(nvml).ok()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_one_that_does_not_load_are_distinguished() {
        let absent = |why: &str| {
            brief(&Error::Absent { library: "a library", why: why.to_owned(), remedy: "none" })
        };
        let missing = format!("libnvrtc.so.13: {NO_FILE}");
        let broken = "/opt/libnvrtc.so.12: file too short";
        assert_eq!(absent(&missing), "not installed");
        assert_eq!(absent(&format!("{missing}; {missing}")), "not installed");
        assert_eq!(absent(&format!("{broken}; {missing}")), format!("{broken}; {missing}"));
    }
}
