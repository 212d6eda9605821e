//! Tests that need a device. Without one, each test reports the skip and passes.

use std::ffi::c_void;
use std::sync::Arc;
use weft_cuda::{
    Context, Device, DeviceMemory, DmaBuf, Error, Event, Module, PeerMemory, PinnedMemory,
    RdmaWrites, Reader, RelaxedCapture, Start, Stream, VirtualMemory, copy_async, device_of,
    driver, is_capturing, nvrtc, set_bytes_async, stream_synchronize, stream_wait,
    stream_write_value32,
};

const MIB: usize = 1 << 20;

/// Devices on this machine; without any, reports the skip.
fn devices() -> Vec<Device> {
    let found = driver().and_then(|driver| {
        (0..driver.device_count()?).map(|ordinal| driver.device(ordinal)).collect()
    });
    match found {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("skipped: {error}");
            Vec::new()
        }
    }
}

/// The first device's context, current on this thread.
fn context() -> Option<Arc<Context>> {
    let device = *devices().first()?;
    let context = Context::primary(device).expect("a context");
    context.bind().expect("current");
    Some(context)
}

/// Pinned memory bytes, as the host sees them.
fn bytes(memory: &PinnedMemory) -> &[u8] {
    // SAFETY: the memory has this length, and the tests synchronise before they read it.
    unsafe { std::slice::from_raw_parts(memory.host(), memory.len()) }
}

#[test]
fn a_device_reports_its_properties() {
    for device in devices() {
        assert!(!device.name().is_empty() && !device.bus_id().is_empty(), "{device}");
        assert_ne!(device.uuid(), [0; 16]);
        assert!(device.compute_capability() >= (5, 0));
        assert!(device.sm_count() > 0);
        assert!(device.memory_bytes() > 1 << 28);
        assert!(device.max_shared_per_block() >= 48 << 10);
        assert_eq!(device.can_access(device), Ok(true));
    }
}

#[test]
fn a_missing_device_is_named() {
    let count = devices().len() as u32;
    if count == 0 {
        return;
    }
    let error = driver().and_then(|driver| driver.device(count)).expect_err("one too many");
    assert_eq!(error, Error::NoDevice { ordinal: count, count });
}

#[test]
fn bytes_go_to_a_device_and_back() {
    let Some(context) = context() else { return };
    let stream = Stream::create(&context).expect("a stream");
    let memory = DeviceMemory::alloc(&context, 2 * MIB).expect("memory");
    let pinned = PinnedMemory::alloc(&context, 64).expect("pinned memory");
    assert_eq!(bytes(&pinned), [0; 64]);
    let end = memory.address() + memory.len() as u64 - 64;
    set_bytes_async(end, 7, 64, stream.stream()).expect("set");
    stream_write_value32(stream.stream(), end + 4, 0x0102_0304).expect("written");
    copy_async(pinned.device_address(), end, 64, stream.stream()).expect("copied");
    let event = Event::new(&context).expect("an event");
    event.record(stream.stream()).expect("recorded");
    event.synchronize().expect("done");
    assert_eq!(event.done(), Ok(true));
    assert_eq!(bytes(&pinned)[..10], [7, 7, 7, 7, 4, 3, 2, 1, 7, 7]);
    assert!(!is_capturing(stream.stream()).expect("a state"));
}

#[test]
fn a_stream_waits_for_another() {
    let Some(context) = context() else { return };
    let streams = [(); 2].map(|()| Stream::create(&context).expect("a stream"));
    let memory = DeviceMemory::alloc(&context, 64 * MIB).expect("memory");
    let pinned = PinnedMemory::alloc(&context, 16).expect("pinned memory");
    let event = Event::new(&context).expect("an event");
    set_bytes_async(memory.address(), 5, memory.len(), streams[0].stream()).expect("set");
    event.record(streams[0].stream()).expect("recorded");
    stream_wait(streams[1].stream(), &event).expect("ordered");
    let last = memory.address() + memory.len() as u64 - 16;
    copy_async(pinned.device_address(), last, 16, streams[1].stream()).expect("copied");
    stream_synchronize(streams[1].stream()).expect("done");
    assert_eq!(bytes(&pinned), [5; 16]);
}

