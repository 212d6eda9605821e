//! Batch: queries that run together, as a backend reads and answers them.

use super::job::Job;

/// Queries that run together, and the answers.
#[derive(Debug)]
pub struct Batch<'a> {
    pub(super) job: &'a mut Job,
}

impl<'a> Batch<'a> {
    /// A job's batch.
    pub fn of(job: &'a mut Job) -> Batch<'a> {
        Batch { job }
    }

    /// Query count.
    pub fn len(&self) -> usize {
        self.job.len()
    }

    /// True without queries; a batch that runs has at least one.
    pub fn is_empty(&self) -> bool {
        self.job.is_empty()
    }

    /// Input bytes for a query.
    ///
    /// # Panics
    /// Beyond the query or tensor count.
    pub fn input(&self, query: usize, tensor: usize) -> &[u8] {
        let (memory, slot) = self.job.place(query);
        let offset = memory.incoming_layout.offset(tensor);
        memory.incoming.read(slot, offset, self.job.input_bytes(query, tensor))
    }

    /// Output memory for a query, as long as [`Batch::resize`] set it, or maximum size; empty after [`Batch::append`].
    ///
    /// # Panics
    /// Beyond the query or tensor count.
    pub fn output(&mut self, query: usize, tensor: usize) -> &mut [u8] {
        let length = self.output_length(query, tensor);
        let (memory, slot) = self.job.place(query);
        let offset = memory.outgoing_layout.offset(tensor);
        memory.outgoing.write_in_job(slot, offset, length)
    }

    /// [`Batch::output`] size in bytes.
    pub(super) fn output_length(&mut self, query: usize, tensor: usize) -> u64 {
        let reply = self.job.reply(query);
        // Appended tokens may be in flight already.
        let is_readable = reply.appended == 0 || !reply.is_stream(tensor);
        if is_readable { self.job.output_bytes(query)[tensor] } else { 0 }
    }

    /// Sets a variable output's size; false, without effect, if the schema excludes it.
    ///
    /// # Panics
    /// Beyond the query or tensor count.
    pub fn resize(&mut self, query: usize, tensor: usize, bytes: u64) -> bool {
        let (memory, _) = self.job.place(query);
        let admits = memory.outgoing_layout.admits(tensor, bytes);
        let reply = self.job.reply(query);
        let admits = admits && (reply.appended == 0 || !reply.is_stream(tensor));
        if admits {
            self.job.resize(query, tensor, bytes);
        }
        admits
    }

    /// Appends tokens to the answer to a query; the node sends them while the batch runs. False, without effect, beyond
    /// the output's bound, for a partial token (such as 6 bytes with 4-byte tokens), and without a token output.
    ///
    /// # Panics
    /// Beyond the query count.
    pub fn append(&mut self, query: usize, tokens: &[u8]) -> bool {
        let before = self.job.reply(query).appended;
        let total = before + tokens.len() as u64;
        let (memory, slot) = self.job.place(query);
        let layout = &memory.outgoing_layout;
        let Some(stream) = layout.stream().filter(|stream| layout.admits(*stream, total)) else {
            return false;
        };
        let offset = layout.offset(stream) + before;
        memory.outgoing.write_in_job(slot, offset, tokens.len() as u64).copy_from_slice(tokens);
        self.job.reply(query).append(stream, total);
        self.job.resize(query, stream, total);
        if total > before {
            self.job.report_tokens(query, total);
        }
        true
    }

    /// Answers a query with an error, from 1 to `u32::MAX - 1`.
    ///
    /// # Panics
    /// Beyond the query count.
    pub fn fail(&mut self, query: usize, code: u32) {
        self.job.reply(query).fail(code);
    }
}
