//! Lost peers.

use super::super::super::presence::PeerState;
use super::super::peer::VerbsPeer;
use crate::link::Sink;

/// Reports a peer as lost, once.
#[cold]
pub fn report_lost(peer: &mut VerbsPeer, why: String, sink: &mut Sink) {
    if peer.state == PeerState::Open {
        peer.state = PeerState::Lost;
        peer.park_all();
        sink.lost.push((peer.rank, why));
    }
}
