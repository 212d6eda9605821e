//! Peer groups: scatters to peers resolved once.
//!
//! A scatter over a peer group patches offsets and lengths; routes, keys and region lengths are resolved
//! when the group is made, and again after the engine has released a region or a counter. Each scatter
//! validates each member's round.

use super::counters::{self, Counter};
use super::region::{Region, RemoteRegion, WeakRegion, is_inside};
use super::route::PostPath;
use super::state::Engine;
use super::unique_id::UniqueId;
use crate::error::{Error, Result};
use crate::link::ScatterPart;
use crate::request::{CompletionCallback, Request, RequestTag};
use crate::types::{CounterId, Page, RequestId};

/// One write of a peer group scatter: a slice of the group's source and a destination in the member's
/// region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberWrite {
    /// Member index in the group.
    pub member: u32,
    /// First byte read.
    pub source_offset: u64,
    /// First byte written.
    pub destination_offset: u64,
    /// Bytes; a signal if zero.
    pub length: u64,
}

/// A counter, a source region and a region at each of several peers ([`Engine::peer_group`]), for example
/// at all other ranks of an MoE dispatch.
#[derive(Debug)]
pub struct PeerGroup {
    counter: CounterId,
    source: WeakRegion,
    source_length: u64,
    members: Vec<ResolvedMember>,
    /// Parts of the scatter being submitted.
    parts: Vec<ScatterPart>,
    /// The engine that it belongs to.
    engine: UniqueId,
    /// Engine version when the members were last resolved.
    stamp: UniqueId,
}

#[derive(Clone, Copy, Debug)]
struct ResolvedMember {
    destination: RemoteRegion,
    link: u16,
    /// Bytes up to which a write is certainly one part.
    single_bytes: u64,
}

impl PeerGroup {
    /// Members, in order: a peer and the region there.
    pub fn members(&self) -> impl ExactSizeIterator<Item = RemoteRegion> {
        self.members.iter().map(|member| member.destination)
    }
}

impl Engine {
    /// Resolves counter, source and destinations for [`Engine::scatter_group`]. A peer may appear as
    /// several members, each with a region.
    ///
    /// # Errors
    /// [`Error::Unknown`] for a peer, a region or a counter that the engine lacks;
    /// [`Error::NotLinked`]; [`Error::Unusable`] if a member's link cannot read the source.
    pub fn peer_group(
        &mut self,
        counter: CounterId,
        source: &Region,
        destinations: &[RemoteRegion],
    ) -> Result<PeerGroup> {
        let unresolved =
            |&destination: &RemoteRegion| ResolvedMember { destination, link: 0, single_bytes: 0 };
        let mut group = PeerGroup {
            counter,
            source: source.downgrade(),
            source_length: source.memory().len() as u64,
            members: destinations.iter().map(unresolved).collect(),
            parts: Vec::with_capacity(destinations.len()),
            engine: self.id,
            stamp: self.stamp,
        };
        self.resolve_group(&mut group)?;
        Ok(group)
    }

    #[cold]
    #[inline(never)]
    fn resolve_group(&mut self, group: &mut PeerGroup) -> Result<()> {
        if group.engine != self.id {
            return Err(Error::Unknown { what: "peer group", number: group.engine.0 });
        }
        if !self.is_registered(&group.source) {
            return Err(Error::Unknown { what: "region", number: group.source.key().0.into() });
        }
        for member in &mut group.members {
            let RemoteRegion { peer, key, length } = member.destination;
            self.check_peer(peer)?;
            self.remote(group.counter, peer)?;
            let (source, destination) = (group.source.key(), key);
            let (source_offset, destination_offset) = (0, length);
            let end = Page { source, source_offset, destination, destination_offset, length: 0 };
            self.check_page(peer, &end)?;
            if let Some(PostPath { link, single_bytes, .. }) = self.peers[peer.index()].path {
                (member.link, member.single_bytes) = (link, single_bytes);
            }
        }
        group.stamp = self.stamp;
        Ok(())
    }

    /// [`Engine::scatter`] over a peer group: several members' writes under one request, in one round.
    ///
    /// # Errors
    /// Same as [`Engine::scatter`]; [`Error::Unknown`] for a member that the group lacks, and for a group
    /// from another engine. No member was written to then.
    pub fn scatter_group(
        &mut self,
        group: &mut PeerGroup,
        round: u64,
        writes: &[MemberWrite],
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        self.scatter_members(group, |_| round, writes, done)
    }

