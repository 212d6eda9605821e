//! C table operations by number: collectives, messages, and exchanges composed from messages.

use super::status::{Failure, Status};
use crate::fork::{self, ProcessOwned};
use crate::shared::Shared;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weft_collectives::messages::{Messages, MessagesConfig, OperationId};
use weft_collectives::{Call, CallId, Collectives, CollectivesConfig, RunError, SelectionSources};
use weft_control::{Cause, Poison};
use weft_fabric::{Communicator, EngineAccess, Rank, Time, clock};

/// Lowest exchange tag; program tags are lower.
const EXCHANGE_TAGS: u64 = 1 << 63;

/// Memory for one peer.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    pub data: *mut u8,
    pub bytes: u64,
}

/// Longest wait for an operation while operations in the other kind are in flight.
const MIXED_SLICE: Duration = Duration::from_micros(200);

/// Time that an operation continues for a peer that has left, whose last writes may be in flight. It spans the
/// waits for the operation, which may be shorter.
const DEPARTURE_GRACE: Duration = Duration::from_secs(1);

/// Operation in flight.
#[derive(Clone)]
enum Pending {
    Call(CallId),
    /// Messages that have not ended.
    Messages(Vec<Message>),
    Failed(Failure),
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Message {
    id: OperationId,
    /// Bytes that a receive expects.
    expected: Option<u64>,
}

/// Progress in one wait step.
enum Step {
    Done,
    Again,
}

/// Failed receive whose message has another length.
fn unequal(from: Rank, bytes: u64, expected: u64) -> Failure {
    Failure::invalid(format!(
        "{from} sent {bytes} bytes: expected {expected}; pass as many elements of one dtype at both ranks"
    ))
}

/// All operations on a communicator. Any thread may call at any time.
pub struct Operations {
    shared: Shared,
    collectives: Collectives,
    messages: Messages,
    pending: Mutex<HashMap<u64, Pending>>,
    /// Time since which an operation lacks a peer that has left.
    lacking: Mutex<HashMap<u64, Time>>,
    last: AtomicU64,
    exchanges: AtomicU64,
    pub rank: u32,
    pub ranks: u32,
}

impl Operations {
    /// Connects collectives and messages. Collective.
    pub fn connect(
        communicator: &Communicator,
        shared: Shared,
        config: CollectivesConfig,
        sources: SelectionSources<'_>,
        deadline: Time,
    ) -> Result<Operations, RunError> {
        let collectives = Collectives::connect_with(communicator, config, sources, deadline)?;
        let messages = Messages::connect(communicator, MessagesConfig::default(), deadline)?;
        Ok(Operations {
            shared,
            collectives,
            messages,
            pending: Mutex::default(),
            lacking: Mutex::default(),
            last: AtomicU64::new(0),
            exchanges: AtomicU64::new(0),
            rank: communicator.rank().0,
            ranks: communicator.world_size(),
        })
    }

    /// Rank 0's network name and description.
    pub fn network(&self) -> Option<(String, String)> {
        let network = self.collectives.network()?;
        Some((network.name.to_owned(), network.text.to_owned()))
    }

    /// Starts a collective.
    ///
    /// # Safety
    /// Same as [`Collectives::start`].
    pub unsafe fn start(&self, call: &Call) -> Result<u64, Failure> {
        let fabric = self.fabric()?;
        // SAFETY: by this function's contract.
        let id = unsafe { self.collectives.start(&mut fabric.access(), call) }?;
        Ok(self.add(Pending::Call(id)))
    }

    /// Starts a collective and waits for it. Returns the number if it goes on after the timeout.
    ///
    /// # Safety
    /// Same as [`Collectives::start`].
    pub unsafe fn run(&self, call: &Call, timeout: Duration) -> Result<Option<u64>, Failure> {
        let fabric = self.fabric()?;
        // SAFETY: by this function's contract.
        let id = unsafe { self.collectives.start(&mut fabric.access(), call) }?;
        let is_alone = self.lock().is_empty();
        // Beside others it needs a number, since a wait for it advances them too.
        let number = (!is_alone).then(|| self.add(Pending::Call(id)));
        let waited = match number {
            None => self.wait_alone(&fabric, id, clock::now().after(timeout)),
            Some(number) => self.wait(number, timeout).map(drop),
        };
        match waited {
            Ok(()) => Ok(None),
            Err(failure) if failure.status == Status::Timeout => {
                Ok(Some(number.unwrap_or_else(|| self.add(Pending::Call(id)))))
            }
            Err(failure) => {
                number.map(|number| self.lock().remove(&number));
                Err(failure)
            }
        }
    }

    /// Starts a message to a rank.
    ///
    /// # Safety
    /// The memory stays valid until the operation is done; after an error, until the communicator is closed.
    pub unsafe fn send(&self, to: u32, tag: u64, segment: Segment) -> Result<u64, Failure> {
        let fabric = self.fabric()?;
        // SAFETY: by this function's contract.
        let sent = unsafe { self.start_send(&mut fabric.access(), to, tag, segment) }?;
        Ok(self.add(Pending::Messages(vec![sent])))
    }

