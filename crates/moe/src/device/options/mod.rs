//! Options for a device all-to-all, each declared once, in this file.
//!
//! A declaration has a Rust struct field's type and default, the kernel macros, and the Python keywords with
//! documentation. Generated from it:
//!
//! * the field, and the default ([`declare`]);
//! * the [`DeviceConfig`] fields that ranks compare before any allocation (`agreed`);
//! * the kernel macros (`numbers`), beside those that
//!   [`DeviceShape::defines`](crate::device::DeviceShape::defines) derives;
//! * the native class's keywords (`read`);
//! * `python/weft/moe/options.py`: the typed dictionaries, defaults and documentation for Python
//!   ([`python_module`]).
//!
//! A keyword's audience is
//!
//! * `required`: an argument without a default;
//! * `both`: an argument for all-to-alls on the CPU and on devices;
//! * `device`: an argument for device all-to-alls only;
//! * `derived`: not an argument; `weft.moe.device.config.make` derives it from others.
//!
//! A new option type needs an [`OptionType`](value::OptionType) that converts from Python objects and back.

mod declare;
mod python;
pub(super) mod types;
mod value;

pub use declare::{Audience, Keyword};
pub use python::python_module;
pub use value::{Keywords, OptionError, OptionValue};

use crate::elements::dtype::DType;
use crate::elements::token_type::TokenType;
use crate::shape::config::Weighting;
use crate::shape::expert_map::ExpertMap;
use declare::declare;
use std::sync::Arc;
use std::time::Duration;
use types::{DeviceLayout, IdWidth, ScaleLayout, TransferPath};
use weft_gpu::{MemoryKind, MemoryLocation};

declare! {
    /// Configuration for an all-to-all between GPUs on one host. All fields but `rank` are equal on all
    /// ranks.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct DeviceConfig {
        fields {
            /// World size, one GPU per rank.
            pub ranks: u32,
            /// This rank, from 0.
            pub rank: u32,
            /// Expert map for each layer that shares the all-to-all. Without maps, each expert has one
            /// physical expert, placed by [`Placement::new`](crate::Placement::new).
            pub maps: Arc<[ExpertMap]>,
        }

        experts: u32 = 1, kernels ["NAMED_EXPERTS"] {
            required "experts" "number of experts that tokens name; without a `placement` rank r owns experts from `r * experts // world_size` to `(r + 1) * experts // world_size`.";
        }
        top_k: u32 = 1, kernels ["TOP_K"] {
            required "top_k" "expert ids per token.";
        }
        hidden: u32 = 8, kernels ["HIDDEN"] {
            required "hidden" "elements per token; token, reply and result rows are multiples of 16 bytes.";
        }
        max_tokens: u32 = 1, kernels ["MAX_TOKENS"] {
            required "max_tokens" "maximum number of tokens that a rank sends in one round.";
        }
        channels: u32 = 2, kernels [] {
            both "channels" "rounds in flight: dispatched and not yet released.";
        }
        token_type: TokenType = DType::BF16.into(), kernels ["TOKEN_TYPE"] {
            derived "token_dtype" "input token dtype.";
        }
        wire: TokenType = DType::BF16.into(), kernels ["WIRE_TYPE", "SCALE_TYPE", "SCALE_BLOCK"] {
            device "wire_dtype" "token dtype on the wire and as received (default `dtype`). With \"float8_e4m3fn\" \
                the kernel casts tokens to codes with scales when it sends them.";
            derived "scales" "scale dtype and elements per block, if tokens on the wire have scales.";
        }
        combine_dtype: DType = DType::BF16, kernels ["COMBINE_TYPE"] {
            both "combine_dtype" "expert output dtype (default `dtype`, or bfloat16 if that is an 8-bit one).";
        }
        reply_dtype: DType = DType::BF16, kernels ["REPLY_TYPE"] {
            both "reply_dtype" "reply dtype on the wire, to which each reply is rounded once (default `combine_dtype`).";
        }
        output_dtype: DType = DType::BF16, kernels ["OUTPUT_TYPE"] {
            both "output_dtype" "combined result dtype (default `dtype`, or bfloat16 if that is an 8-bit one).";
        }
        ids: IdWidth = IdWidth::I64, kernels ["ID_BYTES"] {
            device "ids_dtype" "expert id dtype: int64 or int32.";
        }
        layout: DeviceLayout = DeviceLayout::Contiguous { pad_to: 1 }, kernels ["LAYOUT", "PAD_TO"] {
            both "layout" "\"contiguous\": received tokens are copied into a group for each expert; \
                \"indexed\": they stay where they arrived, and each expert has a list of row numbers; \"padded\": each \
                expert has `expert_capacity` rows; \"dense\": each token once, by source, with `[top_k]` local ids and \
                weights, as Triton's fused_moe takes them.";
            both "pad_to" "in the contiguous layout, each expert's group begins at a multiple of this many rows.";
            device "expert_capacity" "rows per expert in the padded layout (default: the worst case).";
        }
        max_positions: Option<u32> = None, kernels [] {
            device "max_positions" "maximum number of positions (pairs of token and expert, and padding; rows in the dense layout) on a rank in one round, in the other layouts (default: the worst case). A round that needs more places no \
                token at that rank, and all its results are NaN.";
        }
        scale_layout: ScaleLayout = ScaleLayout::Row, kernels ["SCALE_LAYOUT"] {
            device "scale_layout" "received scale layout: \"row\": row-major; \"column\": column-major, with columns that \
                begin at multiples of 16 bytes, as DeepGEMM loads float32 scales; \
                \"column_packed\": column-major, with four float8_e8m0fnu scales in an int32, the first in the lowest bits. In \
                the padded layout each expert has separate columns.";
        }
        weighting: Weighting = Weighting::AtCombine, kernels ["WEIGHT_AT_COMBINE"] {
            both "weighting" "\"combine\": combine multiplies by the router's weights; \"expert\": the experts did, as \
                they must in the dense layout, where it is the default.";
        }
        path: Option<TransferPath> = None, kernels [] {
            device "path" "\"packets\", \"latency\" or \"bandwidth\" (default: chosen by `max_tokens`).";
        }
        max_bytes: Option<u64> = None, kernels [] {
            both "max_bytes" "maximum number of bytes to allocate.";
        }
    }
}