    /// [`Engine::scatter_group`] in the next round toward each member ([`Engine::next_round`]). Several
    /// writes to one peer belong to one round.
    ///
    /// # Errors
    /// Same as [`Engine::scatter_group`].
    pub fn scatter_group_next(
        &mut self,
        group: &mut PeerGroup,
        writes: &[MemberWrite],
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        let mut next = |write: &MemberWrite| match group.members.get(write.member as usize) {
            Some(member) => self.next_round(group.counter, member.destination.peer),
            None => Err(unknown_member(write)),
        };
        let rounds: Vec<u64> = writes.iter().map(&mut next).collect::<Result<_>>()?;
        self.scatter_members(group, |write| rounds[write], writes, done)
    }

    #[inline(always)]
    fn scatter_members(
        &mut self,
        group: &mut PeerGroup,
        round_of: impl Fn(usize) -> u64,
        writes: &[MemberWrite],
        done: Option<CompletionCallback>,
    ) -> Result<RequestId> {
        self.check()?;
        if group.stamp != self.stamp {
            self.resolve_group(group)?;
        }
        self.check_room()?;
        if !self.admit_members(group, &round_of, writes) {
            return Err(self.refused_member(group, &round_of, writes));
        }
        let (id, request) = self.requests.open(RequestTag::CALLER, Request::SEVERAL);
        request.call_at_end(done);
        let PeerGroup { counter, parts, .. } = group;
        Ok(self.post_admitted(id, *counter, round_of, &mut parts[..writes.len()], &[]))
    }

    /// Validates every write in a scatter, and fills the group's parts.
    #[inline(never)]
    fn admit_members(
        &mut self,
        group: &mut PeerGroup,
        round_of: impl Fn(usize) -> u64,
        writes: &[MemberWrite],
    ) -> bool {
        let Engine { counters, lanes, .. } = self;
        let PeerGroup { counter, source, source_length, members, parts, .. } = group;
        if parts.len() < writes.len() {
            parts.resize(writes.len(), ScatterPart::EMPTY);
        }
        let Some(Counter { ends, .. }) = counters::get(counters, *counter) else { return false };
        let (ends, members) = (ends.as_mut_slice(), members.as_slice());
        let (source, source_length, lanes) = (source.key(), *source_length, &**lanes);
        for (index, (write, part)) in writes.iter().zip(parts).enumerate() {
            let MemberWrite { member, source_offset, destination_offset, length } = *write;
            let Some(member) = members.get(member as usize) else { return false };
            let ResolvedMember { destination: region, link, single_bytes } = *member;
            let Some(Some(end)) = ends.get_mut(region.peer.index()) else { return false };
            let Some(started) = end.remote.as_ref().map(|remote| remote.started) else {
                return false;
            };
            if !is_inside(source_offset, length, source_length)
                || !is_inside(destination_offset, length, region.length)
                || !end.is_open(lanes, round_of(index), started)
            {
                return false;
            }
            let RemoteRegion { peer, key: destination, .. } = region;
            let link = if length <= single_bytes { link } else { ScatterPart::NO_LINK };
            let page = Page { source, source_offset, destination, destination_offset, length };
            *part = ScatterPart { peer, link, page, ..ScatterPart::EMPTY };
        }
        true
    }

    /// Error for a rejected scatter.
    #[cold]
    #[inline(never)]
    fn refused_member(
        &mut self,
        group: &mut PeerGroup,
        round_of: impl Fn(usize) -> u64,
        writes: &[MemberWrite],
    ) -> Error {
        for (index, write) in writes.iter().enumerate() {
            let Some(&ResolvedMember { destination: region, .. }) =
                group.members.get(write.member as usize)
            else {
                return unknown_member(write);
            };
            let round = round_of(index);
            if !self.admit_members(group, |_| round, &writes[index..=index]) {
                let MemberWrite { source_offset, destination_offset, length, .. } = *write;
                let (source, destination) = (group.source.key(), region.key);
                let page = Page { source, source_offset, destination, destination_offset, length };
                return self.refused(region.peer, group.counter, round, &[page]);
            }
        }
        Error::NotLinked { counter: group.counter }
    }
}

#[cold]
fn unknown_member(write: &MemberWrite) -> Error {
    Error::Unknown { what: "member of the peer group", number: write.member.into() }
}
