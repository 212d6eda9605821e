//! Handover: requests whose bytes a link has copied but not sent.
//!
//! A small write over tcp is copied and written to the socket at once, and the request completes inside
//! the submit. If the socket accepted only part of it, the rest would stay in this process until the next
//! call, and the peer would wait while the program computes. Such a request stays in flight until the
//! kernel has the rest. For a write that leaves at once, the path reads only one flag ([`Sink::held`]).
//!
//! [`Sink::held`]: crate::link::Sink::held

use super::route::EnginePeer;
use super::state::{Engine, ScatterInSubmit};
use crate::driver::{DriverRequest, Requests};
use crate::error::Result;
use crate::link::ScatterPart;
use crate::request::{PartToken, RequestTag};
use crate::types::{CounterId, RequestId, TrafficClass};
use std::ops::Range;
use weft_control::Rank;

impl Engine {
    /// [`Engine::credit`], sent at once. The request completes when the kernel has the credit.
    ///
    /// # Errors
    /// Same as [`Engine::credit`].
    pub fn credit_now(&mut self, peer: Rank, counter: CounterId) -> Result<RequestId> {
        self.credit(peer, counter)?;
        let credit = self.pending_credits.pop_if(|credit| credit.peer == peer);
        let path = self.peers.get(peer.index()).and_then(|peer| peer.path);
        let (Some(destination), Some(path)) = (credit, path.filter(|path| !path.inline)) else {
            self.pending_credits.extend(credit);
            self.flush_all();
            return Ok(RequestId::DONE);
        };
        self.unflushed |= 1 << path.link;
        let id = self.request(
            path.link,
            destination,
            TrafficClass::Latency,
            None,
            &[],
            RequestTag::CALLER,
        );
        self.flush_all();
        Ok(if self.sink.held { self.hold_write(id, peer) } else { id })
    }

    /// Reopens a request that wrote to one peer, after a flush that left bytes with the link.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_write(&mut self, id: RequestId, peer: Rank) -> RequestId {
        self.sink.held = false;
        if id == RequestId::DONE { self.hold_copied(peer, RequestTag::CALLER) } else { id }
    }

    /// Same as [`Engine::hold_write`], for a scatter, whose request is still open.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_scatter(&mut self, id: RequestId, parts: &[ScatterPart]) {
        for part in parts {
            let held = self.hold_toward(id, part.peer);
            if let Some(request) = self.requests.get(id) {
                request.left += held;
            }
        }
    }

    /// Same as [`Engine::hold_write`], for a driver's requests. `ended` holds the tags, in submission
    /// order, of writes that completed inside the submit.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_entries(&mut self, requests: &Requests, ended: Range<usize>) {
        self.sink.held = false;
        let Range { start: mut index, mut end } = ended;
        for scatter in 0..self.open_scatters.len() {
            let ScatterInSubmit { id, parts } = &self.open_scatters[scatter];
            let (id, parts) = (*id, parts.clone());
            self.hold_scatter(id, &requests.parts[parts]);
        }
        for entry in &requests.entries {
            let DriverRequest::Write { peer, tag, .. } = entry else { continue };
            if *tag == Requests::NO_EVENT || index == end || self.completed_tags[index] != *tag {
                continue;
            }
            if self.hold_copied(*peer, RequestTag(*tag)) == RequestId::DONE {
                index += 1;
            } else {
                self.completed_tags.remove(index);
                end -= 1;
            }
        }
    }

    /// A request until the bytes copied last toward `peer` have left; [`RequestId::DONE`] if they have.
    fn hold_copied(&mut self, peer: Rank, tag: RequestTag) -> RequestId {
        let (id, _) = self.requests.open(tag, peer);
        let held = self.hold_toward(id, peer);
        if let Some(request) = self.requests.get(id) {
            request.left += held;
        }
        self.end_submit(id)
    }

    fn hold_toward(&mut self, id: RequestId, peer: Rank) -> u32 {
        match self.peers.get(peer.index()) {
            Some(EnginePeer { path: Some(path), .. }) => {
                self.links[usize::from(path.link)].hold(peer, PartToken::of(id, peer))
            }
            _ => 0,
        }
    }
}
