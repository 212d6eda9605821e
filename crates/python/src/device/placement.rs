//! Expert placements, from Python's lists.

use crate::errors::Error;
use pyo3::prelude::*;
use weft_moe::device::DeviceConfig;
use weft_moe::{Error as MoeError, ExpertMap};

/// The logical experts that each rank holds.
pub type RankExperts = Vec<Vec<u32>>;

/// The configuration with each layer's placement, if there are any.
pub fn with_placement(
    config: DeviceConfig,
    placement: Option<Vec<RankExperts>>,
) -> PyResult<DeviceConfig> {
    let layers = (0..).zip(placement.unwrap_or_default()).collect();
    let maps = maps(config.experts, layers)?.into_iter().map(|(_, map)| map).collect();
    Ok(DeviceConfig { maps, ..config })
}

/// Placements for `experts` by layer.
pub fn maps(experts: u32, layers: Vec<(u32, RankExperts)>) -> PyResult<Vec<(u32, ExpertMap)>> {
    let maps = layers.into_iter().map(|(layer, held)| Ok((layer, ExpertMap::new(experts, &held)?)));
    Ok(maps.collect::<Result<_, MoeError>>().map_err(Error::from)?)
}
