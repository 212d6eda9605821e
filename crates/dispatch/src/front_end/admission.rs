//! Admission: query validation by schema and memory, without front end state.

use crate::error::{Error, Result};
use crate::wire::{Layout, Schema};
use std::sync::Arc;
use weft_fabric::Memory;

/// Query tensor: bytes in a memory that was given to [`FrontEnd::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Input {
    /// Memory index.
    pub memory: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Query schema, and memory lengths for a front end.
#[derive(Debug)]
pub(crate) struct Admission {
    pub schema: Schema,
    layout: Layout,
    lengths: Box<[u64]>,
}

impl Admission {
    /// Admission by a schema that has passed [`Schema::check`].
    pub fn new(schema: Schema, memories: &[Arc<Memory>]) -> Admission {
        let layout = Layout::new(&schema.inputs);
        let lengths = memories.iter().map(|memory| memory.len() as u64).collect();
        Admission { schema, layout, lengths }
    }

    /// Checks a query's tensors.
    ///
    /// # Errors
    /// [`Error::Query`], which names the tensor.
    #[inline]
    pub fn check(&self, inputs: &[Input]) -> Result<()> {
        let width = self.schema.inputs.len();
        if inputs.len() != width {
            let detail = format!("{} tensors: expected {width}", inputs.len());
            return Err(Error::Query { detail });
        }
        for (tensor, input) in inputs.iter().enumerate() {
            let length = self.lengths.get(input.memory as usize);
            let end = input.offset.checked_add(input.length);
            let inside = length.zip(end).is_some_and(|(length, end)| end <= *length);
            if !inside || !self.layout.admits(tensor, input.length) {
                return Err(self.refuse(tensor, input));
            }
        }
        Ok(())
    }

    #[cold]
    fn refuse(&self, tensor: usize, input: &Input) -> Error {
        let Input { memory, offset, length } = input;
        let detail = match self.lengths.get(*memory as usize) {
            None => {
                format!("memory {memory}: expected 0 to {}", self.lengths.len().saturating_sub(1))
            }
            Some(_) if !self.layout.admits(tensor, *length) => {
                format!("{length} bytes of {}", self.schema.inputs[tensor])
            }
            Some(known) => {
                format!("{length} bytes at {offset} of memory {memory}, which has {known}")
            }
        };
        Error::Query { detail }
    }
}
