//! Bounds-checked little-endian field reader, for bytes from other processes.

/// Reads consecutive fields; `None` at the end of the bytes.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reader at the first byte.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    /// Next `length` bytes.
    #[inline]
    pub fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.rest.split_at_checked(length)?;
        self.rest = tail;
        Some(head)
    }

    /// Next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// Next byte.
    #[inline]
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    /// Next 16 bits.
    #[inline]
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Next 32 bits.
    #[inline]
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Next 64 bits.
    #[inline]
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Byte string with a 32-bit length prefix.
    #[inline]
    pub fn block(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.bytes(length as usize)
    }

    /// Remaining bytes.
    #[inline]
    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// True once all bytes were read.
    #[inline]
    pub fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }
}

/// Appends a byte string with a 32-bit length prefix.
pub fn put_block(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}
