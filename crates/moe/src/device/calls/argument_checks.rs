//! Call argument checks, before any launch: an invalid address in a kernel destroys the CUDA context.

use crate::device::abi::arguments::{
    CombineOutputs, DispatchInputs, DispatchOutputs, PlanLocation,
};
use crate::device::options::types::DeviceLayout;
use crate::device::shape::DeviceShape;
use crate::device::shape::checks::PIECE;
use crate::error::Error;

impl DeviceShape {
    pub(crate) fn check_plan(&self, plan: PlanLocation) -> Result<(), Error> {
        if self.config().layout == DeviceLayout::Dense && plan.address != 0 {
            return Err(NOT_DENSE);
        }
        present("the plan of an earlier round", plan.address, plan.kept)?;
        aligned("the plan", plan.address)
    }

    pub(crate) fn check_inputs(
        &self,
        inputs: &DispatchInputs,
        plan: PlanLocation,
    ) -> Result<(), Error> {
        self.check_given(inputs.given)?;
        let (config, layers) = (self.config(), self.layers().max(1));
        if inputs.layer >= layers {
            return Err(Error::NoLayer { layer: inputs.layer, layers });
        }
        let needed = inputs.given > 0;
        present("tokens", inputs.tokens, needed)?;
        present("ids", inputs.ids, needed && !plan.kept)?;
        let scaled = config.scaled().is_some() && !config.casts();
        present("scales", inputs.scales, needed && scaled)?;
        aligned("tokens", inputs.tokens)
    }

    pub(crate) fn check_outputs(
        &self,
        outputs: &DispatchOutputs,
        plan: PlanLocation,
    ) -> Result<(), Error> {
        let config = self.config();
        let placed = config.layout != DeviceLayout::Indexed;
        present("received tokens", outputs.tokens, placed)?;
        present("received scales", outputs.scales, placed && config.scaled().is_some())?;
        let owns_experts = !self.placement().experts_of(config.rank).is_empty();
        let planned = !plan.kept;
        present("expert counts", outputs.counts, owns_experts && planned)?;
        present("expert offsets", outputs.offsets, planned)?;
        present("received rows", outputs.rows, planned)?;
        present("received weights", outputs.weights, planned)?;
        aligned_to(outputs.load_bytes.into(), "expert load", outputs.load)?;
        aligned("received tokens", outputs.tokens)
    }

    pub(crate) fn check_combined(
        &self,
        outputs: &CombineOutputs,
        release: bool,
    ) -> Result<(), Error> {
        let CombineOutputs { combined, added, given, .. } = *outputs;
        self.check_given(given)?;
        present("the combined result", combined, given > 0 && !release)?;
        aligned("the combined result", combined)?;
        added.into_iter().try_for_each(|rows| aligned("rows that are added", rows))
    }

    fn check_given(&self, given: u32) -> Result<(), Error> {
        let max_tokens = self.config().max_tokens;
        if given > max_tokens {
            return Err(Error::TooManyTokens { tokens: given as usize, max_tokens });
        }
        Ok(())
    }
}

/// Error for features that need positions, in the dense layout.
pub(crate) const NOT_DENSE: Error = Error::Unsuitable {
    what: "a kept plan, or counts on the host, in the dense layout",
    reason: "its rows are ordered only by source and slot; use the contiguous layout",
};

fn present(what: &'static str, address: u64, needed: bool) -> Result<(), Error> {
    if needed && address == 0 { Err(Error::NoAddress { what }) } else { Ok(()) }
}

/// Checks the alignment to 16-byte chunks.
pub(crate) fn aligned(what: &'static str, address: u64) -> Result<(), Error> {
    aligned_to(PIECE, what, address)
}

fn aligned_to(bytes: u64, what: &'static str, address: u64) -> Result<(), Error> {
    if address.is_multiple_of(bytes) { Ok(()) } else { Err(Error::Misaligned { what, address }) }
}