declare! {
    /// One rank's setup: device and launch options. Only the memory kind must be equal on all ranks.
    #[derive(Clone, Debug)]
    pub struct DeviceSetup {
        fields {
            /// Heap memory and kernel device.
            pub place: MemoryLocation,
        }

        skew_timeout: Duration = Duration::from_secs(30), kernels [] {
            device "skew_timeout" "maximum number of seconds that a kernel waits for a peer; in a domain, the longest over all operators.";
        }
        num_sms: Option<u32> = None, kernels [] {
            device "num_sms" "maximum number of SMs per kernel (default: the fastest number).";
        }
        concurrent: bool = false, kernels [] {
            device "concurrent" "calls may overlap with the process's other concurrent all-to-alls on the GPU, on any communicator, in an order that differs between ranks: the constructor \
                then rejects launches that do not fit on the GPU at once. Not needed if one stream orders all \
                calls, the same on every rank.";
        }
    }
}

declare! {
    /// Options used only during construction.
    #[derive(Clone, Debug)]
    pub struct CreationOptions {
        fields {}

        memory: MemoryKind = MemoryKind::Fd, kernels [] {
            device "memory" "how peers' memory is shared: \"fd\" or \"ipc\".";
        }
        timeout: Duration = Duration::from_secs(60), kernels [] {
            both "timeout" "maximum number of seconds to wait until all ranks make the same call.";
        }
    }
}

/// All options, as passed by Python.
#[derive(Clone, Debug)]
pub struct Options {
    config: DeviceConfig,
    setup: DeviceSetup,
    /// Construction options.
    pub creation: CreationOptions,
}

impl Options {
    /// Reads the passed keywords; the others keep the defaults.
    ///
    /// # Errors
    /// [`OptionError`]: an invalid value or type, or a missing or unknown keyword.
    pub fn read(given: &Keywords) -> Result<Options, OptionError> {
        let known = keywords();
        let unknown = |name: &&String| !known.iter().any(|keyword| keyword.name == **name);
        if let Some(name) = given.keys().find(unknown) {
            return Err(OptionError::InvalidType(format!(
                "{name} is not an option of a device all-to-all"
            )));
        }
        let missing = |keyword: &&Keyword| {
            keyword.audience == Audience::Required && !given.contains_key(keyword.name)
        };
        if let Some(Keyword { name, .. }) = known.iter().find(missing) {
            return Err(OptionError::InvalidType(format!("{name} is missing: it has no default")));
        }
        let mut options = Options {
            config: DeviceConfig::defaults(1, 0, Arc::default()),
            setup: DeviceSetup::defaults(MemoryLocation::Twin),
            creation: CreationOptions::defaults(),
        };
        options.config.read(given)?;
        options.setup.read(given)?;
        options.creation.read(given)?;
        Ok(options)
    }

    /// Configuration for `rank` among `ranks`.
    pub fn config(&self, ranks: u32, rank: u32) -> DeviceConfig {
        DeviceConfig { ranks, rank, ..self.config.clone() }
    }

    /// Setup for a rank at `place`.
    pub fn setup(&self, place: MemoryLocation) -> DeviceSetup {
        DeviceSetup { place, ..self.setup.clone() }
    }
}

impl DeviceSetup {
    /// A setup with the defaults; the skew timeout is 30 seconds.
    pub fn new(place: MemoryLocation) -> DeviceSetup {
        DeviceSetup::defaults(place)
    }
}

/// All keywords, in declaration order.
pub fn keywords() -> Vec<Keyword> {
    [DeviceConfig::keywords(), DeviceSetup::keywords(), CreationOptions::keywords()].concat()
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
