//! Messages between authenticated ranks (`docs/wire-format-control.md`).

use crate::view_change::View;
use crate::wire::{FrameReader, FrameWriter, MAX_PAYLOAD, Malformed};
use crate::{Cause, Operation, Poison, Rank};
use std::net::IpAddr;

/// Longest poison detail, in bytes.
const MAX_DETAIL: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Heartbeat.
    Heartbeat,
    /// Sender's part in a collective call.
    Gather { generation: u32, sequence: u64, operation: Operation, payload: Vec<u8> },
    /// Poison for a generation; the rank is one in that generation.
    Poison { generation: u32, poison: Poison },
    /// Orderly departure; the sender's last message.
    Leave,
    /// Sender's view in a view change.
    View(View),
    /// Sender's clock, returned in the pong.
    Ping(u64),
    /// Ping clock and responder clock.
    Pong { sent: u64, responded: u64 },
    /// From rank 0 during a rendezvous: ranks that have not joined.
    Missing(Vec<Rank>),
    /// From rank 0: all ranks' details, in rank order.
    Roster(Vec<RankDetails>),
    /// Point-to-point message.
    PointToPoint { generation: u32, channel: u32, payload: Vec<u8> },
    /// Point-to-point message bytes that the program at this message's sender has received.
    Acknowledge { generation: u32, bytes: u64 },
}

const HEARTBEAT: u8 = 1;
const GATHER: u8 = 2;
const POISON: u8 = 3;
const LEAVE: u8 = 4;
const VIEW: u8 = 5;
const PING: u8 = 6;
const PONG: u8 = 7;
const MISSING: u8 = 8;
const ROSTER: u8 = 9;
const POINT_TO_POINT: u8 = 10;
const ACKNOWLEDGE: u8 = 11;

impl Message {
    pub(crate) fn frame(&self) -> Vec<u8> {
        match self {
            Message::Heartbeat => FrameWriter::new(HEARTBEAT),
            Message::Gather { generation, sequence, operation, payload } => {
                let writer = FrameWriter::new(GATHER).u32(*generation).u64(*sequence);
                writer.u8(operation.code()).bytes(payload)
            }
            Message::Poison { generation, poison } => {
                let rank = poison.rank.map_or(u32::MAX, |rank| rank.0);
                let writer =
                    FrameWriter::new(POISON).u32(*generation).u8(poison.kind.code()).u32(rank);
                writer.text(&clip(&poison.detail))
            }
            Message::Leave => FrameWriter::new(LEAVE),
            Message::View(view) => {
                ranks(FrameWriter::new(VIEW).u32(view.generation), view.members.iter())
            }
            Message::Ping(sent) => FrameWriter::new(PING).u64(*sent),
            Message::Pong { sent, responded } => FrameWriter::new(PONG).u64(*sent).u64(*responded),
            Message::Missing(missing) => ranks(FrameWriter::new(MISSING), missing.iter()),
            Message::Roster(roster) => {
                (0..).zip(roster).fold(FrameWriter::new(ROSTER), |writer, (rank, details)| {
                    details.write(writer.u32(rank))
                })
            }
            Message::PointToPoint { generation, channel, payload } => {
                FrameWriter::new(POINT_TO_POINT).u32(*generation).u32(*channel).bytes(payload)
            }
            Message::Acknowledge { generation, bytes } => {
                FrameWriter::new(ACKNOWLEDGE).u32(*generation).u64(*bytes)
            }
        }
        .finish()
    }

    pub(crate) fn parse(body: &[u8]) -> Result<Message, Malformed> {
        let mut reader = FrameReader::new(body);
        let message = match reader.u8()? {
            HEARTBEAT => Message::Heartbeat,
            GATHER => {
                let (generation, sequence) = (reader.u32()?, reader.u64()?);
                let operation = Operation::from_code(reader.u8()?)
                    .ok_or(Malformed("a collective call of an unknown kind"))?;
                let payload = payload(reader)?;
                return Ok(Message::Gather { generation, sequence, operation, payload });
            }
            POISON => {
                let generation = reader.u32()?;
                let kind = Cause::from_code(reader.u8()?).ok_or(Malformed("an unknown cause"))?;
                let rank = Some(Rank(reader.u32()?)).filter(|rank| rank.0 != u32::MAX);
                let detail = clip(&reader.text()?);
                Message::Poison { generation, poison: Poison { kind, rank, detail } }
            }
            LEAVE => Message::Leave,
            VIEW => {
                let generation = reader.u32()?;
                let members = remaining_ranks(reader)?.into_iter().collect();
                return Ok(Message::View(View { generation, members }));
            }
            PING => Message::Ping(reader.u64()?),
            PONG => Message::Pong { sent: reader.u64()?, responded: reader.u64()? },
            MISSING => return Ok(Message::Missing(remaining_ranks(reader)?)),
            ROSTER => {
                let mut roster = Vec::new();
                while !reader.is_empty() {
                    if reader.u32()? as usize != roster.len() {
                        return Err(Malformed("a roster out of order"));
                    }
                    roster.push(RankDetails::read(&mut reader)?);
                }
                Message::Roster(roster)
            }
            POINT_TO_POINT => {
                let (generation, channel) = (reader.u32()?, reader.u32()?);
                let payload = payload(reader)?;
                return Ok(Message::PointToPoint { generation, channel, payload });
            }
            ACKNOWLEDGE => Message::Acknowledge { generation: reader.u32()?, bytes: reader.u64()? },
            _ => return Err(Malformed("a message of an unknown kind")),
        };
        reader.end()?;
        Ok(message)
    }
}

