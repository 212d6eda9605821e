//! Job: a batch with the query memory, which an executor may own.

use super::reply::Reply;
use super::tokens::{Appended, JobQuery, TokenQueue};
use crate::memory::SlotMemory;
use crate::wire::Layout;
use std::sync::Arc;

/// Slot memory for a connection. It lives until the connection's last batch has ended.
#[derive(Debug)]
pub(super) struct LinkMemory {
    /// Connection number in this node, and index.
    pub id: u64,
    pub index: usize,
    pub incoming: SlotMemory,
    pub outgoing: SlotMemory,
    pub incoming_layout: Layout,
    pub outgoing_layout: Layout,
}

/// A query's place in a job's memory.
#[derive(Clone, Copy, Debug)]
struct Place {
    memory: u32,
    slot: u32,
}

/// Batch that may run on another thread. See [`super::Executor`].
#[derive(Debug)]
pub struct Job {
    memories: Vec<Arc<LinkMemory>>,
    places: Vec<Place>,
    /// Bytes in each input, by query.
    lengths: Vec<u64>,
    replies: Vec<Reply>,
    /// Bytes in each output, by query.
    outputs: Vec<u64>,
    inputs: usize,
    /// Maximum bytes in each output.
    most: Box<[u64]>,
    tokens: Arc<TokenQueue>,
}

impl Job {
    /// Empty job with room for `queries` queries with `inputs` inputs each, whose outputs have at most `most`
    /// bytes.
    pub(super) fn with_capacity(
        queries: usize,
        inputs: usize,
        most: &[u64],
        tokens: Arc<TokenQueue>,
    ) -> Job {
        Job {
            memories: Vec::with_capacity(queries.min(16)),
            places: Vec::with_capacity(queries),
            lengths: Vec::with_capacity(queries * inputs),
            replies: Vec::with_capacity(queries),
            outputs: Vec::with_capacity(queries * most.len()),
            inputs,
            most: most.into(),
            tokens,
        }
    }

    /// Query count.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// True without queries, after all were removed.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Removes a query that has not begun; false if the job has it not.
    pub fn remove(&mut self, query: JobQuery) -> bool {
        let is_it = |place: &Place| {
            place.slot == query.slot && self.memories[place.memory as usize].id == query.link
        };
        let Some(position) = self.places.iter().position(is_it) else { return false };
        self.places.remove(position);
        self.replies.remove(position);
        self.lengths.drain(position * self.inputs..(position + 1) * self.inputs);
        let outputs = self.most.len();
        self.outputs.drain(position * outputs..(position + 1) * outputs);
        true
    }

    /// Answers all queries with an error, from 1 to `u32::MAX - 1`.
    pub fn fail(&mut self, code: u32) {
        self.replies.iter_mut().for_each(|reply| reply.fail(code));
    }

    /// Adds a query, whose outputs have maximum size.
    #[inline]
    pub(super) fn push(&mut self, memory: &Arc<LinkMemory>, slot: u32, lengths: &[u64]) {
        let known = match self.memories.last() {
            Some(last) if last.id == memory.id => Some(self.memories.len() - 1),
            _ => self.memories.iter().position(|known| known.id == memory.id),
        };
        let memory = known.unwrap_or_else(|| {
            self.memories.push(memory.clone());
            self.memories.len() - 1
        });
        self.places.push(Place { memory: memory as u32, slot });
        self.lengths.extend_from_slice(lengths);
        self.replies.push(Reply::default());
        self.outputs.extend_from_slice(&self.most);
    }

    /// Queries by connection index, number and slot, with errors and bytes in each output.
    #[inline]
    pub(super) fn answers(&self) -> impl Iterator<Item = (usize, JobQuery, u32, &[u64])> {
        self.places.iter().zip(&self.replies).enumerate().map(|(query, (place, reply))| {
            let memory = &self.memories[place.memory as usize];
            let query_of_link = JobQuery { link: memory.id, slot: place.slot };
            (memory.index, query_of_link, reply.code, self.output_bytes(query))
        })
    }

    /// Empties it for another batch.
    pub(super) fn clear(&mut self) {
        self.memories.clear();
        self.places.clear();
        self.lengths.clear();
        self.replies.clear();
        self.outputs.clear();
    }

    /// A query's connection memory and slot.
    pub(super) fn place(&self, query: usize) -> (&Arc<LinkMemory>, u32) {
        let Place { memory, slot } = self.places[query];
        (&self.memories[memory as usize], slot)
    }

    /// Memory for each connection that has queries here.
    pub(super) fn memories(&self) -> impl Iterator<Item = &LinkMemory> {
        self.memories.iter().map(|memory| &**memory)
    }

    /// Bytes in an input tensor.
    pub(super) fn input_bytes(&self, query: usize, tensor: usize) -> u64 {
        self.lengths[query * self.inputs..][..self.inputs][tensor]
    }

    /// Bytes in each of a query's outputs.
    #[inline]
    pub(super) fn output_bytes(&self, query: usize) -> &[u64] {
        &self.outputs[query * self.most.len()..][..self.most.len()]
    }

    /// Sets an output's size in bytes.
    pub(super) fn resize(&mut self, query: usize, tensor: usize, bytes: u64) {
        let outputs = self.most.len();
        self.outputs[query * outputs..][..outputs][tensor] = bytes;
    }

    pub(super) fn reply(&mut self, query: usize) -> &mut Reply {
        &mut self.replies[query]
    }

    /// Reports how many token bytes the answer to a query has so far.
    pub(super) fn report_tokens(&self, query: usize, bytes: u64) {
        let (memory, slot) = self.place(query);
        let (index, query) = (memory.index, JobQuery { link: memory.id, slot });
        self.tokens.push(Appended { index, query, bytes });
    }
}