#[test]
fn memory_goes_through_a_descriptor_to_each_device_that_reaches_it() {
    let Some(context) = context() else { return };
    if !context.device().can_share_fds() {
        eprintln!("skipped: {} cannot share memory by descriptor", context.device());
        return;
    }
    let memory = VirtualMemory::create(&context, 3 * MIB + 1).expect("memory");
    assert_eq!(memory.len() % (2 * MIB), 0);
    set_bytes_async(memory.address(), 9, memory.len(), Stream(0)).expect("set");
    context.synchronize().expect("done");
    for device in devices() {
        if !device.can_access(context.device()).expect("a result") {
            eprintln!("skipped: {device} does not reach {}", context.device());
            continue;
        }
        let peer = Context::primary(device).expect("a context");
        let descriptor = memory.export().expect("a descriptor");
        let mapped = VirtualMemory::import(&peer, descriptor, memory.len()).expect("mapped");
        assert_ne!(mapped.address(), memory.address());
        let pinned = PinnedMemory::alloc(&peer, 16).expect("pinned memory");
        let _bound = peer.enter().expect("current");
        let last = mapped.address() + mapped.len() as u64 - 16;
        copy_async(pinned.device_address(), last, 16, Stream(0)).expect("copied");
        peer.synchronize().expect("done");
        assert_eq!(bytes(&pinned), [9; 16]);
    }
}

#[test]
fn memory_outlives_its_first_mapping() {
    let Some(context) = context() else { return };
    if !context.device().can_share_fds() {
        eprintln!("skipped: {} cannot share memory by descriptor", context.device());
        return;
    }
    let memory = VirtualMemory::create(&context, MIB).expect("memory");
    let length = memory.len();
    set_bytes_async(memory.address(), 3, length, Stream(0)).expect("set");
    context.synchronize().expect("done");
    let descriptor = memory.export().expect("a descriptor");
    drop(memory);
    let mapped = VirtualMemory::import(&context, descriptor, length).expect("mapped");
    let pinned = PinnedMemory::alloc(&context, 16).expect("pinned memory");
    copy_async(pinned.device_address(), mapped.address(), 16, Stream(0)).expect("copied");
    context.synchronize().expect("done");
    assert_eq!(bytes(&pinned), [3; 16]);
}

