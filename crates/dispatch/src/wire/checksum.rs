//! Payload checksum.

/// Odd multiplier (2^64 divided by the golden ratio), so that each step is a bijection.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Running checksum: 64 bits, eight bytes a step by exclusive or, multiplication and rotation. Two payloads that differ
/// in one eight-byte group have different checksums; it detects errors, not forgery.
#[derive(Clone, Copy, Debug)]
pub struct Checksum(u64);

impl Default for Checksum {
    fn default() -> Checksum {
        Checksum(MULTIPLIER)
    }
}

impl Checksum {
    /// Adds a tensor. The checksum includes the length, so `[1]` and `[1, 0]` differ, for example.
    pub fn add(&mut self, bytes: &[u8]) {
        let (words, tail) = bytes.as_chunks::<8>();
        self.step(bytes.len() as u64);
        for word in words {
            self.step(u64::from_le_bytes(*word));
        }
        if !tail.is_empty() {
            let mut word = [0; 8];
            word[..tail.len()].copy_from_slice(tail);
            self.step(u64::from_le_bytes(word));
        }
    }

    fn step(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(MULTIPLIER).rotate_left(29);
    }

    /// The value.
    pub fn value(self) -> u64 {
        self.0
    }
}

/// Checksum over these tensors.
pub fn checksum<'a>(tensors: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut sum = Checksum::default();
    tensors.into_iter().for_each(|tensor| sum.add(tensor));
    sum.value()
}