    /// Starts receiving a message from one rank, or from any.
    ///
    /// # Safety
    /// Same as [`Operations::send`]; the memory is not accessed otherwise.
    pub unsafe fn receive(
        &self,
        from: Option<u32>,
        tag: u64,
        segment: Segment,
    ) -> Result<u64, Failure> {
        let fabric = self.fabric()?;
        // SAFETY: by this function's contract.
        let received = unsafe { self.start_receive(&mut fabric.access(), from, tag, segment) }?;
        Ok(self.add(Pending::Messages(vec![received])))
    }

    /// Starts a segment exchange with every rank.
    ///
    /// # Safety
    /// Same as [`Operations::receive`], for all segments.
    pub unsafe fn exchange(&self, sends: &[Segment], receives: &[Segment]) -> Result<u64, Failure> {
        let fabric = self.fabric()?;
        let mut access = fabric.access();
        let tag = EXCHANGE_TAGS + self.exchanges.fetch_add(1, Ordering::Relaxed) % EXCHANGE_TAGS;
        self.copy_own(sends, receives)?;
        let mut started = Vec::new();
        for step in 1..self.ranks {
            let (to, from) = ((self.rank + step) % self.ranks, self.rank + self.ranks - step);
            let from = from % self.ranks;
            let (sent, received) = (sends[to as usize], receives[from as usize]);
            if received.bytes > 0 {
                // SAFETY: by this function's contract.
                let id = unsafe { self.start_receive(&mut access, Some(from), tag, received) }?;
                started.push(id);
            }
            if sent.bytes > 0 {
                // SAFETY: as above.
                started.push(unsafe { self.start_send(&mut access, to, tag, sent) }?);
            }
        }
        Ok(self.add(Pending::Messages(started)))
    }

