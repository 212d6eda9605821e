//! All sets of buffers of one all-to-all, as one polled driver.

use crate::areas::Areas;
use crate::error::Error;
use crate::exchange::Exchange;
use crate::packing;
use crate::peer::{Lane, Peer};
use crate::rows::Area;
use crate::shape::{Shape, fits};
use weft_fabric::descriptor::Grant;
use weft_fabric::{CounterId, Engine, Event, Rank, RemoteRegion, Requests, Time};

/// The state machine of an all-to-all: no clock, no I/O, no allocation after construction.
///
/// The calls on its rounds stand in `round.rs`.
pub struct Driver {
    shape: Shape,
    sets: Vec<Exchange>,
    counters: Vec<CounterId>,
    namespace: u16,
    next_round: u64,
}

impl Driver {
    /// Allocates the sets of buffers and the counters. Every rank of the group does, in the same order
    /// as whatever else it creates, once all [agree](crate::Config::agree); then grants are exchanged and
    /// linked.
    ///
    /// # Errors
    /// [`Error::WrongGroup`]; [`Error::TooLarge`] if what a route needs to pack rows in exceeds
    /// [`crate::Config::max_bytes`]; those of the fabric. What was allocated by then is given back.
    pub fn allocate(engine: &mut Engine, shape: &Shape) -> Result<Driver, Error> {
        let (rank, ranks) = (shape.config().rank, shape.config().ranks);
        let (engine_rank, engine_ranks) = (engine.rank().0, engine.size());
        if (rank, ranks) != (engine_rank, engine_ranks) {
            return Err(Error::WrongGroup { rank, ranks, engine_rank, engine_ranks });
        }
        let namespace = engine.namespace();
        let (areas, of_sets) = memory_and_counters(engine, shape)?;
        let tag = |number: u64| {
            (u64::from(namespace) << Event::NAMESPACE_SHIFT) + number * u64::from(ranks)
        };
        let sets = (0..).zip(areas).zip(&of_sets);
        let sets: Vec<_> = sets
            .map(|((number, areas), of_set)| Exchange::new(shape, areas, *of_set, tag(number)))
            .collect();
        let counters = of_sets.concat();
        Ok(Driver { shape: shape.clone(), sets, counters, namespace, next_round: 0 })
    }

    /// What `peer` needs to take part.
    pub fn grant(&self, engine: &mut Engine, peer: Rank) -> Result<Grant, Error> {
        let regions: Vec<_> =
            self.sets.iter().map(|set| (set.areas.region(), set.areas.granted())).collect();
        Ok(engine.grant(peer, &regions, &self.counters)?)
    }

    /// Takes what `peer` granted.
    pub fn link(
        &mut self,
        engine: &mut Engine,
        peer: Rank,
        grant: &Grant,
        deadline: Time,
    ) -> Result<(), Error> {
        let remotes = engine.import(peer, grant, &self.counters, deadline)?;
        self.linked(engine, peer, remotes)
    }

    /// Takes the regions that `peer` granted, whose grant the engine has imported.
    pub(crate) fn linked(
        &mut self,
        engine: &Engine,
        peer: Rank,
        remotes: Vec<RemoteRegion>,
    ) -> Result<(), Error> {
        let route = engine
            .route(peer)
            .ok_or(weft_fabric::Error::Unknown { what: "rank", number: peer.0.into() })?;
        let differ = |field: &str, ours: u64, theirs: u64| {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            Err(Error::Disagreement { peer: peer.0, field: field.to_owned(), ours, theirs })
        };
        if remotes.len() != self.sets.len() {
            return differ("buffers", self.sets.len() as u64, remotes.len() as u64);
        }
        let bytes = self.shape.sizes().buffer_bytes();
        for (set, remote) in self.sets.iter_mut().zip(remotes) {
            if remote.length != bytes {
                return differ("bytes of a set of buffers", bytes, remote.length);
            }
            set.link(peer, Peer::new(remote.key, route.parts));
        }
        Ok(())
    }

    /// What was agreed on.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether no write of any round is under way from here.
    pub(crate) fn is_drained(&self) -> bool {
        self.sets.iter().all(Exchange::is_drained)
    }

    /// Gives the buffers back, and forgets those of the peers. Nobody writes to either any more.
    pub(crate) fn give_back(self, engine: &mut Engine) {
        for counter in self.counters {
            // Released with the last call that used it; a second release is refused and harmless.
            let _ = engine.release_counter(counter);
        }
        for set in self.sets {
            set.areas.release(engine);
            for rank in engine.peers() {
                if let Some(peer) = set.peer(rank.0) {
                    engine.forget(rank, peer.region);
                }
            }
        }
    }

