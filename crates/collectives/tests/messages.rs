//! Messages over shm and tcp, between threads and between processes.

#[path = "messages/calls.rs"]
mod calls;
#[path = "common/communicators.rs"]
mod communicators;
#[path = "messages/ends.rs"]
mod ends;
#[path = "messages/hostile.rs"]
mod hostile;
#[path = "../../fabric/tests/common/ranks.rs"]
mod ranks;
#[path = "messages/traffic.rs"]
mod traffic;

use communicators::{communicators, process_communicator};
use std::time::Duration;
use weft_collectives::RunError;
use weft_collectives::messages::{Completed, Messages, MessagesConfig, OperationId};
use weft_fabric::{Communicator, ProviderKind, Rank, Time, WaitOptions, clock};

const KINDS: [ProviderKind; 2] = [ProviderKind::Shm, ProviderKind::Tcp];
/// Timeout above any step's time on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rings with little memory, which a few 100-byte messages fill.
const SMALL: MessagesConfig =
    MessagesConfig { slots: 4, slot_bytes: 128, max_unexpected_bytes: 4000 };

fn soon() -> Time {
    clock::now().after(PATIENCE)
}

/// A rank with messages.
struct Member {
    communicator: Communicator,
    messages: Messages,
}

impl Member {
    fn new(communicator: Communicator, config: MessagesConfig) -> Member {
        let messages = Messages::connect(&communicator, config, soon()).unwrap();
        Member { communicator, messages }
    }

    fn rank(&self) -> Rank {
        self.communicator.rank()
    }

    /// Starts to send bytes that stay valid until the send ends.
    fn start_send(&self, to: Rank, tag: u64, bytes: &[u8]) -> Result<OperationId, RunError> {
        let mut access = self.communicator.access();
        let (address, length) = (bytes.as_ptr(), bytes.len() as u64);
        // SAFETY: by this function's contract, which the tests keep.
        unsafe { self.messages.send(&mut access, to, tag, address, length) }
    }

    /// Starts to receive into bytes that stay valid until the receive ends.
    fn start_receive(
        &self,
        from: Option<Rank>,
        tag: u64,
        bytes: &mut [u8],
    ) -> Result<OperationId, RunError> {
        let mut access = self.communicator.access();
        let (address, length) = (bytes.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: as in `start_send`.
        unsafe { self.messages.receive(&mut access, from, tag, address, length) }
    }

    fn wait(&self, id: OperationId) -> Result<Completed, RunError> {
        self.wait_for(id, PATIENCE)
    }

    fn wait_for(&self, id: OperationId, patience: Duration) -> Result<Completed, RunError> {
        let (mut never, deadline) = (|| false, clock::now().after(patience));
        let mut options = self.communicator.wait_options(deadline, &mut never);
        self.messages.wait(&mut self.communicator.access(), id, &mut options)
    }

    fn send(&self, to: Rank, tag: u64, bytes: &[u8]) -> Result<Completed, RunError> {
        self.wait(self.start_send(to, tag, bytes)?)
    }

    fn receive(
        &self,
        from: Option<Rank>,
        tag: u64,
        bytes: &mut [u8],
    ) -> Result<Completed, RunError> {
        self.wait(self.start_receive(from, tag, bytes)?)
    }

    fn close(&self) -> Result<(), RunError> {
        self.close_within(PATIENCE)
    }

    fn close_within(&self, patience: Duration) -> Result<(), RunError> {
        let mut never = || false;
        let deadline = clock::now().after(patience);
        let mut options = WaitOptions { deadline, spin: Duration::ZERO, interrupted: &mut never };
        self.messages.close(&self.communicator, &mut options)
    }
}

/// Runs `rank` on `size` ranks with messages, each on a separate thread; all close together.
fn on_threads(
    size: u32,
    kind: ProviderKind,
    config: MessagesConfig,
    rank: impl Fn(&Member) + Send + Sync,
) {
    communicators(size, kind, None, |communicator| {
        let member = Member::new(communicator, config);
        rank(&member);
        member.close().unwrap();
    });
}

/// Bytes that depend on both numbers.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    weft_fabric::random::SplitMix64::new(seed).fill(&mut bytes);
    bytes
}
