//! MoE dispatch and combine for `weft.moe`.

use crate::choices::choose;
use crate::communicator::Communicator;
use crate::errors::{Error, raise};
use crate::fork;
use crate::memory::{View, lent};
use crate::numbers::{
    Block, Channels, Experts, Hidden, MaxBytes, MaxReceiveRows, MaxTokens, PadTo, PrivateRows, TopK,
};
use crate::shared::{Shared, deadline};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard};
use weft_fabric::Region;
use weft_moe::{
    AllToAll as Moe, Area, BlockScaled, CombineMode, Config, DType, Float8, Layout, RoundHandle,
    Rows, RowsMut, ScaleType, Shape, TokenInput, TokenType, Weighting,
};

/// A round whose handle Python holds.
struct Round {
    handle: RoundHandle,
    /// The user's tokens, until they have left.
    input: Option<Region>,
}

/// Dispatch and combine over a communicator.
#[pyclass(frozen, module = "weft._native")]
pub struct AllToAll {
    shared: Shared,
    moe: Moe,
    rounds: Mutex<HashMap<u64, Round>>,
    shape: Shape,
}

/// An array that the Python layer has checked to be contiguous: address, bytes, and who owns it.
pub type Array = (usize, usize, Py<PyAny>);

/// Tokens that were received: see `weft.moe.Received`.
#[pyclass(frozen, get_all, module = "weft._native")]
pub struct Received {
    rows: Py<View>,
    row_count: usize,
    stride: usize,
    scales: Option<Py<View>>,
    scale_stride: usize,
    expert_counts: Vec<u32>,
    expert_offsets: Vec<u32>,
    slots: Vec<u32>,
    weights: Vec<f32>,
    expert_load: Vec<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl AllToAll {
    fn handle(&self, py: Python<'_>, round: u64) -> PyResult<RoundHandle> {
        if self.moe.is_closed() {
            return Err(Error::Moe(weft_moe::Error::Closed).into());
        }
        let rounds = lock(&self.rounds);
        rounds.get(&round).map(|round| round.handle).ok_or_else(|| {
            raise(py, "StageError", &format!("round {round} has been released, or never began"))
        })
    }

    /// Releases the user's arrays for all rounds; writes in flight keep them until they complete.
    fn release_inputs(&self, engine: &mut weft_fabric::Engine) {
        for region in lock(&self.rounds).drain().filter_map(|(_, round)| round.input) {
            engine.release(&region);
        }
    }

    fn shape_error(py: Python<'_>, what: &str, needed: usize, given: usize) -> PyErr {
        raise(py, "ShapeError", &format!("{what} has {given} bytes; {needed} are needed"))
    }
}

/// An array's bytes.
///
/// # Safety
/// The array's owner outlives the slice, and the array is not written to meanwhile.
pub unsafe fn bytes(array: &Array) -> &[u8] {
    let address = NonNull::new(array.0 as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: the caller's contract; the Python layer took address and length from the owner.
    unsafe { std::slice::from_raw_parts(address.as_ptr(), array.1) }
}

/// As [`bytes`], to write.
///
/// # Safety
/// The array's owner outlives the slice, and the array is not read or written elsewhere meanwhile.
pub unsafe fn bytes_mut(array: &mut Array) -> &mut [u8] {
    let address = NonNull::new(array.0 as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: the caller's contract; the Python layer took address and length from the owner.
    unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), array.1) }
}

