//! What `DeviceAllToAll` is asked to be, from Python's names and numbers.

use crate::all_to_all::{choose, dtype, token_type};
use crate::errors::{Error, raise};
use crate::numbers::{
    Block, Buffers, ExpertCapacity, Experts, Hidden, MaxBytes, MaxPositions, MaxTokens, NumSms,
    PadTo, TopK,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;
use weft_gpu::{Memory, Place};
use weft_moe::device::{DeviceConfig, DeviceLayout, DeviceSetup, IdWidth, Path};
use weft_moe::{Error as MoeError, Weighting};

/// Declares the keyword arguments that both constructors take, all but `concurrent` required.
macro_rules! options {
    ($($(#[$meta:meta])* $name:ident: $type:ty,)*) => {
        /// The keyword arguments that both constructors take.
        #[derive(FromPyObject)]
        #[pyo3(from_item_all)]
        pub struct Options {
            $($(#[$meta])* pub $name: $type,)*
        }

        /// Their names. `weft.cuda.config.Config` has the same, in the same order; a test compares.
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

options! {
    experts: Experts,
    top_k: TopK,
    hidden: Hidden,
    max_tokens: MaxTokens,
    token_dtype: String,
    wire_dtype: String,
    scales: Option<(String, Block)>,
    combine_dtype: String,
    answer_dtype: String,
    output_dtype: String,
    ids_dtype: String,
    layout: String,
    pad_to: PadTo,
    expert_capacity: Option<ExpertCapacity>,
    max_positions: Option<MaxPositions>,
    weighting: String,
    buffers: Buffers,
    num_sms: Option<NumSms>,
    #[pyo3(default = true)]
    concurrent: bool,
    path: Option<String>,
    memory: String,
    skew_timeout: f64,
    max_bytes: Option<MaxBytes>,
    timeout: f64,
}

/// Names of the options of a device all-to-all.
#[pyfunction]
pub fn device_options() -> &'static [&'static str] {
    NAMES
}

impl Options {
    /// From the keyword arguments of a call.
    ///
    /// # Errors
    /// `TypeError` or `KeyError` if some are missing, of another type or not known.
    pub fn of(arguments: Option<&Bound<'_, PyDict>>) -> PyResult<Options> {
        let given = arguments.map_or(0, |arguments| arguments.len());
        if let Some(arguments) = arguments
            && given <= NAMES.len()
        {
            return arguments.extract().map_err(|error| number(arguments.py(), error));
        }
        Err(PyTypeError::new_err(format!(
            "{given} keyword arguments were given, of {} known",
            NAMES.len()
        )))
    }

    /// The shape, as `rank` of `ranks` has it.
    pub fn config(&self, py: Python<'_>, ranks: u32, rank: u32) -> PyResult<DeviceConfig> {
        let scales = self.scales.as_ref().map(|(dtype, block)| (dtype.as_str(), block.0));
        let ids = [("int64", IdWidth::I64), ("int32", IdWidth::I32)];
        let weighting = [("combine", Weighting::AtCombine), ("expert", Weighting::AtExpert)];
        let paths = Path::ALL.map(|path| (path.name(), path));
        let path = self.path.as_deref().map(|name| choose(py, "path", name, &paths)).transpose()?;
        let config = DeviceConfig::new(ranks, rank, self.experts.0, self.top_k.0);
        Ok(DeviceConfig {
            channels: self.buffers.0,
            token_type: token_type(py, &self.token_dtype, scales)?,
            wire: token_type(py, &self.wire_dtype, scales)?,
            combine_dtype: dtype(py, &self.combine_dtype)?,
            answer_dtype: dtype(py, &self.answer_dtype)?,
            output_dtype: dtype(py, &self.output_dtype)?,
            ids: choose(py, "ids_dtype", &self.ids_dtype, &ids)?,
            layout: self.layout(py)?,
            max_positions: self.max_positions.map(|positions| positions.0),
            weighting: choose(py, "weighting", &self.weighting, &weighting)?,
            path,
            max_bytes: self.max_bytes.map(|bytes| bytes.0),
            ..config.sized(self.max_tokens.0, self.hidden.0)
        })
    }

    fn layout(&self, py: Python<'_>) -> PyResult<DeviceLayout> {
        let pad_to = self.pad_to.0;
        let expert_capacity = self.expert_capacity.map(|capacity| capacity.0);
        let known = [
            ("contiguous", DeviceLayout::Contiguous { pad_to }),
            ("indexed", DeviceLayout::Indexed),
            ("padded", DeviceLayout::Padded { expert_capacity }),
        ];
        let layout = choose(py, "layout", &self.layout, &known)?;
        if expert_capacity.is_some() && !matches!(layout, DeviceLayout::Padded { .. }) {
            let message = format!("expert_capacity is for layout='padded', not {:?}", self.layout);
            return Err(raise(py, "ConfigurationError", &message));
        }
        Ok(layout)
    }

    /// Where a rank runs: on `device`, "cuda:0" and on, or "twin".
    pub fn setup(&self, py: Python<'_>, device: &str) -> PyResult<DeviceSetup> {
        let place = place_of(py, device, &self.memory)?;
        let skew_timeout = Duration::try_from_secs_f64(self.skew_timeout).map_err(|_| {
            let message =
                format!("skew_timeout is {}: seconds from 0 on are needed", self.skew_timeout);
            raise(py, "ConfigurationError", &message)
        })?;
        let num_sms = self.num_sms.map(|number| number.0);
        Ok(DeviceSetup { place, skew_timeout, num_sms, concurrent: self.concurrent })
    }
}

/// Where a rank runs: on `device`, "cuda:0" and on, or "twin", with memory that is shared so.
pub fn place_of(py: Python<'_>, device: &str, memory: &str) -> PyResult<Place> {
    let known = [("fd", Memory::Fd), ("ipc", Memory::Ipc)];
    let memory = choose(py, "memory", memory, &known)?;
    match (device, device.strip_prefix("cuda:").map(str::parse)) {
        ("twin", _) => Ok(Place::Twin),
        (_, Some(Ok(ordinal))) => {
            let device = py.detach(|| weft_cuda::driver()?.device(ordinal));
            let device = device.map_err(MoeError::from).map_err(Error::from)?;
            Ok(Place::Cuda { device, memory })
        }
        _ => {
            let message = format!("device is {device:?}: cuda:0 and on, and twin, are known");
            Err(raise(py, "ConfigurationError", &message))
        }
    }
}

/// The error of a number that does not fit, which PyO3 makes the cause of a `TypeError`.
fn number(py: Python<'_>, error: PyErr) -> PyErr {
    let refused = |cause: &PyErr| {
        let class =
            py.import("weft.errors").and_then(|errors| errors.getattr("ConfigurationError"));
        class.is_ok_and(|class| cause.matches(py, class).unwrap_or(false))
    };
    error.cause(py).filter(refused).unwrap_or(error)
}
