//! What calls are given, checked before a kernel sees it: a kernel that is led astray takes the whole
//! context with it.

use crate::device::arguments::{DispatchInputs, DispatchOutputs};
use crate::device::config::{DeviceLayout, PIECE};
use crate::device::shape::DeviceShape;
use crate::error::Error;

impl DeviceShape {
    pub(super) fn check_inputs(&self, inputs: &DispatchInputs) -> Result<(), Error> {
        self.check_given(inputs.given)?;
        let config = self.config();
        let needed = inputs.given > 0;
        present("tokens", inputs.tokens, needed)?;
        present("ids", inputs.ids, needed)?;
        let scaled = config.scaled().is_some() && !config.casts();
        present("scales", inputs.scales, needed && scaled)?;
        aligned("tokens", inputs.tokens)
    }

    pub(super) fn check_outputs(&self, outputs: &DispatchOutputs) -> Result<(), Error> {
        let config = self.config();
        let placed = config.layout != DeviceLayout::Indexed;
        present("received tokens", outputs.tokens, placed)?;
        present("received scales", outputs.scales, placed && config.scaled().is_some())?;
        let owns_experts = !self.placement().experts_of(config.rank).is_empty();
        present("expert counts", outputs.counts, owns_experts)?;
        present("expert offsets", outputs.offsets, true)?;
        present("received rows", outputs.rows, true)?;
        present("received weights", outputs.weights, true)?;
        aligned("received tokens", outputs.tokens)
    }

    pub(super) fn check_combined(
        &self,
        combined: u64,
        given: u32,
        release: bool,
    ) -> Result<(), Error> {
        self.check_given(given)?;
        present("the combined result", combined, given > 0 && !release)?;
        aligned("the combined result", combined)
    }

    fn check_given(&self, given: u32) -> Result<(), Error> {
        let max_tokens = self.config().max_tokens;
        if given > max_tokens {
            return Err(Error::TooManyTokens { tokens: given as usize, max_tokens });
        }
        Ok(())
    }
}

fn present(what: &'static str, address: u64, needed: bool) -> Result<(), Error> {
    if needed && address == 0 { Err(Error::NoAddress { what }) } else { Ok(()) }
}

/// Kernels move rows in pieces.
pub(super) fn aligned(what: &'static str, address: u64) -> Result<(), Error> {
    if address.is_multiple_of(PIECE) { Ok(()) } else { Err(Error::Misaligned { what, address }) }
}
