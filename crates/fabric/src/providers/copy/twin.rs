//! A twin of copy engines in host memory, so that the provider's protocol is tested without devices.
//!
//! Its copies complete late: only when a mark is polled, and then in a number, an order and pieces that a
//! seeded generator draws. A provider that raises a lane early is thus found out.

use super::copier::{Copier, Identity, Mark, Queue, Why};
use crate::memory::Memory;
use crate::random::SplitMix64;
use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How many devices a twin pretends to have.
const DEVICES: u32 = 8;
/// The most that one look moves on.
const STEPS: u64 = 24;

/// What a test does to a twin that a provider owns, and sees of it.
#[derive(Debug, Default)]
pub struct Controls {
    /// No copy makes progress.
    pub hold: AtomicBool,
    /// Copies are refused.
    pub refuse_copies: AtomicBool,
    /// What is looked at has failed.
    pub fail_marks: AtomicBool,
    /// Marks that were asked for.
    pub marks: AtomicU32,
    /// Queues, marks and pins that were not given back.
    pub held: AtomicU32,
}

/// Gives itself back.
struct Pin(Arc<Controls>);

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is(control: &AtomicBool) -> bool {
    control.load(Ordering::SeqCst)
}

enum Step {
    Copy { to: u64, from: u64, length: u64 },
    Mark(Mark),
}

/// Devices that are memory files, and copy engines that are whoever looks.
pub struct Twin {
    random: SplitMix64,
    controls: Arc<Controls>,
    queues: HashMap<Queue, VecDeque<Step>>,
    /// Marks, and whether all before them is over.
    marks: HashMap<Mark, bool>,
    issued: u32,
}

impl Twin {
    /// A twin whose copies go as `seed` says.
    pub fn new(seed: u64) -> Twin {
        Twin::with_controls(seed, Arc::default())
    }

    /// One that a test can do things to.
    pub fn with_controls(seed: u64, controls: Arc<Controls>) -> Twin {
        let (queues, marks) = (HashMap::new(), HashMap::new());
        Twin { random: SplitMix64::new(seed), controls, queues, marks, issued: 0 }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.bits() % limit
    }

    fn issue(&mut self) -> u32 {
        self.controls.held.fetch_add(1, Ordering::SeqCst);
        self.issued += 1;
        self.issued
    }

    /// One step of a queue: a piece of any copy before its first mark, or that mark.
    fn step(&mut self, queue: Queue) {
        let Some(mut steps) = self.queues.remove(&queue) else { return };
        let ahead = steps.iter().take_while(|step| matches!(step, Step::Copy { .. })).count();
        let chosen = if ahead == 0 { 0 } else { self.below(ahead as u64) as usize };
        match steps.remove(chosen) {
            Some(Step::Mark(mark)) => drop(self.marks.insert(mark, true)),
            Some(Step::Copy { to, from, length }) => {
                let piece = if self.below(2) == 0 { length } else { self.below(length) + 1 };
                // From either end.
                let (skip, rest) = match self.below(2) {
                    0 => (0, piece),
                    _ => (length - piece, 0),
                };
                // SAFETY: whoever added the copy promised that both ranges stay until a later mark
                // is over, and no later mark is before all pieces are.
                unsafe {
                    std::ptr::copy(
                        (from + skip) as *const u8,
                        (to + skip) as *mut u8,
                        piece as usize,
                    );
                }
                if piece < length {
                    let (to, from, length) = (to + rest, from + rest, length - piece);
                    steps.push_front(Step::Copy { to, from, length });
                }
            }
            None => {}
        }
        self.queues.insert(queue, steps);
    }

    fn check(device: u32) -> Result<(), Why> {
        if device < DEVICES {
            return Ok(());
        }
        Err(format!("there is no device {device}: the twin has {DEVICES}"))
    }
}

/// Host memory that passes for a device's.
fn disguise(device: u32, memory: Memory, shared: bool) -> Result<Memory, Why> {
    let address = NonNull::new(memory.address() as *mut u8).ok_or("memory at address zero")?;
    let descriptor = memory.descriptor().filter(|_| shared);
    let descriptor = descriptor.map(|descriptor| descriptor.try_clone_to_owned()).transpose();
    let descriptor = descriptor.map_err(|e| format!("cannot share a region: {e}"))?;
    let length = memory.len();
    // SAFETY: `memory` is the owner, and it is mapped while it lives.
    Ok(unsafe { Memory::on_device(address, length, device, descriptor, Box::new(memory)) })
}

impl Copier for Twin {
    fn name(&self) -> &'static str {
        "twin"
    }

    fn identity(&mut self, device: u32) -> Result<Identity, Why> {
        Twin::check(device)?;
        Ok([device as u8; 16])
    }

    fn find(&mut self, identity: Identity) -> Option<u32> {
        let device = u32::from(identity[0]);
        (device < DEVICES).then_some(device)
    }

    fn allocate(&mut self, device: u32, length: usize) -> Result<Memory, Why> {
        Twin::check(device)?;
        disguise(device, Memory::shared(length).map_err(|e| e.to_string())?, true)
    }

    fn import(
        &mut self,
        device: u32,
        descriptor: BorrowedFd<'_>,
        length: usize,
    ) -> Result<Memory, Why> {
        Twin::check(device)?;
        disguise(device, Memory::map(descriptor, length).map_err(|e| e.to_string())?, false)
    }

    unsafe fn pin(&mut self, _device: u32, _memory: &Memory) -> Option<Box<dyn Send>> {
        self.controls.held.fetch_add(1, Ordering::SeqCst);
        Some(Box::new(Pin(self.controls.clone())))
    }

    fn open(&mut self, device: u32) -> Result<Queue, Why> {
        Twin::check(device)?;
        let queue = Queue(self.issue());
        self.queues.insert(queue, VecDeque::new());
        Ok(queue)
    }

    unsafe fn copy(&mut self, queue: Queue, to: u64, from: u64, length: u64) -> Result<(), Why> {
        if is(&self.controls.refuse_copies) {
            return Err("the twin was told to refuse".into());
        }
        let steps = self.queues.get_mut(&queue).ok_or("there is no such queue")?;
        steps.push_back(Step::Copy { to, from, length });
        Ok(())
    }

    fn mark(&mut self, queue: Queue) -> Result<Mark, Why> {
        self.controls.marks.fetch_add(1, Ordering::SeqCst);
        let mark = Mark(self.issue());
        let steps = self.queues.get_mut(&queue).ok_or("there is no such queue")?;
        steps.push_back(Step::Mark(mark));
        self.marks.insert(mark, false);
        Ok(mark)
    }

    fn is_over(&mut self, mark: Mark) -> Result<bool, Why> {
        if is(&self.controls.fail_marks) {
            self.queues.values_mut().for_each(VecDeque::clear);
            return Err("the twin was told to fail".into());
        }
        if !is(&self.controls.hold) {
            let mut queues: Vec<Queue> = self.queues.keys().copied().collect();
            queues.sort_unstable_by_key(|queue| queue.0);
            for queue in queues {
                for _ in 0..self.below(STEPS) {
                    self.step(queue);
                }
            }
        }
        self.marks.get(&mark).copied().ok_or_else(|| "there is no such mark".into())
    }

    fn release(&mut self, mark: Mark) {
        self.marks.remove(&mark);
        self.controls.held.fetch_sub(1, Ordering::SeqCst);
    }

    fn close(&mut self, queue: Queue) {
        self.queues.remove(&queue);
        self.controls.held.fetch_sub(1, Ordering::SeqCst);
    }
}
