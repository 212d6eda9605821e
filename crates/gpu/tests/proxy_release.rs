//! Releases before commands, with the device headers compiled for the host: NICs read only released stores.
//!
//! The kernels' functions are `weft/proxy.cuh`; `tests/triton/host_headers` replaces the instructions. Ranks have
//! simulated NICs and simulated GPUs, so a missing release is a wrong byte at the destination.

use libloading::os::unix::Library;
use std::cell::RefCell;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use weft_control::{Config, Control, local_world};
use weft_fabric::providers::verbs::{TwinConfig, TwinGpus, TwinKernel, TwinNic};
use weft_fabric::providers::{VerbsConfig, VerbsDevice};
use weft_fabric::{
    Communicator, CommunicatorConfig, CounterConfig, Device, Rank, Region, Time, clock,
};
use weft_gpu::proxy::{Proxy, ProxyConfig, ProxyOptions, Window, WordConfig};
use weft_gpu::{Domain, MemoryLocation};

const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 4096;
const ROUNDS: u32 = 30;
/// Bytes in a put.
const LENGTH: u64 = 600;

type PutFunction = unsafe extern "C" fn(u64, u32, u32, u64, u64, u64) -> bool;
type WaitFunction = unsafe extern "C" fn(u64, u32, u32, u32) -> bool;
type FenceFunction = extern "C" fn();

thread_local! {
    /// Kernel that the thread runs.
    static KERNEL: RefCell<Option<TwinKernel>> = const { RefCell::new(None) };
}

extern "C" fn release() {
    KERNEL.with_borrow(|kernel| {
        if let Some(kernel) = kernel {
            kernel.release();
        }
    });
}

/// Device functions.
struct Functions {
    put: PutFunction,
    wait: WaitFunction,
    set_fence: unsafe extern "C" fn(Option<FenceFunction>),
    _library: Library,
}

impl Functions {
    /// Compiles them; `None`, with a message, without a compiler.
    fn compiled() -> Option<Functions> {
        if Command::new("c++").arg("--version").output().is_err() {
            println!("skipped: needs a C++ compiler");
            return None;
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let headers = root.join("../../tests/triton/host_headers");
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("functions.so");
        let compiled = Command::new("c++")
            .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-I"])
            .arg(&headers)
            .arg("-I")
            .arg(root.join("kernels"))
            .arg(headers.join("functions.cpp"))
            .arg("-o")
            .arg(&library)
            .status();
        assert!(compiled.unwrap().success());
        // SAFETY: the library has no initialisers, and the functions' types are those in functions.cpp.
        unsafe {
            let library = Library::new(&library).unwrap();
            Some(Functions {
                put: *library.get(b"release_and_put\0").unwrap(),
                wait: *library.get(b"wait_rounds\0").unwrap(),
                set_fence: *library.get(b"set_system_fence\0").unwrap(),
                _library: library,
            })
        }
    }

    /// Sets whether fences release what the kernels have stored.
    fn set_releases(&self, releases: bool) {
        // SAFETY: no kernel runs.
        unsafe { (self.set_fence)(releases.then_some(release)) };
    }
}

/// A rank with a proxy, whose window is GPU memory: a source in the first half, a destination in the second.
struct Station {
    communicator: Arc<Communicator>,
    domain: Arc<Domain>,
    proxy: Proxy,
    window: Region,
    gpus: TwinGpus,
}

impl Station {
    fn new(control: Control) -> Station {
        let config = CommunicatorConfig::new(Config::new(control.rank().0, 2));
        let gpus = TwinGpus::new(&Arc::default());
        let nic = [TwinNic::new(TwinConfig::default())];
        let config_of_nics = VerbsConfig::default();
        let device = VerbsDevice::over_with_gpus(config_of_nics, &nic, Arc::new(gpus.clone()));
        let devices: Vec<Arc<dyn Device>> = vec![Arc::new(device.unwrap())];
        let communicator = Arc::new(Communicator::over_devices(control, config, devices).unwrap());
        let window = communicator.engine().register(gpus.allocate(0, 2 * BYTES).unwrap()).unwrap();
        let shape = CounterConfig { window: 16, ..CounterConfig::default() };
        let counter = communicator.engine().counter_with(shape).unwrap();
        let length = 2 * BYTES as u64;
        let shared = communicator.share(&[(&window, 0..length)], &[counter], soon()).unwrap();
        let config = ProxyConfig {
            words: vec![WordConfig { counter, hold: false }],
            windows: vec![Window {
                source: Some((window.key(), length)),
                destinations: shared.iter().map(|regions| regions.first().copied()).collect(),
            }],
            max_put_bytes: BYTES as u64,
            ..ProxyConfig::default()
        };
        let domain = Domain::local_group(&[MemoryLocation::Twin]).unwrap().remove(0);
        domain.raise_wait_limit(PATIENCE).unwrap();
        let (group, options) = (communicator.clone(), ProxyOptions::default());
        let proxy = Proxy::start(domain.clone(), group, config, options).unwrap();
        let station = Station { communicator, domain, proxy, window, gpus };
        station.meet();
        station
    }

    fn meet(&self) {
        let communicator = &self.communicator;
        communicator.barrier(&mut communicator.wait_options(soon(), &mut || false)).unwrap();
    }

    /// Stores a source, puts it and returns what the peer has put here, for each round.
    fn exchange(&self, functions: &Functions) -> Vec<Vec<u8>> {
        let (table, own) = (self.domain.table(), self.communicator.rank());
        let (source, peer) = (self.window.memory().address(), 1 - own.0);
        let exchanged = |round: u32| {
            let kernel = self.gpus.launch(0);
            kernel.store(source, &[value(own, round); LENGTH as usize]);
            KERNEL.set(Some(kernel));
            // SAFETY: the domain's table and the proxy's ring live; the thread is the kernel.
            let fine = unsafe {
                (functions.put)(table, peer, 0, 0, BYTES as u64, LENGTH)
                    && (functions.wait)(table, peer, 0, round + 1)
            };
            KERNEL.set(None);
            assert!(fine, "{:?}", self.proxy.check());
            let mut seen = vec![0; LENGTH as usize];
            self.gpus.launch(0).load(source + BYTES as u64, &mut seen);
            // Also that both NICs have read: the next store may be released.
            self.meet();
            seen
        };
        let seen = (0..ROUNDS).map(exchanged).collect();
        self.proxy.drain(soon(), &mut || false).unwrap();
        self.meet();
        self.proxy.stop().unwrap();
        seen
    }
}

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

fn value(rank: Rank, round: u32) -> u8 {
    (1 + round + 100 * rank.0) as u8
}

/// Bytes that both ranks have received, by rank and round.
fn received(functions: &Functions) -> Vec<Vec<Vec<u8>>> {
    let world = local_world(2, |_| {}).unwrap();
    std::thread::scope(|scope| {
        let start = |control| scope.spawn(move || Station::new(control).exchange(functions));
        let threads: Vec<_> = world.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn nics_read_what_commands_release() {
    let Some(functions) = Functions::compiled() else { return };
    functions.set_releases(true);
    for (rank, rounds) in (0..).map(Rank).zip(received(&functions)) {
        for (round, seen) in (0..).zip(rounds) {
            let all = vec![value(Rank(1 - rank.0), round); LENGTH as usize];
            assert_eq!(seen, all, "{rank} in round {round}: bytes left before their release");
        }
    }
    // What the fence does is what makes the bytes right.
    functions.set_releases(false);
    assert!(received(&functions).concat().concat().iter().all(|byte| *byte == 0));
}
