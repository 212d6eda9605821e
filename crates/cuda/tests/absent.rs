//! Tests on a machine without CUDA: all calls return errors, and no library is loaded.

use weft_cuda::{Error, RelaxedCapture, Stream, nvml::Nvml, report};

const STREAM: Stream = Stream(0);

/// True on a machine without a CUDA driver; otherwise reports the skip.
fn without_driver() -> bool {
    match weft_cuda::driver() {
        Err(Error::Absent { .. }) => true,
        _ => {
            eprintln!("skipped: this machine has a CUDA driver");
            false
        }
    }
}

#[test]
fn the_error_names_the_library_the_reason_and_a_remedy() {
    if !without_driver() {
        return;
    }
    let error = weft_cuda::driver().err().expect("no driver").to_string();
    assert!(error.starts_with("the CUDA driver (libcuda.so.1) cannot be loaded ("), "{error}");
    assert!(error.contains("cannot open shared object file"), "{error}");
    assert!(error.ends_with("start the container with its GPUs (--gpus all)"), "{error}");
}

// All other calls take a device or a context, which need a driver.
#[test]
fn calls_without_a_device_are_refused_before_any_library_call() {
    if !without_driver() {
        return;
    }
    let results = [
        weft_cuda::copy_async(0x1000, 0x2000, 16, STREAM),
        weft_cuda::copy_async(0x1000, 0x2000, 0, STREAM),
        weft_cuda::set_bytes_async(0x1000, 0, 16, STREAM),
        weft_cuda::stream_write_value32(STREAM, 0x1000, 1),
        weft_cuda::stream_synchronize(STREAM),
        weft_cuda::is_capturing(STREAM).map(drop),
        weft_cuda::device_of(0x1000).map(drop),
        weft_cuda::is_ipc_capable(0x1000).map(drop),
        RelaxedCapture::new().map(drop),
    ];
    for result in results {
        assert!(matches!(result, Err(Error::Absent { .. })), "{result:?}");
    }
    assert!(!loaded("libcuda.so"));
}

#[test]
fn the_report_names_absent_libraries() {
    if !without_driver() {
        return;
    }
    let report = report::query();
    assert!(matches!(report.driver, Err(Error::Absent { .. })), "{report:?}");
    assert!(report.devices.expect("empty without a driver").is_empty());
    if !loaded("libnvidia-ml.so") {
        let error = report.nvml.expect_err("not loaded").to_string();
        assert!(error.starts_with("NVIDIA's management library (libnvidia-ml.so.1)"), "{error}");
        assert!(Nvml::open().is_err());
    }
    match report.nvrtc {
        Ok((version, _)) => assert!(version >= (12, 0)),
        Err(error) => assert!(error.to_string().contains("nvidia-cuda-nvrtc"), "{error}"),
    }
}

/// True if a library is mapped into this process.
fn loaded(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").expect("Linux").contains(name)
}
