//! All channels in an all-to-all as one polled driver.

use crate::area::Area;
use crate::error::{Error, fits};
use crate::plan::packing;
use crate::protocol::channel::Channel;
use crate::protocol::channel_memory::ChannelMemory;
use crate::protocol::peer::{Lane, PeerState};
use crate::shape::Shape;
use weft_fabric::{CounterId, Engine, Event, Grant, Rank, RemoteRegion, Requests, Time};

/// All-to-all state machine: no clock, no I/O, no allocation after construction.
///
/// `round.rs` has the calls on rounds.
pub struct Driver {
    shape: Shape,
    channels: Vec<Channel>,
    counters: Vec<CounterId>,
    namespace: u16,
    next_round: u64,
}

impl Driver {
    /// Allocates the channels and the counters. Every rank in the group does this in the same order relative
    /// to its other objects, once all [agree](crate::Config::agree); then grants are exchanged and linked.
    ///
    /// # Errors
    /// [`Error::WrongGroup`]; [`Error::TooLarge`] if the staging memory exceeds [`crate::Config::max_bytes`];
    /// fabric errors. Memory allocated before the error is released.
    pub fn allocate(engine: &mut Engine, shape: &Shape) -> Result<Driver, Error> {
        let (rank, ranks) = (shape.config().rank, shape.config().ranks);
        let (engine_rank, engine_ranks) = (engine.rank().0, engine.size());
        if (rank, ranks) != (engine_rank, engine_ranks) {
            return Err(Error::WrongGroup { rank, ranks, engine_rank, engine_ranks });
        }
        let namespace = engine.namespace();
        let (areas, of_channels) = memory_and_counters(engine, shape)?;
        let tag = |number: u64| {
            (u64::from(namespace) << Event::NAMESPACE_SHIFT) + number * u64::from(ranks)
        };
        let channels = (0..).zip(areas).zip(&of_channels);
        let channels: Vec<_> = channels
            .map(|((number, areas), counters)| Channel::new(shape, areas, *counters, tag(number)))
            .collect();
        let counters = of_channels.concat();
        Ok(Driver { shape: shape.clone(), channels, counters, namespace, next_round: 0 })
    }

    /// Grant for `peer`.
    pub fn grant(&self, engine: &mut Engine, peer: Rank) -> Result<Grant, Error> {
        let regions: Vec<_> = self
            .channels
            .iter()
            .map(|channel| (channel.areas.region(), channel.areas.granted()))
            .collect();
        Ok(engine.grant(peer, &regions, &self.counters)?)
    }

    /// Imports `peer`'s grant.
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

    /// Takes `peer`'s regions, whose grant the engine has imported.
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
        if remotes.len() != self.channels.len() {
            return differ("channels", self.channels.len() as u64, remotes.len() as u64);
        }
        let bytes = self.shape.sizes().channel_bytes();
        for (channel, remote) in self.channels.iter_mut().zip(remotes) {
            if remote.length != bytes {
                return differ("channel bytes", bytes, remote.length);
            }
            channel.link(peer, PeerState::new(remote.key, route.parts));
        }
        Ok(())
    }

    /// The agreed shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// True if no write from this rank is in flight, in any round.
    pub(crate) fn is_drained(&self) -> bool {
        self.channels.iter().all(Channel::is_drained)
    }

    /// Releases the memory here, and the mappings to peers' memory. No rank writes to either any more.
    pub(crate) fn give_back(self, engine: &mut Engine) {
        for counter in self.counters {
            // May have been released with its last call; a second release is rejected without effect.
            let _ = engine.release_counter(counter);
        }
        for channel in self.channels {
            channel.areas.release(engine);
            for rank in engine.peers() {
                if let Some(peer) = channel.peer(rank.0) {
                    engine.remove_remote(rank, peer.region);
                }
            }
        }
    }

    /// Next round's number.
    pub fn next_round(&self) -> u64 {
        self.next_round
    }

    /// Advances the next round's number.
    pub(crate) fn advance_round(&mut self) {
        self.next_round += 1;
    }

    /// A round's channel.
    pub(crate) fn channel(&self, round: u64) -> &Channel {
        &self.channels[(round % self.channels.len() as u64) as usize]
    }

    pub(crate) fn channel_mut(&mut self, round: u64) -> &mut Channel {
        let index = (round % self.channels.len() as u64) as usize;
        &mut self.channels[index]
    }

    /// Requests with room for one poll.
    pub fn requests(&self) -> Requests {
        let peers = self.shape.config().ranks as usize;
        let rows = self.shape.sizes().extent(Area::SendMetadata).rows as usize;
        // A header, private rows, a remainder, replies and a credit for each peer and channel.
        let channels = self.channels.len();
        Requests::with_capacity(5 * peers * channels, (rows + 4 * peers) * channels)
    }
}

/// Memory and counters for all channels; on an error all are released.
fn memory_and_counters(
    engine: &mut Engine,
    shape: &Shape,
) -> Result<(Vec<ChannelMemory>, Vec<[CounterId; 3]>), Error> {
    let channels = shape.config().channels as usize;
    let staging_bytes = staging_bytes(engine, shape)?;
    let mut areas = Vec::with_capacity(channels);
    let mut counters = Vec::with_capacity(3 * channels);
    let mut fill = || {
        for _ in 0..channels {
            areas.push(ChannelMemory::new(engine, shape, staging_bytes)?);
        }
        for _ in 0..channels {
            let headers = engine.counter()?;
            counters.push(headers);
            for _ in [Lane::Rows, Lane::Replies] {
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
            // Created above, so releasing it succeeds.
            let _ = engine.release_counter(counter);
        }
        return Err(error.into());
    }
    Ok((areas, counters.as_chunks().0.to_vec()))
}

/// Staging memory per channel in bytes.
fn staging_bytes(engine: &Engine, shape: &Shape) -> Result<usize, Error> {
    let routes = engine.peers().filter_map(|peer| engine.route(peer));
    let of_channel = packing::staging_bytes(shape, routes.map(|route| route.parts));
    let sizes = shape.sizes();
    let limit = shape.config().max_bytes.unwrap_or(i64::MAX as u64);
    let of_all = of_channel * u128::from(shape.config().channels) + u128::from(sizes.total_bytes());
    fits("bytes in all channels, including staging buffers", of_all, limit)?;
    Ok(of_channel as usize)
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
                    for channel in &mut self.channels {
                        channel.note(*counter, *peer, Some(*count), None);
                    }
                }
                Event::Credited { counter, peer, credits } => {
                    for channel in &mut self.channels {
                        channel.note(*counter, *peer, None, Some(*credits));
                    }
                }
                Event::Completed { tag } => {
                    // Tags are consecutive by channel, with one for each rank.
                    let number = tag & ((1 << Event::NAMESPACE_SHIFT) - 1);
                    let ranks = u64::from(self.shape.config().ranks);
                    if tag >> Event::NAMESPACE_SHIFT == u64::from(self.namespace)
                        && let Some(channel) = self.channels.get_mut((number / ranks) as usize)
                    {
                        channel.note_completed((number % ranks) as u32);
                    }
                }
                Event::Poisoned(cause) => {
                    return Err(weft_fabric::Error::Poisoned(cause.clone()).into());
                }
            }
        }
        for channel in &mut self.channels {
            channel.advance(requests)?;
        }
        Ok(())
    }
}