fn ranks<'a>(writer: FrameWriter, ranks: impl Iterator<Item = &'a Rank>) -> FrameWriter {
    ranks.fold(writer, |writer, rank| writer.u32(rank.0))
}

fn remaining_ranks(mut reader: FrameReader) -> Result<Vec<Rank>, Malformed> {
    let mut ranks = Vec::new();
    while !reader.is_empty() {
        ranks.push(Rank(reader.u32()?));
    }
    Ok(ranks)
}

/// Payload: the rest of the message.
fn payload(reader: FrameReader) -> Result<Vec<u8>, Malformed> {
    let payload = reader.rest();
    if payload.len() > MAX_PAYLOAD {
        return Err(Malformed("a payload is longer than allowed"));
    }
    Ok(payload.to_vec())
}

fn clip(detail: &str) -> String {
    detail.chars().take(MAX_DETAIL / 4).collect()
}

/// Details that a rank sends when it joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankDetails {
    pub host_id: String,
    pub pid: u32,
    pub address: IpAddr,
    /// Port at which higher ranks dial it.
    pub port: u16,
    /// Silence timeout, in milliseconds.
    pub silence: u64,
}

impl RankDetails {
    pub(crate) fn write(&self, writer: FrameWriter) -> FrameWriter {
        let writer = writer.u32(self.pid).u16(self.port).text(&self.host_id);
        writer.text(&self.address.to_string()).u64(self.silence)
    }

    pub(crate) fn read(reader: &mut FrameReader) -> Result<RankDetails, Malformed> {
        let (pid, port, host_id) = (reader.u32()?, reader.u16()?, reader.text()?);
        let address = reader.text()?.parse().map_err(|_| Malformed("not an IP address"))?;
        let silence = reader.u64()?;
        Ok(RankDetails { host_id, pid, address, port, silence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_message_survives_its_frame() {
        let address = [10, 0, 0, 1].into();
        let details =
            RankDetails { host_id: "a".into(), pid: 7, address, port: 9, silence: 15_000 };
        let poison = Poison { kind: Cause::Failed, rank: None, detail: "lane 3".into() };
        let members = [Rank(0), Rank(3)];
        for message in [
            Message::Heartbeat,
            Message::Gather {
                generation: 1,
                sequence: 2,
                operation: Operation::Share,
                payload: b"abc".to_vec(),
            },
            Message::PointToPoint { generation: 1, channel: 7, payload: b"abc".to_vec() },
            Message::PointToPoint { generation: 1, channel: u32::MAX, payload: Vec::new() },
            Message::Acknowledge { generation: 1, bytes: 1 << 40 },
            Message::Poison { generation: 3, poison: poison.clone() },
            Message::Poison { generation: 3, poison: Poison { rank: Some(Rank(2)), ..poison } },
            Message::Leave,
            Message::View(View { generation: 4, members: members.into() }),
            Message::Ping(5),
            Message::Pong { sent: 5, responded: 6 },
            Message::Missing(members.to_vec()),
            Message::Roster(vec![details.clone(), details]),
        ] {
            assert_eq!(Message::parse(&message.frame()[4..]), Ok(message));
        }
    }

    proptest! {
        #[test]
        fn point_to_point_messages_survive_their_frame(
            generation in any::<u32>(), channel in any::<u32>(), bytes in any::<u64>(),
            payload in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            for message in [
                Message::PointToPoint { generation, channel, payload: payload.clone() },
                Message::Acknowledge { generation, bytes },
            ] {
                let frame = message.frame();
                prop_assert_eq!(Message::parse(&frame[4..]), Ok(message.clone()));
                for end in 4..frame.len() {
                    prop_assert!(Message::parse(&frame[4..end]) != Ok(message.clone()));
                }
            }
        }

        #[test]
        fn garbage_never_panics(kind in 0u8..14, body in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = Message::parse(&[&[kind], body.as_slice()].concat());
        }
    }
}
