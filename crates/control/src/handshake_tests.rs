//! Handshake tests: outcomes, refusals, replay, and changed bits.

use super::*;
use crate::{Secret, WIRE_VERSIONS};
use proptest::prelude::*;

fn identity(rank: u32) -> Identity {
    let key = Key::new(Some(&Secret::new("apple").unwrap()));
    Identity { rank: Rank(rank), world_size: 4, key, versions: WIRE_VERSIONS, magic: GROUP_MAGIC }
}

const JOB: JobId = [7; 16];

/// Runs both sides against each other; returns the dialer's outcome and frames.
fn handshake(
    dialer: Identity,
    acceptor: Identity,
) -> (Result<DialerStep, HandshakeError>, Vec<Vec<u8>>) {
    let mut acceptor = Acceptor::new(acceptor, JOB, false);
    let (mut dialer, hello) = Dialer::start(dialer, Rank(0), None, b"here".to_vec()).unwrap();
    let mut sent = vec![hello];
    loop {
        let response = match acceptor.receive(&sent.last().unwrap()[4..]) {
            Ok(AcceptorStep::Send(frame)) => frame,
            Ok(AcceptorStep::Authenticated { rank, details }) => {
                assert_eq!((rank, details.as_slice()), (Rank(3), b"here".as_slice()));
                acceptor.welcome().unwrap()
            }
            Err(HandshakeError::Reject(refusal)) => refusal.frame(),
            Err(other) => panic!("{other:?}"),
        };
        match dialer.receive(&response[4..]) {
            Ok(DialerStep::Send(frame)) => sent.push(frame),
            end => return (end, sent),
        }
    }
}

#[test]
fn sides_with_one_secret_settle_on_the_job() {
    assert_eq!(handshake(identity(3), identity(0)).0, Ok(DialerStep::Welcome(JOB)));
}

#[test]
fn a_refusal_carries_the_user_of_the_refusing_side() {
    let (mut dialer, _) = Dialer::start(identity(3), Rank(0), None, Vec::new()).unwrap();
    let refusal = Refusal::OtherUser(1000);
    assert_eq!(dialer.receive(&refusal.frame()[4..]), Err(HandshakeError::Rejected(refusal)));
}

#[test]
fn every_refusal_reaches_the_dialer() {
    let other_secret = Identity { key: Key::new(None), ..identity(3) };
    assert_eq!(
        handshake(other_secret, identity(0)).0,
        Err(HandshakeError::Rejected(Refusal::WrongSecret))
    );
    let other_size = Identity { world_size: 5, ..identity(3) };
    assert_eq!(
        handshake(other_size, identity(0)).0,
        Err(HandshakeError::Rejected(Refusal::WorldSize(4)))
    );
    let newer = Identity { versions: (8, 9), ..identity(3) };
    assert_eq!(
        handshake(newer, identity(0)).0,
        Err(HandshakeError::Rejected(Refusal::Version(WIRE_VERSIONS.1)))
    );
    assert_eq!(
        handshake(identity(3), identity(2)).0,
        Err(HandshakeError::Rejected(Refusal::NotExpected)),
        "the hello was for rank 0"
    );
}

#[test]
fn the_newest_common_version_is_taken() {
    let both = |versions| Identity { versions, ..identity(3) };
    let acceptor = Identity { versions: (2, 5), ..identity(0) };
    assert_eq!(handshake(both((1, 3)), acceptor.clone()).0, Ok(DialerStep::Welcome(JOB)));
    assert_eq!(
        handshake(both((1, 1)), acceptor).0,
        Err(HandshakeError::Rejected(Refusal::Version(5)))
    );
}

#[test]
fn a_recorded_handshake_is_refused() {
    let (_, recorded) = handshake(identity(3), identity(0));
    let mut acceptor = Acceptor::new(identity(0), JOB, false);
    assert!(matches!(acceptor.receive(&recorded[0][4..]), Ok(AcceptorStep::Send(_))));
    assert_eq!(
        acceptor.receive(&recorded[1][4..]),
        Err(HandshakeError::Reject(Refusal::WrongSecret))
    );
    assert_eq!(acceptor.welcome(), None);
}

#[test]
fn an_acceptor_without_the_secret_is_detected() {
    let mut acceptor = Acceptor::new(identity(0), JOB, false);
    let (mut dialer, hello) = Dialer::start(identity(3), Rank(0), None, Vec::new()).unwrap();
    let Ok(AcceptorStep::Send(challenge)) = acceptor.receive(&hello[4..]) else { panic!() };
    assert!(matches!(dialer.receive(&challenge[4..]), Ok(DialerStep::Send(_))));
    let forged = FrameWriter::new(WELCOME).bytes(&JOB).bytes(&[0; PROOF_BYTES]).finish();
    assert_eq!(dialer.receive(&forged[4..]), Err(HandshakeError::Rejected(Refusal::WrongSecret)));
}

#[test]
fn a_rank_of_another_job_is_not_expected() {
    let mut acceptor = Acceptor::new(identity(0), JOB, true);
    let (_, hello) = Dialer::start(identity(3), Rank(0), Some([8; 16]), Vec::new()).unwrap();
    assert_eq!(acceptor.receive(&hello[4..]), Err(HandshakeError::Reject(Refusal::NotExpected)));
}

proptest! {
    #[test]
    fn garbage_never_panics(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..120), 1..4), kind in 0x80u8..0x85) {
        let mut acceptor = Acceptor::new(identity(0), JOB, false);
        let (mut dialer, _) = Dialer::start(identity(3), Rank(0), None, Vec::new()).unwrap();
        for mut frame in frames {
            frame.insert(0, kind);
            let _ = acceptor.receive(&frame);
            let _ = dialer.receive(&frame);
        }
    }

    #[test]
    fn a_changed_bit_anywhere_is_refused(bit in 0usize..8 * 140) {
        let mut acceptor = Acceptor::new(identity(0), JOB, false);
        let (mut dialer, mut hello) = Dialer::start(identity(3), Rank(0), None, b"here".to_vec()).unwrap();
        let at = 4 + bit / 8;
        if at < hello.len() {
            hello[at] ^= 1 << (bit % 8);
        }
        let Ok(AcceptorStep::Send(challenge)) = acceptor.receive(&hello[4..]) else { return Ok(()) };
        let Ok(DialerStep::Send(mut proof)) = dialer.receive(&challenge[4..]) else { return Ok(()) };
        if at >= hello.len() {
            let at = (at - hello.len() + 5) % proof.len();
            proof[at.max(4)] ^= 1 << (bit % 8);
        }
        prop_assert!(acceptor.receive(&proof[4..]).is_err());
    }
}
