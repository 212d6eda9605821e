//! Introduces an engine to the peers, and chooses routes.

use super::route::{PostPath, Route};
use super::state::Engine;
use crate::descriptor::EngineAddress;
use crate::error::{Error, Result};
use crate::link::{Introduction, RouteRule};
use crate::local::WaitLimit;
use weft_control::Rank;

impl Engine {
    /// Resolves a route to every peer and makes an introduction. `addresses` holds every rank's
    /// [`Engine::address`], in rank order. Returns a message for each rank, empty for this one; the
    /// peers' messages for this rank go into [`Engine::connect`].
    ///
    /// # Errors
    /// [`Error::NoRoute`] if no link reaches a peer.
    pub fn introduce(&mut self, addresses: &[EngineAddress]) -> Result<Vec<Vec<u8>>> {
        if addresses.len() != self.peers.len() {
            return Err(Error::Unknown { what: "rank", number: addresses.len() as u64 });
        }
        let mut messages = vec![Vec::new(); addresses.len()];
        for (number, address) in addresses.iter().enumerate() {
            if number as u32 == self.rank.0 {
                continue;
            }
            let peer = Rank(number as u32);
            let (route, path, entry) = self.resolve(peer, address)?;
            messages[number] = self.links[route.index].introduce(peer, entry)?;
            self.peers[number].route = Some(route);
            self.peers[number].path = Some(path);
        }
        Ok(messages)
    }

    /// Connects every peer. `addresses` are the same as in [`Engine::introduce`], `messages` each rank's
    /// `introduce` result for this one, in rank order. Collective.
    ///
    /// # Errors
    /// [`Error::Connect`], also after the deadline; the error from [`WaitLimit::give_up`].
    pub fn connect(
        &mut self,
        addresses: &[EngineAddress],
        messages: &[Vec<u8>],
        limit: &mut WaitLimit<'_>,
    ) -> Result<()> {
        if addresses.len() != self.peers.len() || messages.len() != self.peers.len() {
            return Err(Error::Unknown { what: "rank", number: messages.len() as u64 });
        }
        for (index, link) in self.links.iter_mut().enumerate() {
            let kind = link.kind();
            let routed = (0..self.peers.len())
                .filter(|&rank| self.peers[rank].route.is_some_and(|route| route.index == index));
            let peers: Vec<Introduction<'_>> = routed
                .map(|rank| Introduction {
                    peer: Rank(rank as u32),
                    address: addresses[rank].of(kind).unwrap_or_default(),
                    message: &messages[rank],
                })
                .collect();
            link.connect(&peers, limit)?;
            while let Some(inner) = link.take_inner() {
                *link = inner;
            }
            if !peers.is_empty() {
                self.wake_sources.watch(link.descriptors())?;
            }
        }
        Ok(())
    }

    /// First link, in [`ProviderKind`] order, that reaches the peer.
    fn resolve<'a>(
        &self,
        peer: Rank,
        address: &'a EngineAddress,
    ) -> Result<(Route, PostPath, &'a [u8])> {
        for (index, link) in self.links.iter().enumerate() {
            let provider = link.kind();
            let Some(entry) = address.of(provider) else { continue };
            if let Some(rule) = link.route(entry) {
                let RouteRule { parts, ordered, inline, max_unconsumed, max_piggyback, mapped } =
                    rule;
                let (single_pages, single_bytes) = parts.single();
                let path = PostPath {
                    link: index as u16,
                    inline,
                    single_pages,
                    single_bytes,
                    max_piggyback,
                };
                let route = Route { provider, parts, ordered, max_unconsumed, mapped, index };
                return Ok((route, path, entry));
            }
        }
        let names = |names: Vec<String>| {
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        let here = self.links.iter().map(|link| link.describe(&link.address()));
        let there = address.providers.iter().map(|(kind, entry)| {
            let link = self.links.iter().find(|link| link.kind() == *kind);
            link.map_or_else(|| kind.name().to_owned(), |link| link.describe(entry))
        });
        Err(Error::NoRoute { peer, here: names(here.collect()), there: names(there.collect()) })
    }
}
