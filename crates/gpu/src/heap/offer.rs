//! What a rank tells its peers of its part of a heap before they can map it.

use super::Memory;
use super::surroundings::Surroundings;
use weft_fabric::bytes::{Reader, put_block};

/// Begins every offer; the last byte is the version.
const MAGIC: [u8; 4] = *b"WHP\x01";
const OFFER: u8 = 1;
const REFUSAL: u8 = 2;
/// The most of an error's text that travels.
const MAX_TEXT: usize = 2000;

/// What a rank says when a heap is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// Its part is allocated.
    Offer(Box<Offer>),
    /// It failed, and why.
    Refusal(String),
}

/// One rank's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub memory: Memory,
    /// Bytes asked for, the same at every rank.
    pub bytes: u64,
    /// Bytes of the allocation.
    pub allocated: u64,
    pub surroundings: Surroundings,
    /// All zeros for the twin.
    pub device: [u8; 16],
    pub device_name: String,
    /// Where its descriptor is fetched; empty for IPC.
    pub address: Vec<u8>,
    /// For IPC alone.
    pub handle: Option<Handle>,
}

/// A handle of the driver, for a place inside an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub handle: [u8; 64],
    pub offset: u64,
}

impl Said {
    pub fn refusal(error: &impl std::fmt::Display) -> Said {
        Said::Refusal(error.to_string().chars().take(MAX_TEXT).collect())
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        match self {
            Said::Offer(offer) => {
                out.push(OFFER);
                offer.encode(&mut out);
            }
            Said::Refusal(text) => {
                out.push(REFUSAL);
                put_block(&mut out, text.as_bytes());
            }
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Option<Said> {
        let mut reader = Reader::new(bytes);
        if reader.bytes(MAGIC.len())? != MAGIC {
            return None;
        }
        let said = match reader.u8()? {
            OFFER => Said::Offer(Box::new(Offer::decode(&mut reader)?)),
            REFUSAL => Said::Refusal(text(&mut reader)?),
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
        self.surroundings.encode(out);
        out.extend_from_slice(&self.device);
        put_block(out, self.device_name.as_bytes());
        put_block(out, &self.address);
        if let Some(Handle { handle, offset }) = &self.handle {
            out.extend_from_slice(handle);
            out.extend_from_slice(&offset.to_le_bytes());
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Offer> {
        let memory = Memory::from_number(reader.u8()?)?;
        let (bytes, allocated) = (reader.u64()?, reader.u64()?);
        let surroundings = Surroundings::decode(reader)?;
        let device = reader.bytes(16)?.try_into().ok()?;
        let device_name = text(reader)?;
        let address = reader.block()?.to_vec();
        let handle = if memory == Memory::Ipc {
            let handle = reader.bytes(64)?.try_into().ok()?;
            Some(Handle { handle, offset: reader.u64()? })
        } else {
            None
        };
        (allocated >= bytes).then_some(Offer {
            memory,
            bytes,
            allocated,
            surroundings,
            device,
            device_name,
            address,
            handle,
        })
    }

    /// What must be the same at every rank, in words.
    pub fn shape(&self) -> String {
        format!("{} bytes with memory=\"{}\"", self.bytes, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(memory: Memory) -> Said {
        let handle = (memory == Memory::Ipc).then_some(Handle { handle: [9; 64], offset: 512 });
        Said::Offer(Box::new(Offer {
            memory,
            bytes: 1000,
            allocated: 1 << 21,
            surroundings: Surroundings {
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
        }))
    }

    #[test]
    fn an_offer_survives_the_wire_and_no_part_of_it_does() {
        let all = [Memory::Fd, Memory::Ipc, Memory::Twin].map(offer);
        for said in all.iter().chain([&Said::refusal(&"no memory is left")]) {
            let mut bytes = said.encode();
            assert_eq!(Said::decode(&bytes).as_ref(), Some(said));
            for end in 0..bytes.len() {
                assert_eq!(Said::decode(&bytes[..end]), None);
            }
            bytes.push(0);
            assert_eq!(Said::decode(&bytes), None);
        }
    }

    proptest! {
        #[test]
        fn what_is_an_offer_survives_being_said_again(
            mut bytes in Just(offer(Memory::Ipc).encode()), at: prop::sample::Index, value: u8,
        ) {
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Some(said) = Said::decode(&bytes) {
                prop_assert_eq!(said.encode(), bytes);
            }
        }
    }
}
