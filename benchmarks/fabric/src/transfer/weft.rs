//! Weft as a program would use it: two counters in turn, so that one round is written while the other
//! is read; each round is waited for and credited.

use super::{Side, page, parts, spinning};
use crate::Outcome;
use crate::group::PATIENCE;
use weft_fabric::shared::EngineGuard;
use weft_fabric::{Communicator, CounterId, Error, Rank, Region, RemoteRegion, RequestId, clock};

/// Counters used in turn.
const BUFFERS: usize = 2;

/// Counted writes toward the other rank.
pub struct Weft<'a> {
    engine: EngineGuard<'a>,
    peer: Rank,
    source: Region,
    inbox: RemoteRegion,
    counters: [CounterId; BUFFERS],
    /// Rounds that were begun toward the peer, and that were received from it.
    sent: u64,
    received: u64,
    /// Writes whose source may still be read.
    requests: Vec<RequestId>,
}

impl<'a> Weft<'a> {
    /// Both ranks call this.
    pub fn open(
        communicator: &'a Communicator,
        source: &Region,
        inbox: &Region,
    ) -> Outcome<Weft<'a>> {
        let peer = Rank(1 - communicator.rank().0);
        let mut engine = communicator.engine();
        let counters = [engine.counter()?, engine.counter()?];
        drop(engine);
        let range = 0..inbox.memory().len() as u64;
        let deadline = clock::now().after(PATIENCE);
        let remotes = communicator.share(&[(inbox, range)], &counters, deadline)?;
        let inbox = remotes[peer.0 as usize][0];
        let (source, requests) = (source.clone(), Vec::new());
        let engine = communicator.engine();
        Ok(Weft { engine, peer, source, inbox, counters, sent: 0, received: 0, requests })
    }

    /// The counter and its round for the window of this number.
    fn round(&self, number: u64) -> (CounterId, u64) {
        (self.counters[number as usize % BUFFERS], number / BUFFERS as u64)
    }
}

impl Side for Weft<'_> {
    fn name(&self) -> &'static str {
        "weft"
    }

    fn meet(&mut self) -> Outcome<()> {
        for request in self.requests.drain(..) {
            spinning(|waiter| self.engine.wait_for_request(request, waiter))?;
        }
        Ok(spinning(|waiter| self.engine.barrier(waiter))?)
    }

    fn send(&mut self, offset: usize, length: usize) -> Outcome<()> {
        self.send_window(&[offset], length)
    }

    fn receive(&mut self, offset: usize, length: usize) -> Outcome<()> {
        self.receive_window(&[offset], length)
    }

    fn send_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        let (counter, round) = self.round(self.sent);
        for &offset in offsets {
            let page = page(&self.source, self.inbox, offset, length);
            let request = match self.engine.write(self.peer, counter, round, &[page]) {
                Err(Error::NoCredit { .. }) => {
                    spinning(|waiter| {
                        self.engine.wait_for_credit(counter, self.peer, round, waiter)
                    })?;
                    self.engine.write(self.peer, counter, round, &[page])?
                }
                written => written?,
            };
            if !self.engine.is_drained(request) {
                self.requests.push(request);
            }
        }
        self.sent += 1;
        Ok(())
    }

    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        let (counter, _) = self.round(self.received);
        let expected = offsets.len() as u64 * parts(&self.engine, self.peer, length);
        spinning(|waiter| self.engine.wait(counter, &[(self.peer, expected)], waiter))?;
        // It leaves behind the next write, or with the next wait.
        self.engine.credit(self.peer, counter)?;
        self.received += 1;
        Ok(())
    }

    fn finish_windows(&mut self) -> Outcome<()> {
        for number in self.sent.saturating_sub(BUFFERS as u64)..self.sent {
            let (counter, round) = self.round(number);
            spinning(|waiter| self.engine.wait_for_credit(counter, self.peer, round + 1, waiter))?;
        }
        Ok(())
    }
}
