//! A heap on a communicator: its offers travel over the control plane, and all ranks have it or none.

use super::offer::{Offer, Said};
use super::{Heap, HeapBuilder, Place};
use crate::error::{Error, Result};
use std::time::Duration;
use weft_control::{Operation, Rank};
use weft_fabric::group_control::GroupControl;
use weft_fabric::local::WaitLimit;
use weft_fabric::{Communicator, Time, clock};

/// How long past the deadline a rank still tells the others that it failed.
const GRACE: Duration = Duration::from_secs(1);

impl Heap {
    /// Makes the heap of a communicator's group; every rank calls this with the same number of bytes.
    /// Either all ranks get it or none does: one that fails tells the others why.
    ///
    /// # Errors
    /// Those of [`Heap::allocate`] and [`HeapBuilder::connect`]; [`Error::OtherHost`] if the group spans
    /// hosts; [`Error::Peer`] with a peer's own error; [`Error::Fabric`] if the group is poisoned or a
    /// rank does not come before the deadline.
    pub fn over(
        communicator: &Communicator,
        place: Place,
        bytes: u64,
        deadline: Time,
    ) -> Result<Heap> {
        let control = communicator.control();
        // A collective of its own: every rank makes the same calls when one cannot allocate.
        let builder = agree(control, Heap::allocate(place, bytes), deadline)?;
        let told = gather(control, Operation::Heap, &builder.offer(), deadline)?;
        let rank = control.rank().0;
        let checked = builder.check(rank, &told).and_then(|offers| {
            builder.same_members(control, &offers)?;
            Ok(offers)
        });
        // Whoever is refused is refused before anybody waits for a descriptor.
        let offers = agree(control, checked, deadline)?;
        let mut give_up = || communicator.check_wait();
        let mut limit = WaitLimit { deadline, give_up: &mut give_up };
        let mapped = builder.map(rank, &offers, &mut limit);
        let mapped = mapped.map_err(|error| verdict(communicator, error, deadline));
        agree(control, mapped, deadline)
    }

    /// Gives the memory back once no rank has it mapped any more; every rank calls this, with no
    /// kernel under way that uses the heap.
    ///
    /// # Errors
    /// [`Error::Fabric`] if the other ranks do not come before the deadline. The heap is then dropped
    /// as [the module](crate::heap) says.
    pub fn close(mut self, communicator: &Communicator, deadline: Time) -> Result<()> {
        let own = self.parts.get(self.rank as usize).cloned();
        self.parts.clear();
        let came = gather(communicator.control(), Operation::Close, &[], deadline);
        if came.is_err() {
            // Dropping it then leaves the memory where peers may still need that.
            self.parts = own.into_iter().collect();
            self.rank = 0;
        } else {
            self.leaks = false;
        }
        came.map(drop)
    }
}

impl HeapBuilder {
    /// The control plane's word on who shares a host.
    fn same_members(&self, control: &GroupControl, offers: &[Offer]) -> Result<()> {
        let members = control.members();
        let here = &members[control.rank().index()].host_id;
        for (member, offer) in members.iter().zip(offers) {
            if are_apart(here, &member.host_id, &offer.surroundings.boot) {
                let there = &member.host_id;
                let detail = format!("its host_id is {there}, here it is {here}");
                return Err(Error::OtherHost { peer: member.rank, detail });
            }
        }
        Ok(())
    }
}

/// The control plane's error on a rank that was lost, in place of that of its socket.
fn verdict(communicator: &Communicator, error: Error, deadline: Time) -> Error {
    let Error::Exchange { source, remedy } = error else { return error };
    match communicator.verdict(source, deadline) {
        lost @ weft_fabric::Error::Control(_) => Error::Fabric(lost),
        source => Error::Exchange { source, remedy },
    }
}

/// Whether two ranks of one boot are to be taken for ranks of two hosts. An identity that was found
/// begins with the boot and goes on with namespaces, of which the offers say what matters here; one
/// that was given stands for itself.
fn are_apart(ours: &str, theirs: &str, boot: &str) -> bool {
    let found = |id: &str| {
        !boot.is_empty() && id.strip_prefix(boot).is_some_and(|rest| rest.starts_with('/'))
    };
    ours != theirs && !(found(ours) && found(theirs))
}

/// Tells all ranks how it went here, and fails where it failed anywhere.
pub(crate) fn agree<T>(control: &GroupControl, outcome: Result<T>, deadline: Time) -> Result<T> {
    let said = match &outcome {
        Ok(_) => Vec::new(),
        Err(error) => Said::refusal(error).encode(),
    };
    let told = gather(control, Operation::Heap, &said, deadline);
    let outcome = outcome?;
    for (peer, said) in (0..).map(Rank).zip(told?) {
        if !said.is_empty() {
            let detail = match Said::decode(&said) {
                Some(Said::Refusal(detail)) => detail,
                _ => "it does not say why".to_owned(),
            };
            return Err(Error::Peer { peer, detail });
        }
    }
    Ok(outcome)
}

/// Tells all ranks something, and returns what each told.
pub(crate) fn gather(
    control: &GroupControl,
    operation: Operation,
    said: &[u8],
    deadline: Time,
) -> Result<Vec<Vec<u8>>> {
    let timeout = deadline.since(clock::now()).max(GRACE);
    Ok(control.all_gather_as(operation, said, timeout).map_err(weft_fabric::Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_were_given_are_believed_and_found_ones_are_looked_into() {
        assert!(!are_apart("a", "a", "boot"));
        assert!(are_apart("a", "b", "boot"));
        assert!(are_apart("boot/net:[1]/ipc:[1]", "b", "boot"));
        // Containers of one machine: whether memory passes is for their namespaces to say.
        assert!(!are_apart("boot/net:[1]/ipc:[1]", "boot/net:[1]/ipc:[2]", "boot"));
        assert!(are_apart("boot1/net:[1]/ipc:[1]", "boot2/net:[1]/ipc:[1]", "boot"));
        assert!(are_apart("/net:[1]", "/net:[2]", ""));
    }
}
