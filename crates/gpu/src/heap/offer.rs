//! Offer: describes a rank's heap part, sent to peers over the control plane.

use super::location::MemoryKind;
use super::process_identity::ProcessIdentity;
use weft_fabric::bytes::{Reader, put_block};

/// Offer prefix; the last byte is the version.
const MAGIC: [u8; 4] = *b"WHP\x02";
const OFFER: u8 = 1;
const REFUSAL: u8 = 2;
/// Error text limit, in characters.
const MAX_TEXT: usize = 2000;

/// A rank's message when a heap is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OfferMessage {
    /// Offer for the allocated part.
    Offer(Box<Offer>),
    /// Failure, with an error text.
    Refusal(String),
}

/// One rank's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub memory: MemoryKind,
    /// Requested bytes, equal on all ranks.
    pub bytes: u64,
    /// Allocation size in bytes.
    pub allocated: u64,
    pub process: ProcessIdentity,
    /// GPU UUID; zeros for the twin.
    pub device: [u8; 16],
    pub device_name: String,
    /// Descriptor's socket address; empty for IPC.
    pub address: Vec<u8>,
    /// IPC only.
    pub handle: Option<DriverHandle>,
    /// File offset of user memory, on the CPU.
    pub file_offset: Option<u64>,
}

/// Driver IPC handle, with an offset in the allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DriverHandle {
    pub handle: [u8; 64],
    pub offset: u64,
}

impl OfferMessage {
    pub fn refusal(error: &impl std::fmt::Display) -> OfferMessage {
        OfferMessage::Refusal(error.to_string().chars().take(MAX_TEXT).collect())
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        match self {
            OfferMessage::Offer(offer) => {
                out.push(OFFER);
                offer.encode(&mut out);
            }
            OfferMessage::Refusal(text) => {
                out.push(REFUSAL);
                put_block(&mut out, text.as_bytes());
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<OfferMessage> {
        let mut reader = Reader::new(bytes);
        if reader.bytes(MAGIC.len())? != MAGIC {
            return None;
        }
        let said = match reader.u8()? {
            OFFER => OfferMessage::Offer(Box::new(Offer::decode(&mut reader)?)),
            REFUSAL => OfferMessage::Refusal(text(&mut reader)?),
            _ => return None,
        };
        reader.is_at_end().then_some(said)
    }
}

fn text(reader: &mut Reader<'_>) -> Option<String> {
    Some(std::str::from_utf8(reader.block()?).ok()?.to_owned())
}

impl Offer {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.memory.number());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.allocated.to_le_bytes());
        self.process.encode(out);
        out.extend_from_slice(&self.device);
        put_block(out, self.device_name.as_bytes());
        put_block(out, &self.address);
        out.push(self.file_offset.is_some().into());
        out.extend_from_slice(&self.file_offset.unwrap_or(0).to_le_bytes());
        if let Some(DriverHandle { handle, offset }) = &self.handle {
            out.extend_from_slice(handle);
            out.extend_from_slice(&offset.to_le_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Offer> {
        let memory = MemoryKind::from_number(reader.u8()?)?;
        let (bytes, allocated) = (reader.u64()?, reader.u64()?);
        let process = ProcessIdentity::decode(reader)?;
        let device = reader.bytes(16)?.try_into().ok()?;
        let device_name = text(reader)?;
        let address = reader.block()?.to_vec();
        let (has_file, offset) = (reader.u8()?, reader.u64()?);
        let file_offset = match has_file {
            0 if offset == 0 => None,
            1 => Some(offset),
            _ => return None,
        };
        let handle = if memory == MemoryKind::Ipc {
            let handle = reader.bytes(64)?.try_into().ok()?;
            Some(DriverHandle { handle, offset: reader.u64()? })
        } else {
            None
        };
        (allocated >= bytes).then_some(Offer {
            memory,
            bytes,
            allocated,
            process,
            device,
            device_name,
            address,
            handle,
            file_offset,
        })
    }

    /// Text with the properties that must be equal on all ranks.
    pub fn shape(&self) -> String {
        let whose = if self.file_offset.is_some() { " of the user's" } else { "" };
        format!("{} bytes{whose} with memory=\"{}\"", self.bytes, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(memory: MemoryKind) -> OfferMessage {
        let handle =
            (memory == MemoryKind::Ipc).then_some(DriverHandle { handle: [9; 64], offset: 512 });
        OfferMessage::Offer(Box::new(Offer {
            memory,
            bytes: 1000,
            allocated: 1 << 21,
            process: ProcessIdentity {
                boot: "boot".into(),
                network: "net:[1]".into(),
                processes: "pid:[1]".into(),
                user: 3,
                process: 4,
            },
            device: *b"sixteen bytes id",
            device_name: "a GPU".into(),
            address: vec![1, 2, 3],
            handle,
            file_offset: (memory == MemoryKind::Twin).then_some(4096),
        }))
    }

    #[test]
    fn an_offer_round_trips_and_its_prefixes_are_rejected() {
        let all = [MemoryKind::Fd, MemoryKind::Ipc, MemoryKind::Twin].map(offer);
        for said in all.iter().chain([&OfferMessage::refusal(&"no memory is left")]) {
            let mut bytes = said.encode();
            assert_eq!(OfferMessage::decode(&bytes).as_ref(), Some(said));
            for end in 0..bytes.len() {
                assert_eq!(OfferMessage::decode(&bytes[..end]), None);
            }
            bytes.push(0);
            assert_eq!(OfferMessage::decode(&bytes), None);
        }
    }

    proptest! {
        #[test]
        fn decoded_offers_encode_to_the_same_bytes(
            mut bytes in Just(offer(MemoryKind::Ipc).encode()), at: prop::sample::Index, value: u8,
        ) {
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Some(said) = OfferMessage::decode(&bytes) {
                prop_assert_eq!(said.encode(), bytes);
            }
        }
    }
}
