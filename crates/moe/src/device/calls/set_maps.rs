//! Expert placement changes between rounds.

use crate::device::calls::all_to_all::{Backend, DeviceAllToAll, DeviceParts};
use crate::device::shape::agreement::digest;
use crate::device::shape::channel_layout::DeviceArea;
use crate::device::shape::replica_table;
use crate::error::Error;
use crate::protocol::outcome;
use crate::shape::agreement;
use crate::shape::expert_map::ExpertMap;
use std::sync::PoisonError;
use weft_fabric::{Communicator, Time};

impl DeviceAllToAll {
    /// A layer's map.
    ///
    /// # Errors
    /// [`Error::NoLayer`].
    pub fn map(&self, layer: u32) -> Result<ExpertMap, Error> {
        let layers = self.shape().layers();
        let maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        maps.current.get(layer as usize).cloned().ok_or(Error::NoLayer { layer, layers })
    }

    /// Changes layer maps, on every rank between the same rounds. Every rank passes the same changes. Rounds
    /// that begin after it returns use the new maps, also in captured graphs.
    ///
    /// Waits until this rank's device is idle. No round may be in flight, on any channel.
    ///
    /// # Errors
    /// With all maps unchanged: [`Error::Disagreement`] if the ranks pass different maps; [`Error::NoLayer`],
    /// [`Error::MapShape`]; [`Error::RoundInFlight`]; [`Error::MapRefused`] with a peer's error; fabric
    /// errors, and the cause if the group has failed. CUDA errors.
    pub fn set_maps(
        &self,
        communicator: &Communicator,
        changes: &[(u32, ExpertMap)],
        deadline: Time,
    ) -> Result<(), Error> {
        let layers: Vec<String> = changes.iter().map(|(layer, _)| layer.to_string()).collect();
        let maps: Vec<ExpertMap> = changes.iter().map(|(_, map)| map.clone()).collect();
        let fields =
            [("placement's layers", layers.join(",")), ("placement's digest", digest(&maps))];
        let ranks = communicator.world_size();
        let copies = vec![agreement::encode(&fields); ranks as usize];
        agreement::agree(&fields, ranks, &communicator.exchange(&copies, deadline)?)?;
        let ready = self.ready_for(changes);
        let refused = outcome::trade(communicator, &ready, deadline);
        ready?;
        if let Some((peer, detail)) = refused? {
            return Err(Error::MapRefused { peer, detail });
        }
        self.write_maps(changes)
    }

    /// [`DeviceAllToAll::set_maps`] for one rank in a group within this process; the other ranks do the same.
    ///
    /// # Errors
    /// As [`DeviceAllToAll::set_maps`].
    pub fn set_maps_here(&self, changes: &[(u32, ExpertMap)]) -> Result<(), Error> {
        self.ready_for(changes)?;
        self.write_maps(changes)
    }

    /// Writes the configured tables, before the first round.
    pub(crate) fn write_first_maps(&self) -> Result<(), Error> {
        let maps = self.shape().config().maps.clone();
        let all: Vec<(u32, ExpertMap)> = (0..).zip(maps.iter().cloned()).collect();
        self.write_maps(&all)
    }

    fn ready_for(&self, changes: &[(u32, ExpertMap)]) -> Result<(), Error> {
        let parts = self.parts()?;
        parts.domain.check_fatal()?;
        let layers = self.shape().layers();
        for &(layer, ref map) in changes {
            if layer >= layers {
                return Err(Error::NoLayer { layer, layers });
            }
            self.shape().config().check_map(layer, map)?;
        }
        self.settle()?;
        let mut channels = 0..self.shape().config().channels;
        channels.try_for_each(|channel| self.is_between_rounds(parts, channel))
    }

    /// Checks that all four phases have ended equally many rounds.
    fn is_between_rounds(&self, parts: &DeviceParts, channel: u32) -> Result<(), Error> {
        let mut words = [0; 32];
        let at = self.shape().at(channel, DeviceArea::State);
        parts.domain.read_block(&parts.block, at, &mut words)?;
        // Kernels count in 64 bits (`State::left`), the twin in 32 (`StateWord::Epoch`).
        let bytes = match parts.backend {
            Backend::Cuda(_) => 8,
            Backend::Twin(_) => 4,
        };
        let mut phases = words[..4 * bytes].chunks_exact(bytes);
        let first = phases.next();
        if phases.any(|ended| Some(ended) != first) {
            return Err(Error::RoundInFlight { channel });
        }
        Ok(())
    }

    fn write_maps(&self, changes: &[(u32, ExpertMap)]) -> Result<(), Error> {
        let parts = self.parts()?;
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        for (layer, map) in changes {
            let layers = self.shape().layers();
            let at = self.shape().map_at(*layer).ok_or(Error::NoLayer { layer: *layer, layers })?;
            maps.generation += 1;
            let table = replica_table::table(map, maps.generation);
            parts.domain.write_block(&parts.block, at, &table)?;
            maps.current[*layer as usize] = map.clone();
        }
        Ok(())
    }
}
