//! Collective heap calls on a communicator: they succeed on all ranks or on none.

use super::builder::HeapBuilder;
use super::location::MemoryLocation;
use super::offer::{Offer, OfferMessage};
use super::symmetric::Heap;
use super::user_memory::UserMemory;
use crate::error::{Error, Result};
use std::time::Duration;
use weft_control::{Operation, Rank};
use weft_fabric::{Communicator, GroupControl, Time, WaitLimit, clock};

/// Time past the deadline in which a rank still reports a failure to the others.
const GRACE: Duration = Duration::from_secs(1);

impl Heap {
    /// Makes the heap for a communicator's group. Collective, with an equal byte count on all ranks. It succeeds on
    /// all ranks or on none: a rank that fails reports the error to the others.
    ///
    /// # Errors
    /// Errors from [`HeapBuilder::allocate`] and [`HeapBuilder::connect`]; [`Error::OtherHost`] if the group spans
    /// hosts; [`Error::Peer`] with a peer's own error; [`Error::Fabric`] if the group is poisoned or a rank misses the
    /// deadline.
    pub fn create(
        communicator: &Communicator,
        location: MemoryLocation,
        bytes: u64,
        deadline: Time,
    ) -> Result<Heap> {
        let control = communicator.control();
        // Agreed first, so that all ranks make the same calls if one fails to allocate.
        agree(control, HeapBuilder::allocate(location, bytes), deadline)?
            .join(communicator, deadline)
    }

    /// Makes a heap from user memory on each rank. Collective, with an equal byte count on all ranks; it succeeds on
    /// all ranks or on none.
    ///
    /// # Errors
    /// [`Error::NotShareable`] for GPU memory without an IPC handle; otherwise errors as in [`Heap::create`].
    pub fn register(
        communicator: &Communicator,
        location: MemoryLocation,
        memory: UserMemory,
        deadline: Time,
    ) -> Result<Heap> {
        let control = communicator.control();
        let builder = agree(control, HeapBuilder::with_user_memory(location, memory), deadline)?;
        builder.join(communicator, deadline)
    }

    /// Unmaps all parts, and frees this rank's once no rank has it mapped. Collective, without kernels in flight that
    /// use the heap.
    ///
    /// # Errors
    /// [`Error::Fabric`] if other ranks miss the deadline. The heap is then dropped as described in
    /// [the module](crate::heap).
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<()> {
        let own = self.parts.get(self.rank as usize).cloned();
        self.parts.clear();
        let closed = gather(communicator.control(), Operation::Close, &[], deadline);
        if closed.is_err() {
            // The drop leaves the memory allocated, since peers may still use it.
            self.parts = own.into_iter().collect();
            self.rank = 0;
        } else {
            self.leaks = false;
        }
        closed.map(drop)
    }
}

impl HeapBuilder {
    /// Maps the parts of all ranks in a communicator. Collective.
    pub(super) fn join(self, communicator: &Communicator, deadline: Time) -> Result<Heap> {
        let control = communicator.control();
        let offers = gather(control, Operation::Heap, &self.offer(), deadline)?;
        let rank = control.rank().0;
        let checked = self.check(rank, &offers).and_then(|offers| {
            self.same_members(control, &offers)?;
            Ok(offers)
        });
        // Rejections are agreed before any rank waits for a descriptor.
        let offers = agree(control, checked, deadline)?;
        let mut give_up = || communicator.check_wait();
        let mut limit = WaitLimit { deadline, give_up: &mut give_up };
        let mapped = self.map(rank, &offers, &mut limit);
        let mapped = mapped.map_err(|error| verdict(communicator, error, deadline));
        agree(control, mapped, deadline)
    }

    /// Checks by the control plane's member list that all ranks share a host.
    fn same_members(&self, control: &GroupControl, offers: &[Offer]) -> Result<()> {
        let members = control.members();
        let here = &members[control.rank().index()].host_id;
        for (member, offer) in members.iter().zip(offers) {
            if are_apart(here, &member.host_id, &offer.process.boot) {
                let there = &member.host_id;
                let detail = format!("its host_id is {there}, here it is {here}");
                return Err(Error::OtherHost { peer: member.rank, detail });
            }
        }
        Ok(())
    }
}

/// Replaces a lost rank's socket error by the control plane's.
fn verdict(communicator: &Communicator, error: Error, deadline: Time) -> Error {
    let Error::Exchange { source, remedy } = error else { return error };
    match communicator.attribute_error(source, deadline) {
        lost @ weft_fabric::Error::Control(_) => Error::Fabric(lost),
        source => Error::Exchange { source, remedy },
    }
}

/// True if two ranks with one boot ID count as ranks on two hosts. A detected identity starts with the boot ID,
/// followed by namespaces, which the offers check; configured identities are compared literally.
fn are_apart(ours: &str, theirs: &str, boot: &str) -> bool {
    let found = |id: &str| {
        !boot.is_empty() && id.strip_prefix(boot).is_some_and(|rest| rest.starts_with('/'))
    };
    ours != theirs && !(found(ours) && found(theirs))
}

/// Exchanges all ranks' outcomes; fails if one has failed.
///
/// # Errors
/// This rank's error, or [`Error::Peer`] with a peer's error; control plane errors.
pub fn agree<T, E: From<Error> + std::fmt::Display>(
    control: &GroupControl,
    outcome: std::result::Result<T, E>,
    deadline: Time,
) -> std::result::Result<T, E> {
    let message = match &outcome {
        Ok(_) => Vec::new(),
        Err(error) => OfferMessage::refusal(error).encode(),
    };
    let messages = gather(control, Operation::Heap, &message, deadline);
    let outcome = outcome?;
    for (peer, message) in (0..).map(Rank).zip(messages?) {
        if !message.is_empty() {
            let detail = match OfferMessage::decode(&message) {
                Some(OfferMessage::Refusal(detail)) => detail,
                _ => "no reason given".to_owned(),
            };
            return Err(Error::Peer { peer, detail }.into());
        }
    }
    Ok(outcome)
}

/// All-gather for a message, in rank order.
pub(crate) fn gather(
    control: &GroupControl,
    operation: Operation,
    message: &[u8],
    deadline: Time,
) -> Result<Vec<Vec<u8>>> {
    let timeout = deadline.since(clock::now()).max(GRACE);
    Ok(control.all_gather_as(operation, message, timeout).map_err(weft_fabric::Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_identities_are_compared_and_detected_ones_are_left_to_the_offers() {
        assert!(!are_apart("a", "a", "boot"));
        assert!(are_apart("a", "b", "boot"));
        assert!(are_apart("boot/net:[1]/ipc:[1]", "b", "boot"));
        // Containers on one machine: the offers check the namespaces.
        assert!(!are_apart("boot/net:[1]/ipc:[1]", "boot/net:[1]/ipc:[2]", "boot"));
        assert!(are_apart("boot1/net:[1]/ipc:[1]", "boot2/net:[1]/ipc:[1]", "boot"));
        assert!(are_apart("/net:[1]", "/net:[2]", ""));
    }
}
