//! Backend reply to one query.

/// Reply to one query, without output sizes, which are in the job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reply {
    /// Error, or 0.
    pub code: u32,
    /// Token output that was appended to, and the byte count.
    stream: u8,
    pub appended: u64,
}

impl Reply {
    /// Replaces it by an error, from 1 to `u32::MAX - 1`.
    pub fn fail(&mut self, code: u32) {
        self.code = code.clamp(1, u32::MAX - 1);
    }

    /// True for the token output, after an append.
    pub fn is_stream(&self, tensor: usize) -> bool {
        self.appended > 0 && usize::from(self.stream) == tensor
    }

    /// Enters appended token bytes.
    pub fn append(&mut self, tensor: usize, bytes: u64) {
        (self.stream, self.appended) = (tensor as u8, bytes);
    }
}
