//! Requests whose bytes a link has copied and not handed on.
//!
//! A small write over tcp is copied and tried on its socket at once, and its request ends inside the submit.
//! Where the socket took only part of it, the rest would lie in this process until its next call, and its
//! peer would wait for as long as the program computes. Such a request goes on until the kernel has the rest.
//! All of this is off the path of a write that leaves at once: the path reads one flag ([`Sink::held`]).
//!
//! [`Sink::held`]: crate::link::Sink::held

use super::{Engine, Peer};
use crate::driver::{Ask, Requests};
use crate::error::Result;
use crate::link::ScatterPart;
use crate::request::{Tag, Token};
use crate::types::{Class, CounterId, RequestId};
use std::ops::Range;
use weft_control::Rank;

impl Engine {
    /// [`Engine::credit`], sent at once. The request ends when the kernel has the credit.
    ///
    /// # Errors
    /// As [`Engine::credit`].
    pub fn credit_now(&mut self, peer: Rank, counter: CounterId) -> Result<RequestId> {
        self.credit(peer, counter)?;
        let credit = self.owed.pop_if(|credit| credit.peer == peer);
        let path = self.peers.get(peer.index()).and_then(|peer| peer.path);
        let (Some(aim), Some(path)) = (credit, path.filter(|path| !path.inline)) else {
            self.owed.extend(credit);
            self.flush_all();
            return Ok(RequestId::DONE);
        };
        self.unflushed |= 1 << path.link;
        let id = self.request(path.link, aim, Class::Latency, None, &[], Tag::CALLER);
        self.flush_all();
        Ok(if self.sink.held { self.hold_write(id, peer) } else { id })
    }

    /// The request of a write to one peer, after a flush that has left something behind: one that has ended
    /// goes on.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_write(&mut self, id: RequestId, peer: Rank) -> RequestId {
        self.sink.held = false;
        if id == RequestId::DONE { self.hold_copied(peer, Tag::CALLER) } else { id }
    }

    /// As [`Engine::hold_write`], for a scatter, whose request is still open.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_scatter(&mut self, id: RequestId, parts: &[ScatterPart]) {
        self.sink.held = false;
        for part in parts {
            let held = self.hold_toward(id, part.peer);
            if let Some(request) = self.requests.get(id) {
                request.left += held;
            }
        }
    }

    /// As [`Engine::hold_write`], for what a driver asked for. `ended` are the tags, in the order of their
    /// asks, of the writes that have ended inside the submit.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_asks(&mut self, requests: &Requests, ended: Range<usize>) {
        self.sink.held = false;
        let Range { start: mut place, mut end } = ended;
        for ask in &requests.asks {
            let Ask::Write { peer, tag, .. } = ask else { continue };
            if place == end || self.ended[place] != *tag {
                continue;
            }
            if self.hold_copied(*peer, Tag(*tag)) == RequestId::DONE {
                place += 1;
            } else {
                self.ended.remove(place);
                end -= 1;
            }
        }
    }

    /// A request until what was copied last toward `peer` has left; [`RequestId::DONE`] if it has.
    fn hold_copied(&mut self, peer: Rank, tag: Tag) -> RequestId {
        let (id, _) = self.requests.open(tag, peer);
        let held = self.hold_toward(id, peer);
        if let Some(request) = self.requests.get(id) {
            request.left += held;
        }
        self.end_submit(id)
    }

    fn hold_toward(&mut self, id: RequestId, peer: Rank) -> u32 {
        match self.peers.get(peer.index()) {
            Some(Peer { path: Some(path), .. }) => {
                self.links[usize::from(path.link)].hold(peer, Token::of(id, peer))
            }
            _ => 0,
        }
    }
}
