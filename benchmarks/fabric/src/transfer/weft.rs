//! Weft as in a program: two counters in turn, so that one round is written while the other is read; each
//! round is awaited and credited.

use super::{Side, page, parts, spinning};
use crate::Outcome;
use crate::group::PATIENCE;
use weft_fabric::{
    Communicator, CounterId, Engine, EngineGuard, Error, Rank, Region, RemoteRegion, RequestId,
    Result, WaitOptions, clock,
};

/// Counters used in turn.
const COUNTERS: usize = 2;

/// Access to the engine: exclusive, or locked for each call.
enum Access<'a> {
    Held(EngineGuard<'a>),
    Shared(&'a Communicator),
}

impl Access<'_> {
    #[inline(always)]
    fn with<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        match self {
            Access::Held(engine) => work(engine),
            Access::Shared(communicator) => work(&mut communicator.engine()),
        }
    }

    fn wait(&mut self, counter: CounterId, expected: &[(Rank, u64)]) -> Result<()> {
        spinning(|waiter| match self {
            Access::Held(engine) => engine.wait(counter, expected, waiter),
            Access::Shared(communicator) => communicator.wait(counter, expected, waiter),
        })
    }

    fn wait_for_credit(&mut self, counter: CounterId, peer: Rank, round: u64) -> Result<()> {
        spinning(|waiter| match self {
            Access::Held(engine) => engine.wait_for_credit(counter, peer, round, waiter),
            Access::Shared(communicator) => {
                communicator.wait_for_credit(counter, peer, round, waiter)
            }
        })
    }

    fn wait_for_request(&mut self, request: RequestId) -> Result<()> {
        spinning(|waiter| match self {
            Access::Held(engine) => engine.wait_for_request(request, waiter),
            Access::Shared(communicator) => communicator.wait_for_request(request, waiter),
        })
    }

    fn barrier(&mut self) -> Result<()> {
        spinning(|waiter: &mut WaitOptions<'_>| match self {
            Access::Held(engine) => engine.barrier(waiter),
            Access::Shared(communicator) => communicator.barrier(waiter),
        })
    }
}

/// Counted writes to the other rank.
pub struct Weft<'a> {
    access: Access<'a>,
    peer: Rank,
    source: Region,
    inbox: RemoteRegion,
    counters: [CounterId; COUNTERS],
    /// Rounds opened toward the peer, and rounds received from it.
    sent: u64,
    received: u64,
    /// Writes whose source may still be read.
    requests: Vec<RequestId>,
}

impl<'a> Weft<'a> {
    /// Shares memory and counters; called by both ranks. `shared`: the engine is locked for each call.
    pub fn open(
        communicator: &'a Communicator,
        shared: bool,
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
        let access =
            if shared { Access::Shared(communicator) } else { Access::Held(communicator.engine()) };
        Ok(Weft { access, peer, source, inbox, counters, sent: 0, received: 0, requests })
    }

    /// Counter and round for a window.
    fn round(&self, number: u64) -> (CounterId, u64) {
        (self.counters[number as usize % COUNTERS], number / COUNTERS as u64)
    }
}

impl Side for Weft<'_> {
    fn name(&self) -> &'static str {
        "weft"
    }

    fn barrier(&mut self) -> Outcome<()> {
        for request in self.requests.drain(..) {
            self.access.wait_for_request(request)?;
        }
        Ok(self.access.barrier()?)
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
            let (peer, pages) = (self.peer, [page(&self.source, self.inbox, offset, length)]);
            let written = self.access.with(|engine| engine.write(peer, counter, round, &pages));
            let request = match written {
                Err(Error::NoCredit { .. }) => {
                    self.access.wait_for_credit(counter, peer, round)?;
                    self.access.with(|engine| engine.write(peer, counter, round, &pages))?
                }
                written => written?,
            };
            if !self.access.with(|engine| engine.is_drained(request)) {
                self.requests.push(request);
            }
        }
        self.sent += 1;
        Ok(())
    }

    fn receive_window(&mut self, offsets: &[usize], length: usize) -> Outcome<()> {
        let ((counter, _), peer) = (self.round(self.received), self.peer);
        let parts = self.access.with(|engine| parts(engine, peer, length));
        self.access.wait(counter, &[(peer, offsets.len() as u64 * parts)])?;
        // The credit leaves behind the next write, or with the next wait.
        self.access.with(|engine| engine.credit(peer, counter))?;
        self.received += 1;
        Ok(())
    }

    fn finish_windows(&mut self) -> Outcome<()> {
        for number in self.sent.saturating_sub(COUNTERS as u64)..self.sent {
            let (counter, round) = self.round(number);
            self.access.wait_for_credit(counter, self.peer, round + 1)?;
        }
        Ok(())
    }
}
