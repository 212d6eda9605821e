//! Lost peers, and the errors that mean one.

use super::super::super::presence::PeerState;
use super::super::peer::OfiPeer;
use crate::link::Sink;

/// Reports a peer as lost, once.
#[cold]
pub fn report_lost(peer: &mut OfiPeer, why: String, sink: &mut Sink) {
    if peer.state == PeerState::Open {
        peer.state = PeerState::Lost;
        sink.lost.push((peer.rank, why));
    }
}

/// True for errors that end a connection; others concern one write.
pub fn is_loss(error: i32) -> bool {
    [
        libc::ECONNRESET,
        libc::ECONNREFUSED,
        libc::ECONNABORTED,
        libc::EPIPE,
        libc::ENOTCONN,
        libc::ETIMEDOUT,
        libc::EHOSTUNREACH,
        libc::EHOSTDOWN,
        libc::ENETUNREACH,
        libc::ENETDOWN,
        libc::ESHUTDOWN,
        libc::ECANCELED,
        libc::EIO,
    ]
    .contains(&error)
}