    /// True if an operation is done. Makes progress for all.
    pub fn is_done(&self, id: u64) -> Result<bool, Failure> {
        let Some(pending) = self.lock().get(&id).cloned() else { return Ok(true) };
        let fabric = self.fabric()?;
        let mut access = fabric.access();
        self.collectives.progress(&mut access)?;
        match pending {
            Pending::Call(call) => Ok(self.collectives.is_done(&mut access, call)?),
            Pending::Messages(messages) => {
                for message in messages {
                    match self.messages.is_done(&mut access, message.id) {
                        Ok(true) => {}
                        // Another thread has taken it.
                        Err(RunError::Invalid { .. }) => {}
                        Ok(false) => return Ok(false),
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok(true)
            }
            Pending::Failed(_) => Ok(true),
        }
    }

    /// Waits until an operation is done; returns who sent the last message received.
    pub fn wait(&self, id: u64, timeout: Duration) -> Result<Option<u32>, Failure> {
        let fabric = self.fabric()?;
        let deadline = clock::now().after(timeout);
        let mut sender = None;
        loop {
            let (pending, mixed) = {
                let all = self.lock();
                let Some(pending) = all.get(&id).cloned() else { return Ok(sender) };
                (pending, is_mixed(&all))
            };
            // A wait for a collective advances only collectives, one for a message only messages.
            let slice =
                if mixed { deadline.min(clock::now().after(MIXED_SLICE)) } else { deadline };
            let stepped = match pending {
                Pending::Call(call) => self.wait_for_call(&fabric, id, call, slice),
                Pending::Messages(messages) => {
                    self.wait_for_message(&fabric, id, &messages, slice, &mut sender)
                }
                Pending::Failed(failure) => return Err(failure),
            };
            match stepped {
                Ok(Step::Done) => return Ok(sender),
                Ok(Step::Again) => {}
                Err(failure) if failure.status == Status::Timeout => {
                    self.check_departed(&fabric, id, &failure.missing)?;
                    if !mixed || clock::now() >= deadline {
                        return Err(failure);
                    }
                    self.collectives.progress(&mut fabric.access())?;
                    self.messages.drive(&mut fabric.access())?;
                }
                Err(failure) => {
                    self.lock().insert(id, Pending::Failed(failure.clone()));
                    return Err(failure);
                }
            }
        }
    }

    /// Poisons the group if an operation lacks a peer that left [`DEPARTURE_GRACE`] ago or earlier.
    fn check_departed(
        &self,
        fabric: &Communicator,
        id: u64,
        missing: &[Rank],
    ) -> Result<(), Failure> {
        let flag = fabric.access().with(|engine| engine.poison_flag().clone());
        let Some(&departed) = missing.iter().find(|&&rank| flag.has_left(rank)) else {
            return Ok(());
        };
        let now = clock::now();
        let mut lacking = self.lacking.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if now.since(*lacking.entry(id).or_insert(now)) < DEPARTURE_GRACE {
            return Ok(());
        }
        let detail = format!(
            "an operation of {} was not complete; call barrier on all ranks before one leaves",
            fabric.rank()
        );
        fabric.poison(Poison { kind: Cause::Left, rank: Some(departed), detail });
        Ok(fabric.access().with(|engine| engine.check()).map_err(RunError::from)?)
    }

    /// Ends the group at every rank.
    pub fn poison(&self, detail: String) {
        if let Ok(fabric) = self.fabric() {
            let rank = Some(fabric.rank());
            fabric.poison(Poison { kind: Cause::User, rank, detail });
        }
    }

    /// Ends all waits, now and later.
    pub fn end_waits(&self) {
        self.shared.end_waits();
    }

    /// Leaves the group.
    pub fn close(&self) {
        if let Ok(fabric) = self.fabric() {
            self.messages.abandon(&fabric);
        }
        self.shared.close();
    }

    fn wait_for_call(
        &self,
        fabric: &Communicator,
        id: u64,
        call: CallId,
        deadline: Time,
    ) -> Result<Step, Failure> {
        self.wait_alone(fabric, call, deadline)?;
        self.lock().remove(&id);
        Ok(Step::Done)
    }

    /// Waits for a collective; advances only collectives.
    fn wait_alone(
        &self,
        fabric: &Communicator,
        call: CallId,
        deadline: Time,
    ) -> Result<(), Failure> {
        let mut interrupted = || false;
        let mut options = fabric.wait_options(deadline, &mut interrupted);
        Ok(self.collectives.wait(&mut fabric.access(), call, &mut options)?)
    }

    fn wait_for_message(
        &self,
        fabric: &Communicator,
        id: u64,
        messages: &[Message],
        deadline: Time,
        sender: &mut Option<u32>,
    ) -> Result<Step, Failure> {
        let Some(&message) = messages.first() else {
            self.lock().remove(&id);
            return Ok(Step::Done);
        };
        let mut interrupted = || false;
        let mut options = fabric.wait_options(deadline, &mut interrupted);
        match self.messages.wait(&mut fabric.access(), message.id, &mut options) {
            Ok(completed) => {
                let (from, bytes) = (completed.from, completed.bytes);
                *sender = Some(from.0);
                if let Some(expected) = message.expected.filter(|&expected| expected != bytes) {
                    return Err(unequal(from, bytes, expected));
                }
            }
            // Another thread has taken it, and removes it next, whatever the deadline.
            Err(RunError::Invalid { .. }) => {
                std::thread::yield_now();
                return Ok(Step::Again);
            }
            // An exchange's tag is no number from the program.
            Err(RunError::MessageTooLong { peer, sent, room, .. }) => {
                return Err(unequal(peer, sent, room));
            }
            Err(error) => return Err(error.into()),
        }
        let mut pending = self.lock();
        if let Some(Pending::Messages(left)) = pending.get_mut(&id) {
            left.retain(|each| *each != message);
        }
        Ok(Step::Again)
    }

    /// # Safety
    /// Same as [`Operations::send`].
    unsafe fn start_send(
        &self,
        access: &mut impl EngineAccess,
        to: u32,
        tag: u64,
        Segment { data, bytes }: Segment,
    ) -> Result<Message, RunError> {
        // SAFETY: by this function's contract.
        let id = unsafe { self.messages.send(access, Rank(to), tag, data, bytes) }?;
        Ok(Message { id, expected: None })
    }

    /// # Safety
    /// Same as [`Operations::receive`].
    unsafe fn start_receive(
        &self,
        access: &mut impl EngineAccess,
        from: Option<u32>,
        tag: u64,
        Segment { data, bytes }: Segment,
    ) -> Result<Message, RunError> {
        // SAFETY: by this function's contract.
        let id = unsafe { self.messages.receive(access, from.map(Rank), tag, data, bytes) }?;
        Ok(Message { id, expected: Some(bytes) })
    }

    /// Copies this rank's segment.
    fn copy_own(&self, sends: &[Segment], receives: &[Segment]) -> Result<(), Failure> {
        let (from, to) = (sends[self.rank as usize], receives[self.rank as usize]);
        if from.bytes != to.bytes {
            let text = format!("segment of this rank: {} bytes, expected {}", from.bytes, to.bytes);
            return Err(Failure::invalid(text));
        }
        if from.bytes > 0 {
            // SAFETY: both are valid for as many bytes, by the `exchange` contract; they may overlap.
            unsafe { std::ptr::copy(from.data, to.data, from.bytes as usize) };
        }
        Ok(())
    }

    fn add(&self, pending: Pending) -> u64 {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.lock().insert(id, pending);
        id
    }

    fn fabric(&self) -> Result<Arc<ProcessOwned<Communicator>>, Failure> {
        if fork::is_child() {
            let text = "this process was forked after the process group was made: expected a new \
                        process; start workers with the spawn or forkserver method";
            return Err(Failure::new(Status::Closed, text.to_owned()));
        }
        self.shared.get().ok_or_else(|| RunError::Closed.into())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Pending>> {
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// True if collectives and messages are in flight.
fn is_mixed(pending: &HashMap<u64, Pending>) -> bool {
    let calls = pending.values().filter(|each| matches!(each, Pending::Call(_))).count();
    calls != 0 && calls != pending.len()
}