// Opening by another process is tested with the symmetric heap.
#[test]
fn a_handle_has_the_offset_of_its_range() {
    let Some(context) = context() else { return };
    let memory = DeviceMemory::alloc(&context, 4 * MIB).expect("memory");
    let handle = match memory.ipc_handle() {
        Ok(handle) => handle,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    assert_eq!(handle.bytes, 4 * MIB as u64);
    let inside = weft_cuda::IpcHandle::of(&context, memory.address() + 256, 16).expect("inside");
    assert_eq!((inside.handle, inside.offset), (handle.handle, handle.offset + 256));
    let long = weft_cuda::IpcHandle::of(&context, memory.address(), 1 << 50);
    assert!(matches!(long, Err(Error::Size { .. })), "{long:?}");
    let own = PeerMemory::open_ipc(&context, &handle).err().expect("one's own").to_string();
    assert!(own.contains("cuIpcOpenMemHandle_v2"), "{own}");
}

#[test]
fn memory_is_exported_as_a_dma_buf_of_whole_pages() {
    let Some(context) = context() else { return };
    let memory = DeviceMemory::alloc(&context, 4 * MIB).expect("memory");
    if !context.device().can_export_dma_buf() {
        let error = DmaBuf::of(&context, memory.address(), memory.len()).expect_err("unsupported");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        return eprintln!("skipped: {error}");
    }
    let whole = DmaBuf::of(&context, memory.address(), memory.len()).expect("a dma-buf");
    assert_eq!((whole.offset, whole.bytes), (0, 4 * MIB as u64));
    // PyTorch tensors start anywhere in an allocation.
    let part = DmaBuf::of(&context, memory.address() + 512, 16).expect("a dma-buf");
    assert_eq!((part.offset, part.bytes), (512, 16));
    assert!(matches!(DmaBuf::of(&context, memory.address(), 0), Err(Error::Size { .. })));
    assert!(DmaBuf::of(&context, memory.address(), 1 << 46).is_err());
}

#[test]
fn writes_of_nics_are_flushed_where_the_platform_does_not_order_them() {
    let Some(context) = context() else { return };
    let visible = context.device().rdma_writes(Reader::All);
    eprintln!("writes of NICs into memory of {}: {visible:?}", context.device());
    let flushed = context.flush_rdma_writes();
    assert!(flushed.is_ok() || visible == RdmaWrites::Unordered, "{visible:?}: {flushed:?}");
}

#[test]
fn an_address_names_its_device() {
    let Some(context) = context() else { return };
    let memory = DeviceMemory::alloc(&context, MIB).expect("memory");
    assert_eq!(device_of(memory.address() + 512), Ok(context.device().ordinal()));
    let pinned = PinnedMemory::alloc(&context, 64).expect("pinned memory");
    let ordinary = [0_u8; 64];
    for host in [pinned.host() as u64, ordinary.as_ptr() as u64] {
        assert_eq!(device_of(host), Err(Error::NotOfDevice { address: host }));
    }
}

#[test]
fn a_kernel_takes_one_argument_by_value() {
    const KERNEL: &str = r#"
        struct Arguments { unsigned long long out; unsigned count; unsigned value; };
        extern "C" __global__ void fill(const __grid_constant__ Arguments arguments) {
            extern __shared__ unsigned staged[];
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            staged[threadIdx.x] = arguments.value + i;
            if (i < arguments.count)
                reinterpret_cast<unsigned *>(arguments.out)[i] = staged[threadIdx.x];
        }
    "#;
    #[repr(C)]
    struct Arguments {
        out: u64,
        count: u32,
        value: u32,
    }
    let Some(context) = context() else { return };
    if let Some(folder) = std::env::var_os("WEFT_NVRTC_DIR") {
        nvrtc::add_search_path(folder);
    }
    let (major, minor) = context.device().compute_capability();
    let option = format!("--gpu-architecture=sm_{major}{minor}");
    let source = nvrtc::Source { name: "fill.cu", text: KERNEL, headers: &[] };
    let cubin = match nvrtc::compile(&source, &[option]) {
        Ok(cubin) => cubin,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let module = Module::load(&context, &cubin).expect("a module");
    let fill = module.function("fill").expect("a kernel");
    drop(module);
    let shared = context.device().max_shared_per_block();
    fill.set_dynamic_shared(shared).expect("the largest shared memory");
    assert!(fill.set_dynamic_shared(shared + 1).is_err());
    assert!(fill.registers().expect("a number") > 0);
    assert_eq!((fill.local_bytes(), fill.shared_bytes()), (Ok(0), Ok(0)));
    assert_eq!(fill.blocks_per_sm(32, shared), Ok(1));
    let pinned = PinnedMemory::alloc(&context, 400).expect("pinned memory");
    let arguments = Arguments { out: pinned.device_address(), count: 99, value: 1000 };
    let argument = (&raw const arguments).cast::<c_void>();
    // SAFETY: the structure has the kernel's layout, and the memory outlives the launch.
    unsafe { fill.launch([4, 32, shared], Start::AfterPrevious, Stream(0), argument) }
        .expect("launched");
    context.synchronize().expect("done");
    let expected: Vec<u8> =
        (0..99_u32).map(|i| 1000 + i).chain([0]).flat_map(u32::to_le_bytes).collect();
    assert_eq!(bytes(&pinned), expected);
    let none = fill_of(&context, &cubin).expect_err("no such kernel").to_string();
    assert!(none.contains("CUDA_ERROR_NOT_FOUND"), "{none}");
}

fn fill_of(context: &Arc<Context>, cubin: &[u8]) -> Result<(), Error> {
    Module::load(context, cubin)?.function("full").map(drop)
}

#[test]
fn the_current_context_is_restored() {
    let Some(first) = context() else { return };
    let devices = devices();
    let Some(&device) = devices.get(1) else {
        return eprintln!("skipped: one device, and this needs two");
    };
    let other = Context::primary(device).expect("a context");
    {
        let _bound = other.enter().expect("current");
        assert_eq!(first.is_current(), Ok(false));
        DeviceMemory::alloc(&first, 16).map(drop).expect("memory");
        assert_eq!(other.is_current(), Ok(true));
    }
    assert_eq!(first.is_current(), Ok(true));
}

// Without a capture, which this library never starts, the modes have no visible effect.
#[test]
fn relaxed_capture_nests() {
    let Some(context) = context() else { return };
    let outer = RelaxedCapture::new().expect("relaxed");
    RelaxedCapture::new().map(drop).expect("relaxed");
    DeviceMemory::alloc(&context, 16).map(drop).expect("memory");
    drop(outer);
}

#[test]
fn empty_and_oversized_allocations_are_errors() {
    let Some(context) = context() else { return };
    assert!(matches!(DeviceMemory::alloc(&context, 0), Err(Error::Size { .. })));
    assert!(matches!(PinnedMemory::alloc(&context, 0), Err(Error::Size { .. })));
    let error = DeviceMemory::alloc(&context, 1 << 50).err().expect("too much").to_string();
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY, 2"), "{error}");
    assert!(error.contains("empty_cache"), "{error}");
}
