//! Fuzz targets: each parser for external bytes as a function over arbitrary bytes, for the fuzzer (`fuzz/`) and
//! the tests, never in the library. A function panics if an invariant is violated.

use crate::config::{Config, Overrides};
use crate::core::{Action, Core, Payload};
use crate::handshake::{Acceptor, AcceptorStep, Dialer, DialerStep, Identity};
use crate::member::number_members;
use crate::message::{Message, RankDetails};
use crate::pair::protocol::{PairProtocol, PendingCallbacks};
use crate::pair::stream_token::{stream_frame, stream_token};
use crate::secret::Key;
use crate::wire::{FrameParser, FrameReader, FrameWriter, MAX_UNAUTHENTICATED_FRAME};
use crate::{Error, Member, Operation, PeerStatus, Rank, Secret, WIRE_VERSIONS, nodelist};
use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::ffi::OsStrExt as _;

/// Corpus name and parser.
pub type Target = (&'static str, fn(&[u8]));

/// All targets in this crate.
pub const TARGETS: [Target; 8] = [
    ("control_frames", frames),
    ("control_handshake", handshake),
    ("control_message", message),
    ("control_core", core),
    ("control_pair", pair),
    ("control_config", config),
    ("control_nodelist", nodelist),
    ("control_secret", secret),
];

/// Frames do not depend on stream cuts, and none exceeds the limit.
pub fn frames(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let take = |parser: &mut FrameParser, frames: &mut Vec<Vec<u8>>| {
        while let Some(frame) = parser.next()? {
            assert!(frame.len() <= MAX_UNAUTHENTICATED_FRAME, "a frame beyond the limit");
            frames.push(frame);
        }
        Ok::<(), crate::wire::Malformed>(())
    };
    let read = |step: usize| {
        let (mut parser, mut frames) = (FrameParser::new(MAX_UNAUTHENTICATED_FRAME), Vec::new());
        for chunk in stream.chunks(step) {
            parser.feed(chunk);
            if take(&mut parser, &mut frames).is_err() {
                break;
            }
        }
        frames
    };
    assert_eq!(read(usize::from(*step).max(1)), read(stream.len().max(1)));
}

fn identity(rank: u32, secret: &[u8]) -> Identity {
    let secret = Secret::new(secret).ok();
    Identity {
        rank: Rank(rank),
        world_size: 2,
        key: Key::new(secret.as_ref()),
        versions: WIRE_VERSIONS,
        magic: crate::handshake::GROUP_MAGIC,
    }
}

/// Frame body with some bytes changed: position and XOR mask pairs.
fn corrupted(frame: &[u8], changes: &[u8]) -> Vec<u8> {
    let mut body = frame.get(4..).unwrap_or_default().to_vec();
    for change in changes.chunks_exact(2) {
        let at = usize::from(change[0]) % body.len().max(1);
        if let Some(byte) = body.get_mut(at) {
            *byte ^= change[1];
        }
    }
    body
}

/// A peer without the secret is never admitted, whatever it sends at any step; both ends reject frames that were
/// changed in transit.
pub fn handshake(data: &[u8]) {
    let Some((step, rest)) = data.split_first() else { return };
    let job = [7; 16];
    let mut acceptor = Acceptor::new(identity(0, b"apple"), job, false);
    let key = if step & 0x80 == 0 { b"apple" } else { b"berry" };
    let Ok((mut dialer, hello)) = Dialer::start(identity(1, key), Rank(0), None, b"me".to_vec())
    else {
        return;
    };
    if step % 4 == 0 {
        // Unauthenticated peers at both ends.
        for frame in rest.split(|byte| *byte == 0xff) {
            assert!(!matches!(acceptor.receive(frame), Ok(AcceptorStep::Authenticated { .. })));
            assert!(!matches!(dialer.receive(frame), Ok(DialerStep::Welcome(_))));
        }
        return;
    }
    let changes = |at: u8| if step % 4 == at { rest } else { &[] };
    let unchanged = |frame: &[u8], sent: &[u8]| frame.get(4..) == Some(sent);
    let sent = corrupted(&hello, changes(1));
    let mut honest = unchanged(&hello, &sent) && key == b"apple";
    let Ok(AcceptorStep::Send(challenge)) = acceptor.receive(&sent) else { return };
    let sent = corrupted(&challenge, changes(2));
    honest &= unchanged(&challenge, &sent);
    let Ok(DialerStep::Send(proof)) = dialer.receive(&sent) else { return };
    let sent = corrupted(&proof, changes(3));
    honest &= unchanged(&proof, &sent);
    let proved = matches!(acceptor.receive(&sent), Ok(AcceptorStep::Authenticated { .. }));
    assert_eq!(proved, honest, "proved, or honest, but not both");
    let Some(welcome) = acceptor.welcome() else { return };
    let sent = corrupted(&welcome, rest);
    let welcomed = dialer.receive(&sent) == Ok(DialerStep::Welcome(job));
    assert_eq!(welcomed, honest && unchanged(&welcome, &sent), "welcomed, or honest, but not both");
}

/// A parsed message has one encoding: parsing the frame returns it.
pub fn message(data: &[u8]) {
    if let Ok(message) = Message::parse(data) {
        let frame = message.frame();
        assert_eq!(Message::parse(frame.get(4..).unwrap_or_default()), Ok(message));
    }
    let mut reader = FrameReader::new(data);
    if let Ok(details) = RankDetails::read(&mut reader) {
        let frame = details.write(FrameWriter::new(0)).finish();
        let mut again = FrameReader::new(frame.get(5..).unwrap_or_default());
        assert_eq!(RankDetails::read(&mut again), Ok(details));
    }
}

/// Authenticated peers send anything in any order; stored state and responses stay bounded.
pub fn core(data: &[u8]) {
    let member = |rank: u32| Member {
        rank: Rank(rank),
        original_rank: Rank(rank),
        host_id: "h".into(),
        pid: rank,
        local_index: 0,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let mut core = Core::new(Rank(0), number_members((0..3).map(member)));
    let mut rest = data;
    while let Some(([who, length], tail)) = rest.split_first_chunk::<2>() {
        let (frame, tail) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = tail;
        match who / 4 {
            0..32 => {}
            32..36 => {
                drop(core.gather(
                    u32::from(*length) % 3,
                    Operation::AllGather,
                    Payload::Same(b"mine"),
                ));
            }
            36..38 => {
                let to_each = [b"0".to_vec(), b"1".to_vec(), b"2".to_vec()];
                let given = to_each.get(..3 - usize::from(*length) % 2).unwrap_or_default();
                drop(core.gather(
                    u32::from(*length) % 3,
                    Operation::Exchange,
                    Payload::Each(given),
                ));
            }
            38 => drop(core.post(u32::from(*length) % 3, Rank(u32::from(who % 4)), 7, b"mine")),
            39 => drop(core.take_message(u32::from(*length) % 3, Rank(u32::from(who % 4)), 7)),
            40..48 => drop(core.reform(u32::from(*length) % 3)),
            48..56 => core.reform_pause(),
            _ => {
                if let Some(Ok(formed)) = core.reform_poll() {
                    let us = formed.members.iter().any(|member| member.original_rank == Rank(0));
                    assert!(us, "agreed on a group without this rank");
                }
            }
        }
        if let Ok(message) = Message::parse(frame) {
            let _ = core.receive(Rank(1 + u32::from(who % 2)), message, 0);
        }
        let sent = core.actions.iter().filter(|action| matches!(action, Action::Send(..))).count();
        assert!(sent <= 64, "one message makes {sent}");
        core.actions.clear();
    }
}

/// The authenticated other end of a pair sends anything between this end's exchanges. At most two of its
/// parts are stored, exchanges return them in order, and the first poison stays.
pub fn pair(data: &[u8]) {
    if let Some(Ok(token)) = stream_token(data) {
        assert_eq!(stream_frame(&token).get(4..), Some(data));
    }
    let Some((rank, mut rest)) = data.split_first() else { return };
    let mut protocol = PairProtocol::new(Rank(u32::from(rank % 2)));
    let (mut callbacks, mut parts, mut poison) =
        (PendingCallbacks::default(), VecDeque::new(), None);
    while let Some(([what, length], tail)) = rest.split_first_chunk::<2>() {
        let (frame, tail) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = tail;
        match what % 8 {
            0 => drop(protocol.begin(Operation::Share, frame)),
            1 => drop(protocol.begin(Operation::Settle, frame)),
            2 | 3 => match protocol.finish() {
                Ok(None) => assert!(protocol.unfinished().is_none() || parts.is_empty()),
                Ok(Some(part)) => assert_eq!(Some(part), parts.pop_front()),
                Err(Error::CallMismatch { .. }) => drop(parts.pop_front()),
                Err(error) => panic!("an exchange fails only by the other end's call: {error}"),
            },
            _ => {
                let Ok(message) = Message::parse(frame) else { return };
                if let Message::Gather { payload, .. } = &message {
                    parts.push_back(payload.clone());
                }
                // The connection ends.
                if protocol.receive(message, &mut callbacks).is_err() {
                    return;
                }
            }
        }
        assert!(parts.len() <= 2, "{} parts are kept", parts.len());
        assert_eq!(protocol.next_part().is_some(), !parts.is_empty());
        assert!(poison.is_none() || poison == protocol.poison, "a later poison wins");
        poison = protocol.poison.clone();
        if protocol.peer != PeerStatus::Alive {
            return;
        }
    }
}

const VARIABLES: [&str; 24] = [
    "WEFT_RANK",
    "WEFT_WORLD_SIZE",
    "WEFT_LOCAL_RANK",
    "WEFT_LOCAL_WORLD_SIZE",
    "WEFT_ADDR",
    "WEFT_PORT",
    "WEFT_BIND",
    "WEFT_ADVERTISE",
    "WEFT_SECRET",
    "WEFT_HOST_ID",
    "WEFT_CONNECT_TIMEOUT",
    "WEFT_SILENCE_TIMEOUT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_NODELIST",
];

/// Environment from lines whose first bytes choose the variables. A resolved rank is below the world size.
pub fn config(data: &[u8]) {
    let lines = data.split(|byte| *byte == b'\n').filter_map(<[u8]>::split_first);
    let environment: HashMap<&str, OsString> = lines
        .map(|(name, value)| {
            let name = VARIABLES[usize::from(name.wrapping_sub(b'A')) % VARIABLES.len()];
            (name, OsStr::from_bytes(value).to_owned())
        })
        .collect();
    let found = Config::resolve(&|name| environment.get(name).cloned(), Overrides::default());
    match found {
        Ok(config) => assert!(config.rank.0 < config.world_size),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Expansion respects the limit, and a larger limit only appends hosts.
pub fn nodelist(data: &[u8]) {
    let Ok(list) = std::str::from_utf8(data) else { return };
    let some = nodelist::expand(list, 4);
    let more = nodelist::expand(list, 8);
    // Items past the limit are not checked.
    assert!(some.is_some() || more.is_none());
    let (some, more) = (some.unwrap_or_default(), more.unwrap_or_default());
    assert!(some.len() <= 4 && more.len() <= 8);
    assert!(more.is_empty() || more.starts_with(&some));
}

/// A proof is valid for its parts only.
pub fn secret(data: &[u8]) {
    let Some((cut, rest)) = data.split_first() else { return };
    let (secret, message) = rest.split_at(usize::from(*cut).min(rest.len()));
    let key = Key::new(Secret::new(secret).ok().as_ref());
    let proof = key.prove("fuzz", &[message]);
    assert!(key.verify("fuzz", &[message], &proof));
    assert!(!key.verify("fuzz", &[message, b""], &proof));
    assert!(!key.verify("fuzz", &[message], message) || message == proof);
}

#[cfg(test)]
use crate::random::SplitMix64;

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;
