//! Copy engine twin in host memory, for testing the provider without devices.
//!
//! Copies complete late: only when an event is polled, and then in a number, an order and segments that a
//! seeded generator draws. A provider that raises a lane early thus fails the tests.

use super::engine::{CopyEngine, DeviceUuid, EventId, PageCopy, QueueId};
use crate::memory::Memory;
use crate::random::SplitMix64;
use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Simulated devices.
const TWIN_DEVICES: u32 = 8;
/// Maximum steps in one poll.
const MAX_STEPS: u64 = 24;

/// Twin controls and counters, shared with a test.
#[derive(Debug, Default)]
pub struct TwinControls {
    /// Copies make no progress.
    pub pause: AtomicBool,
    /// Copies are rejected.
    pub refuse_copies: AtomicBool,
    /// Event polls fail.
    pub fail_events: AtomicBool,
    /// Engines that were told to use no kernels.
    pub engines_only: AtomicU32,
    /// Recorded events.
    pub events: AtomicU32,
    /// Queues, events and pins that are not released.
    pub live_handles: AtomicU32,
}

/// Guard that counts how often it is released.
struct PinGuard(Arc<TwinControls>);

impl Drop for PinGuard {
    fn drop(&mut self) {
        self.0.live_handles.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is_set(control: &AtomicBool) -> bool {
    control.load(Ordering::SeqCst)
}

enum Entry {
    Copy { to: u64, from: u64, length: u64 },
    Event(EventId),
}

/// Devices whose memory is memory files, and copy engines that run inside polls.
pub struct Twin {
    random: SplitMix64,
    controls: Arc<TwinControls>,
    queues: HashMap<QueueId, VecDeque<Entry>>,
    /// Events; true once complete.
    events: HashMap<EventId, bool>,
    issued: u32,
}

impl Twin {
    /// Twin whose progress follows a seed.
    pub fn new(seed: u64) -> Twin {
        Twin::with_controls(seed, Arc::default())
    }

    /// Twin with controls for a test.
    pub fn with_controls(seed: u64, controls: Arc<TwinControls>) -> Twin {
        let (queues, events) = (HashMap::new(), HashMap::new());
        Twin { random: SplitMix64::new(seed), controls, queues, events, issued: 0 }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.bits() % limit
    }

    fn issue(&mut self) -> u32 {
        self.controls.live_handles.fetch_add(1, Ordering::SeqCst);
        self.issued += 1;
        self.issued
    }

    /// Executes one queue step: a segment of any copy before the first event, or that event.
    fn step(&mut self, queue: QueueId) {
        let Some(mut steps) = self.queues.remove(&queue) else { return };
        let ahead = steps.iter().take_while(|step| matches!(step, Entry::Copy { .. })).count();
        let chosen = if ahead == 0 { 0 } else { self.below(ahead as u64) as usize };
        match steps.remove(chosen) {
            Some(Entry::Event(event)) => drop(self.events.insert(event, true)),
            Some(Entry::Copy { to, from, length }) => {
                let piece = if self.below(2) == 0 { length } else { self.below(length) + 1 };
                // Starts at either end.
                let (skip, rest) = match self.below(2) {
                    0 => (0, piece),
                    _ => (length - piece, 0),
                };
                // SAFETY: by the `copy` contract both ranges stay until a later event is complete, and no
                // later event is complete before all segments are.
                unsafe {
                    std::ptr::copy(
                        (from + skip) as *const u8,
                        (to + skip) as *mut u8,
                        piece as usize,
                    );
                }
                if piece < length {
                    let (to, from, length) = (to + rest, from + rest, length - piece);
                    steps.push_front(Entry::Copy { to, from, length });
                }
            }
            None => {}
        }
        self.queues.insert(queue, steps);
    }

    fn check(device: u32) -> Result<(), String> {
        if device < TWIN_DEVICES {
            return Ok(());
        }
        Err(format!("device {device}: the twin has {TWIN_DEVICES} devices"))
    }
}

/// Wraps host memory as device memory.
fn as_device_memory(device: u32, memory: Memory, shared: bool) -> Result<Memory, String> {
    let address = NonNull::new(memory.address() as *mut u8).ok_or("memory at address zero")?;
    let descriptor = memory.descriptor().filter(|_| shared);
    let descriptor = descriptor.map(|descriptor| descriptor.try_clone_to_owned()).transpose();
    let descriptor = descriptor.map_err(|e| format!("cannot share a region: {e}"))?;
    let length = memory.len();
    // SAFETY: `memory` is the owner, and it is mapped while it lives.
    Ok(unsafe { Memory::on_device(address, length, device, descriptor, Box::new(memory)) })
}

impl CopyEngine for Twin {
    fn name(&self) -> &'static str {
        "twin"
    }

    fn uuid(&mut self, device: u32) -> Result<DeviceUuid, String> {
        Twin::check(device)?;
        Ok([device as u8; 16])
    }

    fn find(&mut self, uuid: DeviceUuid) -> Option<u32> {
        let device = u32::from(uuid[0]);
        (device < TWIN_DEVICES).then_some(device)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, String> {
        Twin::check(device)?;
        as_device_memory(device, Memory::shared(length).map_err(|e| e.to_string())?, true)
    }

    fn import(
        &mut self,
        device: u32,
        descriptor: BorrowedFd<'_>,
        length: usize,
    ) -> Result<Memory, String> {
        Twin::check(device)?;
        as_device_memory(device, Memory::map(descriptor, length).map_err(|e| e.to_string())?, false)
    }

    unsafe fn pin(&mut self, _device: u32, _memory: &Memory) -> Option<Box<dyn Send>> {
        self.controls.live_handles.fetch_add(1, Ordering::SeqCst);
        Some(Box::new(PinGuard(self.controls.clone())))
    }

    fn open(&mut self, device: u32) -> Result<QueueId, String> {
        Twin::check(device)?;
        let queue = QueueId(self.issue());
        self.queues.insert(queue, VecDeque::new());
        Ok(queue)
    }

    unsafe fn copy(
        &mut self,
        queue: QueueId,
        PageCopy { to, from, length }: PageCopy,
        _by_kernels: bool,
    ) -> Result<(), String> {
        if is_set(&self.controls.refuse_copies) {
            return Err("the test refuses copies".into());
        }
        let steps = self.queues.get_mut(&queue).ok_or("unknown queue")?;
        steps.push_back(Entry::Copy { to, from, length });
        Ok(())
    }

    fn use_copy_engines_only(&mut self) {
        self.controls.engines_only.fetch_add(1, Ordering::SeqCst);
    }

    fn record(&mut self, queue: QueueId) -> Result<EventId, String> {
        self.controls.events.fetch_add(1, Ordering::SeqCst);
        let event = EventId(self.issue());
        let steps = self.queues.get_mut(&queue).ok_or("unknown queue")?;
        steps.push_back(Entry::Event(event));
        self.events.insert(event, false);
        Ok(event)
    }

    fn is_complete(&mut self, event: EventId) -> Result<bool, String> {
        if is_set(&self.controls.fail_events) {
            self.queues.values_mut().for_each(VecDeque::clear);
            return Err("the test fails events".into());
        }
        if !is_set(&self.controls.pause) {
            let mut queues: Vec<QueueId> = self.queues.keys().copied().collect();
            queues.sort_unstable_by_key(|queue| queue.0);
            for queue in queues {
                for _ in 0..self.below(MAX_STEPS) {
                    self.step(queue);
                }
            }
        }
        self.events.get(&event).copied().ok_or_else(|| "unknown event".into())
    }

    fn release(&mut self, event: EventId) {
        self.events.remove(&event);
        self.controls.live_handles.fetch_sub(1, Ordering::SeqCst);
    }

    fn close(&mut self, queue: QueueId) {
        self.queues.remove(&queue);
        self.controls.live_handles.fetch_sub(1, Ordering::SeqCst);
    }
}
