//! Sides `local` and `writes`: the least work for a query within a host.

use super::samples::{Samples, answer};
use super::service::{deadline, pair_config};
use super::{ANSWER, HEADER, Measured, Options, start};
use crate::Outcome;
use crate::group::waiting;
use std::time::{Duration, Instant};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Communicator, CounterId, Page, Rank, Region, RegionKey};

/// Round trips with two counted writes.
const TRIPS: u64 = 2000;
/// Spin deadline on both ends.
const SPIN: Duration = Duration::from_micros(200);

/// One thread copies each sample once, into slots used in turn, and answers it.
pub fn copies(samples: &Samples, time: Duration, slots: u32) -> Measured {
    let (bytes, mut wrong, mut query) = (samples.bytes(), 0, 0_u64);
    let mut memory = vec![0; bytes.next_multiple_of(64) * slots as usize];
    let since = Instant::now();
    while !query.is_multiple_of(32) || since.elapsed() < time {
        let slot = (query % u64::from(slots)) as usize * bytes.next_multiple_of(64);
        let slot = &mut memory[slot..slot + bytes];
        slot.copy_from_slice(samples.sample(query));
        let found = std::hint::black_box(answer(slot));
        wrong += u64::from(found != *samples.answer(query));
        query += 1;
    }
    let queries_per_s = query as f64 / since.elapsed().as_secs_f64();
    Measured { queries_per_s, round_trips_ns: Vec::new(), wrong, ..Measured::default() }
}

/// Both ends for two counted writes.
struct End {
    pair: Communicator,
    peer: Rank,
    counter: CounterId,
    ours: Region,
    theirs: RegionKey,
    exchanged: u64,
}

impl End {
    fn new(pair: Communicator, bytes: usize) -> Outcome<End> {
        let peer = Rank(1 - pair.rank().0);
        let ours = pair.engine().alloc(2 * (HEADER + bytes.max(ANSWER)))?;
        let counter = pair.engine().counter()?;
        let half = 0..(HEADER + bytes.max(ANSWER)) as u64;
        let remotes = pair.share(&[(&ours, half)], &[counter], deadline())?;
        let theirs = remotes[peer.index()][0].key;
        Ok(End { pair, peer, counter, ours, theirs, exchanged: 0 })
    }

    /// Writes bytes from the second half of our region into the first half of the peer's.
    fn write(&self, bytes: usize) -> Outcome<()> {
        let page = Page {
            source: self.ours.key(),
            source_offset: self.ours.memory().len() as u64 / 2,
            destination: self.theirs,
            destination_offset: 0,
            length: bytes as u64,
        };
        self.pair.engine().write(self.peer, self.counter, 0, &[page])?;
        Ok(())
    }

    fn wait(&mut self) -> Outcome<()> {
        self.exchanged += 1;
        let expected = [(self.peer, self.exchanged)];
        Ok(waiting(SPIN, |options| self.pair.wait(self.counter, &expected, options))?)
    }
}

/// Round trips with a counted write for a query and one for an answer.
pub fn writes(options: &Options, samples: &Samples) -> Outcome<Measured> {
    let bytes = samples.bytes();
    let listener = Listener::bind(pair_config(options, bytes, "127.0.0.1:0")?)?;
    let mut child = start("writes", bytes, &listener.address().to_string())?;
    let mut end = End::new(listener.accept(deadline(), &mut || false)?, bytes)?;
    let mut round_trips_ns = Vec::new();
    for _ in 0..TRIPS {
        let since = Instant::now();
        end.write(HEADER + bytes)?;
        end.wait()?;
        round_trips_ns.push(since.elapsed().as_nanos() as f64);
    }
    child.wait()?;
    Ok(Measured { queries_per_s: f64::NAN, round_trips_ns, ..Measured::default() })
}

/// Second process for [`writes`].
pub fn answer_writes(options: &Options, bytes: usize, address: &str) -> Outcome<()> {
    let pair = connect(&pair_config(options, bytes, address)?, deadline())?;
    let mut end = End::new(pair, bytes)?;
    for _ in 0..TRIPS {
        end.wait()?;
        end.write(HEADER + ANSWER)?;
    }
    Ok(())
}
