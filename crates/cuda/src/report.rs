//! What this machine has of CUDA, for `weft doctor`.

use crate::device::Device;
use crate::driver::driver;
use crate::error::{Error, Result};
use crate::nvml::Nvml;
use crate::nvrtc;
use std::path::PathBuf;

/// The loader's words for a library that there is not.
const NO_FILE: &str = "cannot open shared object file: No such file or directory";

/// What there is of CUDA here. What cannot be asked is an error in its place, or left out.
#[derive(Debug)]
pub struct Report {
    /// The driver's [version](crate::Driver::version).
    pub driver: Result<u32>,
    /// The devices that this process sees; none without a driver.
    pub devices: Result<Vec<DeviceReport>>,
    /// The version of NVIDIA's driver, which NVML knows.
    pub nvml: Result<String>,
    /// NVRTC's version, and where it was found.
    pub nvrtc: Result<((u32, u32), PathBuf)>,
}

/// What there is to say of a device, beside what it is.
#[derive(Debug)]
pub struct DeviceReport {
    /// The device.
    pub device: Device,
    /// Whether the GPU is cut up, if NVML says.
    pub mig_mode: Option<bool>,
    /// The numbers of the other devices whose memory it reaches.
    pub reaches: Vec<u32>,
    /// Those that it reaches over NVLink, if NVML says.
    pub nvlink: Option<Vec<u32>>,
}

/// Looks at this machine.
pub fn look() -> Report {
    let nvml = Nvml::open();
    let devices = match driver() {
        Ok(_) => devices(nvml.as_ref().ok()),
        Err(_) => Ok(Vec::new()),
    };
    Report {
        driver: driver().map(|driver| driver.version()),
        devices,
        nvml: nvml.and_then(|nvml| nvml.driver_version()),
        nvrtc: nvrtc::version().and_then(|version| Ok((version, nvrtc::location()?))),
    }
}

/// An error in as many words as a table has room for: most machines just lack a library.
pub fn brief(error: &Error) -> String {
    match error {
        Error::Absent { why, .. } if why.split("; ").all(|why| why.ends_with(NO_FILE)) => {
            "not installed".to_owned()
        }
        Error::Absent { why, .. } => why.clone(),
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
    fn a_library_that_is_not_there_and_one_that_does_not_load_are_told_apart() {
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