    /// The number that the next round will have.
    pub fn next_round(&self) -> u64 {
        self.next_round
    }

    /// Takes the next round's number.
    pub(crate) fn advance_round(&mut self) {
        self.next_round += 1;
    }

    /// The set of buffers that a round uses.
    pub(crate) fn set(&self, round: u64) -> &Exchange {
        &self.sets[(round % self.sets.len() as u64) as usize]
    }

    pub(crate) fn set_mut(&mut self, round: u64) -> &mut Exchange {
        let index = (round % self.sets.len() as u64) as usize;
        &mut self.sets[index]
    }

    /// Room for all that one poll hands out.
    pub fn requests(&self) -> Requests {
        let peers = self.shape.config().ranks as usize;
        let rows = self.shape.sizes().extent(Area::SendMetadata).rows as usize;
        // A header, private rows, a remainder, answers and a credit for each peer and set.
        let sets = self.sets.len();
        Requests::with_capacity(5 * peers * sets, (rows + 4 * peers) * sets)
    }
}

/// The memory of every set of buffers, and the counters of each; nothing if one of them cannot be had.
fn memory_and_counters(
    engine: &mut Engine,
    shape: &Shape,
) -> Result<(Vec<Areas>, Vec<[CounterId; 3]>), Error> {
    let buffers = shape.config().buffers as usize;
    let staging_bytes = staging_bytes(engine, shape)?;
    let mut areas = Vec::with_capacity(buffers);
    let mut counters = Vec::with_capacity(3 * buffers);
    let mut fill = || {
        for _ in 0..buffers {
            areas.push(Areas::new(engine, shape, staging_bytes)?);
        }
        for _ in 0..buffers {
            let headers = engine.counter()?;
            counters.push(headers);
            for _ in [Lane::Rows, Lane::Answers] {
                counters.push(engine.counter_credited_with(headers)?);
            }
        }
        Ok(())
    };
    let filled: weft_fabric::Result<()> = fill();
    if let Err(error) = filled {
        for each in &areas {
            each.release(engine);
        }
        for counter in counters {
            // It was made above, so it is known.
            let _ = engine.release_counter(counter);
        }
        return Err(error.into());
    }
    Ok((areas, counters.as_chunks().0.to_vec()))
}

/// Bytes in which each set of buffers packs rows.
fn staging_bytes(engine: &Engine, shape: &Shape) -> Result<usize, Error> {
    let routes = engine.peers().filter_map(|peer| engine.route(peer));
    let of_set = packing::staging_bytes(shape, routes.map(|route| route.parts));
    let sizes = shape.sizes();
    let limit = shape.config().max_bytes.unwrap_or(i64::MAX as u64);
    let of_all = of_set * u128::from(shape.config().buffers) + u128::from(sizes.total_bytes());
    fits("bytes of all buffers, with those to pack rows in", of_all, limit)?;
    Ok(of_set as usize)
}

impl weft_fabric::Driver for Driver {
    type Error = Error;

    fn namespace(&self) -> u16 {
        self.namespace
    }

    fn counters(&self) -> &[CounterId] {
        &self.counters
    }

    fn poll(&mut self, _: Time, events: &[Event], requests: &mut Requests) -> Result<(), Error> {
        for event in events {
            match event {
                Event::Raised { counter, peer, count, .. } => {
                    for set in &mut self.sets {
                        set.note(*counter, *peer, Some(*count), None);
                    }
                }
                Event::Credited { counter, peer, credits } => {
                    for set in &mut self.sets {
                        set.note(*counter, *peer, None, Some(*credits));
                    }
                }
                Event::Completed { tag } => {
                    // Sets one after the other, each with a tag for every rank.
                    let number = tag & ((1 << Event::NAMESPACE_SHIFT) - 1);
                    let ranks = u64::from(self.shape.config().ranks);
                    if tag >> Event::NAMESPACE_SHIFT == u64::from(self.namespace)
                        && let Some(set) = self.sets.get_mut((number / ranks) as usize)
                    {
                        set.note_completed((number % ranks) as u32);
                    }
                }
                Event::Poisoned(cause) => {
                    return Err(weft_fabric::Error::Poisoned(cause.clone()).into());
                }
            }
        }
        for set in &mut self.sets {
            set.advance(requests)?;
        }
        Ok(())
    }
}