#[pymethods]
impl AllToAll {
    #[new]
    #[pyo3(signature = (communicator, *, experts, top_k, hidden, max_tokens, token_dtype, scales,
        combine_dtype, reply_dtype, output_dtype, layout, pad_to, combine, weighting, private_rows,
        max_receive_rows, channels, max_bytes, timeout))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        communicator: &Communicator,
        experts: Experts,
        top_k: TopK,
        hidden: Hidden,
        max_tokens: MaxTokens,
        token_dtype: &str,
        scales: Option<(String, Block)>,
        combine_dtype: &str,
        reply_dtype: &str,
        output_dtype: &str,
        layout: &str,
        pad_to: PadTo,
        combine: &str,
        weighting: &str,
        private_rows: Option<PrivateRows>,
        max_receive_rows: Option<MaxReceiveRows>,
        channels: Channels,
        max_bytes: Option<MaxBytes>,
        timeout: f64,
    ) -> PyResult<AllToAll> {
        let shared = communicator.shared.clone();
        let (ranks, rank) = shared.with(py, |f| Ok((f.world_size(), f.rank().0)))?;
        let config = Config {
            private_rows: private_rows.map_or(Config::PRIVATE_ROWS, |rows| rows.0),
            max_receive_rows: max_receive_rows.map(|rows| rows.0),
            channels: channels.0,
            token_type: token_type(
                py,
                token_dtype,
                scales.as_ref().map(|(dtype, block)| (dtype.as_str(), block.0)),
            )?,
            combine_dtype: dtype(py, combine_dtype)?,
            reply_dtype: dtype(py, reply_dtype)?,
            output_dtype: dtype(py, output_dtype)?,
            layout: choose(
                py,
                "layout",
                layout,
                &[
                    ("contiguous", Layout::Contiguous { pad_to: pad_to.0 }),
                    ("indexed", Layout::Indexed),
                ],
            )?,
            combine: choose(
                py,
                "combine",
                combine,
                &[("reduce", CombineMode::ReduceAtExpert), ("per_expert", CombineMode::PerExpert)],
            )?,
            weighting: choose(
                py,
                "weighting",
                weighting,
                &[("combine", Weighting::AtCombine), ("expert", Weighting::AtExpert)],
            )?,
            max_bytes: max_bytes.map(|bytes| bytes.0),
            ..Config::new(ranks, rank, experts.0, top_k.0).sized(max_tokens.0, hidden.0)
        };
        // Arguments are compared first: impossible ones on one rank are an error on every rank.
        let moe = shared.with(py, |fabric| Ok(Moe::connect(fabric, config, deadline(timeout))?))?;
        let shape = moe.shape().clone();
        Ok(AllToAll { shared, moe, rounds: Mutex::default(), shape })
    }

    /// Wire bytes for a token with scales, and for a reply.
    #[getter]
    fn row_bytes(&self) -> (usize, usize) {
        let tokens = self.shape.token_bytes() + self.shape.scale_bytes();
        (tokens, self.shape.area_row_bytes(Area::Replies))
    }

    /// This rank's first expert and one past its last.
    #[getter]
    fn local_experts(&self) -> (u32, u32) {
        let experts = self.shape.placement().experts_of(self.shape.config().rank);
        (experts.start, experts.end)
    }

    /// Memory: a table by area, and the total in bytes.
    fn sizes(&self) -> (String, u64) {
        (self.shape.sizes().to_string(), self.shape.sizes().total_bytes())
    }

    /// Starts a round; returns the round number.
    fn dispatch_send(
        &self,
        py: Python<'_>,
        tokens: Array,
        ids: Array,
        weights: Option<Array>,
        scales: Option<Array>,
    ) -> PyResult<u64> {
        let memory = lent(tokens.0, tokens.1, tokens.2, None)?;
        let (round, started) = self.shared.with(py, |fabric| {
            // The Python layer made ids and weights in the dtypes int64 and float32, aligned by numpy.
            // SAFETY: the arrays' owners are arguments to this call, and the docstring forbids
            // changing the scales while it runs.
            let (ids, weights, scales) = unsafe {
                let ids = bytes(&ids).align_to::<i64>().1;
                let weights = weights.as_ref().map(|array| bytes(array).align_to::<f32>().1);
                (ids, weights, scales.as_ref().map(|array| bytes(array)))
            };
            let region = fabric.register_user_buffer(memory)?;
            let input = TokenInput { region: region.key(), memory: region.memory().clone() };
            match self.moe.dispatch_send(&mut fabric.access(), input, ids, weights, scales) {
                Ok(handle) => Ok((handle.round(), Round { handle, input: Some(region) })),
                Err(error) => {
                    fabric.engine().release(&region);
                    Err(error.into())
                }
            }
        })?;
        lock(&self.rounds).insert(round, started);
        Ok(round)
    }

    /// Waits until every token for this rank's experts is here.
    fn dispatch_recv(&self, py: Python<'_>, round: u64, timeout: f64) -> PyResult<Received> {
        let handle = self.handle(py, round)?;
        let received = self.shared.wait(py, timeout, |fabric, waiter| {
            let host = &mut fabric.access();
            let result = self.moe.dispatch_recv(host, handle, waiter);
            let over = self.moe.is_released(host, handle)?;
            let mut rounds = lock(&self.rounds);
            if (result.is_ok() || over)
                && let Some(region) = rounds.get_mut(&round).and_then(|round| round.input.take())
            {
                fabric.engine().release(&region);
            }
            if over {
                rounds.remove(&round);
            }
            drop(rounds);
            result?;
            Ok(self.moe.with_received(host, handle, |received, load| {
                let view = View::new(received.memory.clone(), received.bytes, true);
                let plan = received.plan;
                let experts = (plan.expert_counts().to_vec(), plan.expert_offsets().to_vec());
                let positions = (plan.slots().to_vec(), plan.weights().to_vec());
                let scales = received.scales.map(|scales| {
                    (View::new(received.memory.clone(), scales.bytes, true), scales.stride)
                });
                let rows = (view, received.rows, received.stride);
                (rows, scales, experts, positions, load.to_vec())
            })?)
        })?;
        let ((view, row_count, stride), scales, experts, positions, expert_load) = received;
        let (scales, scale_stride) = scales.unzip();
        let ((expert_counts, expert_offsets), (slots, weights)) = (experts, positions);
        Ok(Received {
            rows: Py::new(py, view)?,
            row_count,
            stride,
            scales: scales.map(|scales| Py::new(py, scales)).transpose()?,
            scale_stride: scale_stride.unwrap_or_default(),
            expert_counts,
            expert_offsets,
            slots,
            weights,
            expert_load,
        })
    }

    /// Sends the experts' outputs back.
    fn combine_send(&self, py: Python<'_>, round: u64, outputs: Array) -> PyResult<()> {
        let handle = self.handle(py, round)?;
        let row = self.shape.area_row_bytes(Area::ExpertOutput);
        self.shared.with(py, |fabric| {
            // SAFETY: the owner is an argument to this call, and the docstring forbids changing the
            // array while it runs.
            let outputs = Rows::new(unsafe { bytes(&outputs) }, row, row);
            Ok(self.moe.combine_send(&mut fabric.access(), handle, outputs)?)
        })
    }

    /// Waits for all replies and sums them into `out`.
    fn combine_recv(
        &self,
        py: Python<'_>,
        round: u64,
        mut out: Array,
        timeout: f64,
    ) -> PyResult<()> {
        let handle = self.handle(py, round)?;
        let row = self.shape.area_row_bytes(Area::Output);
        let needed = self.tokens(py, round)? * row;
        if out.1 < needed {
            return Err(Self::shape_error(py, "the output", needed, out.1));
        }
        self.shared.wait(py, timeout, |fabric, waiter| {
            // SAFETY: the owner is an argument to this call, and the docstring forbids touching the
            // array while it runs.
            let out = RowsMut::new(unsafe { bytes_mut(&mut out) }, row, row);
            Ok(self.moe.combine_recv(&mut fabric.access(), handle, out, waiter)?)
        })
    }

    /// Ends a round.
    fn release(&self, py: Python<'_>, round: u64) -> PyResult<()> {
        let handle = self.handle(py, round)?;
        self.shared.with(py, |fabric| Ok(self.moe.release(&mut fabric.access(), handle)?))?;
        lock(&self.rounds).remove(&round);
        Ok(())
    }

    /// Token count that this rank sent in a round.
    fn tokens(&self, py: Python<'_>, round: u64) -> PyResult<usize> {
        let handle = self.handle(py, round)?;
        self.shared.with(py, |fabric| Ok(self.moe.tokens(&mut fabric.access(), handle)?))
    }

    /// Rows that left this rank in a round, and rows that a copy per expert would have sent.
    fn copies_sent(&self, py: Python<'_>, round: u64) -> PyResult<(usize, usize)> {
        let handle = self.handle(py, round)?;
        self.shared.with(py, |fabric| Ok(self.moe.copies_sent(&mut fabric.access(), handle)?))
    }

    /// Frees all memory; every rank calls this. No effect in a forked child.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        self.shared.wait(py, timeout, |fabric, waiter| {
            if !self.moe.is_closed() {
                self.release_inputs(&mut fabric.engine());
            }
            Ok(self.moe.close(fabric, waiter)?)
        })
    }

    /// Ends it on this rank only; the engine keeps memory that peers may write to. No effect in a forked child.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        if fork::is_child() {
            return Ok(());
        }
        self.shared.with(py, |fabric| {
            if !self.moe.is_closed() {
                self.release_inputs(&mut fabric.engine());
                self.moe.abandon(fabric);
            }
            Ok(())
        })
    }
}

pub fn dtype(py: Python<'_>, name: &str) -> PyResult<DType> {
    DType::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        let message = format!("dtype {name:?} is not supported: {} are", known.join(", "));
        raise(py, "ConfigurationError", &message)
    })
}

/// Token type with these names; 8-bit types come with a scale type and block.
pub fn token_type(py: Python<'_>, name: &str, scales: Option<(&str, u32)>) -> PyResult<TokenType> {
    let format = Float8::ALL.into_iter().find(|format| format.name() == name);
    let (Some(format), Some((scale, block))) = (format, scales) else {
        return Ok(TokenType::Plain(dtype(py, name)?));
    };
    let known = ScaleType::ALL.map(|scale| (scale.name(), scale));
    let scale = choose(py, "scale_dtype", scale, &known)?;
    Ok(TokenType::Scaled(BlockScaled { format, scale, block }))
}
