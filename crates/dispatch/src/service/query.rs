//! Query on the way to a front end's thread.

use crate::front_end::Input;
use weft_fabric::Time;

/// Tensors without an allocation.
const INLINE: usize = 3;

/// Query for a [`super::FrontEndHandle`].
#[derive(Clone, Debug)]
pub struct Query {
    /// Query name in reports and cancels.
    pub token: u64,
    /// Time at which it fails unless it has ended before.
    pub deadline: Time,
    inputs: Inputs,
    /// It was cancelled or expired in the submission queue.
    pub(super) has_ended: bool,
}

#[derive(Clone, Debug)]
enum Inputs {
    Few { count: u8, inputs: [Input; INLINE] },
    Many(Box<[Input]>),
}

impl Query {
    /// Query with these tensors, in schema order. More than three take an allocation.
    #[inline]
    pub fn new(token: u64, inputs: &[Input], deadline: Time) -> Query {
        let inputs = if inputs.len() <= INLINE {
            let mut few = [Input::default(); INLINE];
            few[..inputs.len()].copy_from_slice(inputs);
            Inputs::Few { count: inputs.len() as u8, inputs: few }
        } else {
            Inputs::Many(inputs.into())
        };
        Query { token, deadline, inputs, has_ended: false }
    }

    /// Query tensors.
    #[inline]
    pub fn inputs(&self) -> &[Input] {
        match &self.inputs {
            Inputs::Few { count, inputs } => &inputs[..usize::from(*count)],
            Inputs::Many(inputs) => inputs,
        }
    }
}
