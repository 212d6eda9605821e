//! What takes bytes from outside, each as a function of any bytes: for the fuzzer (`fuzz/`) and the
//! tests, never part of the library. A function panics if a promise was broken.

use crate::config::{Config, Overrides};
use crate::core::{Action, Core, Payload};
use crate::handshake::{Acceptor, AcceptorStep, Dialer, DialerStep, Identity};
use crate::member::number;
use crate::message::{Details, Message};
use crate::pair::protocol::{News, Protocol};
use crate::pair::{stream_frame, stream_token};
use crate::secret::Key;
use crate::wire::{MAX_UNPROVED_FRAME, Parser, Reader, Writer};
use crate::{Error, Member, Operation, PeerStatus, Rank, Secret, WIRE_VERSIONS, nodelist};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

/// A parser of bytes from outside, and what its corpus is called.
pub type Target = (&'static str, fn(&[u8]));

/// Every target of this crate.
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

/// A stream of bytes gives the same frames however it is cut, none longer than allowed.
pub fn frames(data: &[u8]) {
    let Some((step, stream)) = data.split_first() else { return };
    let take = |parser: &mut Parser, frames: &mut Vec<Vec<u8>>| {
        while let Some(frame) = parser.next()? {
            assert!(frame.len() <= MAX_UNPROVED_FRAME, "a frame beyond the limit");
            frames.push(frame);
        }
        Ok::<(), crate::wire::Malformed>(())
    };
    let read = |step: usize| {
        let (mut parser, mut frames) = (Parser::new(MAX_UNPROVED_FRAME), Vec::new());
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

/// The body of a frame, with bytes exchanged: `(place, change)` pairs.
fn disturbed(frame: &[u8], changes: &[u8]) -> Vec<u8> {
    let mut body = frame.get(4..).unwrap_or_default().to_vec();
    for change in changes.chunks_exact(2) {
        let at = usize::from(change[0]) % body.len().max(1);
        if let Some(byte) = body.get_mut(at) {
            *byte ^= change[1];
        }
    }
    body
}

/// Whoever does not hold the secret is never let in, whatever it says at whichever step; and what was
/// changed on its way is refused by both ends.
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
        // A stranger at both ends.
        for frame in rest.split(|byte| *byte == 0xff) {
            assert!(!matches!(acceptor.receive(frame), Ok(AcceptorStep::Proved { .. })));
            assert!(!matches!(dialer.receive(frame), Ok(DialerStep::Welcome(_))));
        }
        return;
    }
    let changes = |at: u8| if step % 4 == at { rest } else { &[] };
    let untouched = |frame: &[u8], said: &[u8]| frame.get(4..) == Some(said);
    let said = disturbed(&hello, changes(1));
    let mut honest = untouched(&hello, &said) && key == b"apple";
    let Ok(AcceptorStep::Send(challenge)) = acceptor.receive(&said) else { return };
    let said = disturbed(&challenge, changes(2));
    honest &= untouched(&challenge, &said);
    let Ok(DialerStep::Send(proof)) = dialer.receive(&said) else { return };
    let said = disturbed(&proof, changes(3));
    honest &= untouched(&proof, &said);
    let proved = matches!(acceptor.receive(&said), Ok(AcceptorStep::Proved { .. }));
    assert_eq!(proved, honest, "proved, or honest, but not both");
    let Some(welcome) = acceptor.welcome() else { return };
    let said = disturbed(&welcome, rest);
    let welcomed = dialer.receive(&said) == Ok(DialerStep::Welcome(job));
    assert_eq!(welcomed, honest && untouched(&welcome, &said), "welcomed, or honest, but not both");
}

/// What is a message has one meaning: it survives being said again.
pub fn message(data: &[u8]) {
    if let Ok(message) = Message::parse(data) {
        let frame = message.frame();
        assert_eq!(Message::parse(frame.get(4..).unwrap_or_default()), Ok(message));
    }
    let mut reader = Reader::new(data);
    if let Ok(details) = Details::read(&mut reader) {
        let frame = details.write(Writer::new(0)).finish();
        let mut again = Reader::new(frame.get(5..).unwrap_or_default());
        assert_eq!(Details::read(&mut again), Ok(details));
    }
}

/// Peers that have proved themselves say anything, in any order; what is kept of it stays bounded.
pub fn core(data: &[u8]) {
    let member = |rank: u32| Member {
        rank: Rank(rank),
        original_rank: Rank(rank),
        host_id: "h".into(),
        pid: rank,
        local_index: 0,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let mut core = Core::new(Rank(0), number((0..3).map(member)));
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
            39 => drop(core.take(u32::from(*length) % 3, Rank(u32::from(who % 4)), 7)),
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

/// The other end of a pair has proved itself and sends anything, between the exchanges of this end. At most two
/// of its parts are kept, exchanges return them in their order, and the first poison stays.
pub fn pair(data: &[u8]) {
    if let Some(Ok(token)) = stream_token(data) {
        assert_eq!(stream_frame(&token).get(4..), Some(data));
    }
    let Some((rank, mut rest)) = data.split_first() else { return };
    let mut protocol = Protocol::new(Rank(u32::from(rank % 2)));
    let (mut news, mut parts, mut poison) = (News::default(), VecDeque::new(), None);
    while let Some(([what, length], tail)) = rest.split_first_chunk::<2>() {
        let (frame, tail) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = tail;
        match what % 8 {
            0 => drop(protocol.begin(Operation::Share, frame)),
            1 => drop(protocol.begin(Operation::Settle, frame)),
            2 | 3 => match protocol.finish() {
                Ok(None) => assert!(protocol.begun().is_none() || parts.is_empty()),
                Ok(Some(part)) => assert_eq!(Some(part), parts.pop_front()),
                Err(Error::OtherCall { .. }) => drop(parts.pop_front()),
                Err(error) => panic!("an exchange fails only by the other end's call: {error}"),
            },
            _ => {
                let Ok(message) = Message::parse(frame) else { return };
                if let Message::Gather { payload, .. } = &message {
                    parts.push_back(payload.clone());
                }
                // The connection ends.
                if protocol.receive(message, &mut news).is_err() {
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

/// An environment of lines, the first byte of each choosing the variable. A place that was found is
/// one that exists.
pub fn config(data: &[u8]) {
    let lines = data.split(|byte| *byte == b'\n').filter_map(<[u8]>::split_first);
    let environment: HashMap<&str, String> = lines
        .map(|(name, value)| {
            let name = VARIABLES[usize::from(name.wrapping_sub(b'A')) % VARIABLES.len()];
            (name, String::from_utf8_lossy(value).into_owned())
        })
        .collect();
    let found = Config::resolve(&|name| environment.get(name).cloned(), Overrides::default());
    match found {
        Ok(config) => assert!(config.rank.0 < config.world_size),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A list gives no more hosts than asked for, and the first ones of a longer list.
pub fn nodelist(data: &[u8]) {
    let Ok(list) = std::str::from_utf8(data) else { return };
    let some = nodelist::expand(list, 4);
    let more = nodelist::expand(list, 8);
    // What lies past the limit is not looked at.
    assert!(some.is_some() || more.is_none());
    let (some, more) = (some.unwrap_or_default(), more.unwrap_or_default());
    assert!(some.len() <= 4 && more.len() <= 8);
    assert!(more.is_empty() || more.starts_with(&some));
}

/// A proof of anything holds for that alone.
pub fn secret(data: &[u8]) {
    let Some((cut, rest)) = data.split_first() else { return };
    let (secret, said) = rest.split_at(usize::from(*cut).min(rest.len()));
    let key = Key::new(Secret::new(secret).ok().as_ref());
    let proof = key.prove("fuzz", &[said]);
    assert!(key.verify("fuzz", &[said], &proof));
    assert!(!key.verify("fuzz", &[said, b""], &proof));
    assert!(!key.verify("fuzz", &[said], said) || said == proof);
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;
