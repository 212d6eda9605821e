//! Device of a rank, as far as it can be known before the rank uses one. No context is created.

use crate::device::Device;
use crate::driver::{Driver, call, driver};
use crate::error::Result;
use std::fmt;

/// A rank among the ranks on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRank {
    /// This rank, from 0.
    pub rank: u32,
    /// Ranks on the host.
    pub size: u32,
}

/// A rank's device, and how it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankDevice {
    /// The only device that this process sees.
    Only,
    /// The calling thread's current device.
    Current(u32),
    /// As many devices as ranks on the host: the device with the local rank's number.
    ByLocalRank(LocalRank),
}

/// Reason for which a rank's device is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRankDevice {
    /// This process sees no device.
    Invisible,
    /// The only rank on the host may use them all.
    Several {
        /// Devices that this process sees.
        visible: u32,
    },
    /// None is current, and there are not as many as ranks on the host.
    Unclear {
        /// Devices that this process sees.
        visible: u32,
        /// The local rank, if known.
        local: Option<LocalRank>,
    },
}

impl RankDevice {
    /// Device number among the devices that this process sees.
    pub fn ordinal(self) -> u32 {
        match self {
            RankDevice::Only => 0,
            RankDevice::Current(ordinal) => ordinal,
            RankDevice::ByLocalRank(local) => local.rank,
        }
    }

    /// The rule, in this order: the only visible device; the current device, unless this is the only rank on the host;
    /// the device with the local rank's number, if there are as many devices as ranks on the host.
    fn choose(
        visible: u32,
        current: Option<u32>,
        local: Option<LocalRank>,
    ) -> std::result::Result<RankDevice, NoRankDevice> {
        match (visible, current, local) {
            (0, ..) => Err(NoRankDevice::Invisible),
            (1, ..) => Ok(RankDevice::Only),
            (_, _, Some(LocalRank { size: 1, .. })) => Err(NoRankDevice::Several { visible }),
            (_, Some(current), _) => Ok(RankDevice::Current(current)),
            (_, None, Some(local)) if local.size == visible && local.rank < visible => {
                Ok(RankDevice::ByLocalRank(local))
            }
            (_, None, local) => Err(NoRankDevice::Unclear { visible, local }),
        }
    }
}

impl fmt::Display for RankDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankDevice::Only => f.write_str("the only visible GPU"),
            RankDevice::Current(ordinal) => write!(f, "the current CUDA device {ordinal}"),
            RankDevice::ByLocalRank(LocalRank { rank, size }) => {
                write!(f, "CUDA device {rank}, for local rank {rank} of {size}")
            }
        }
    }
}

impl fmt::Display for NoRankDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRankDevice::Invisible => f.write_str("no GPU is visible"),
            NoRankDevice::Several { visible } => {
                write!(f, "{visible} GPUs are visible to the only rank on this host")
            }
            NoRankDevice::Unclear { visible, local: None } => {
                write!(f, "{visible} GPUs are visible, none is current, and no local rank is known")
            }
            NoRankDevice::Unclear { visible, local: Some(local) } => write!(
                f,
                "{visible} GPUs are visible to {} ranks on this host, and none is current",
                local.size
            ),
        }
    }
}

/// The device that a rank on this thread probably uses, from what is visible, what is current and the local rank.
/// For example, rank 3 of 8 with eight visible devices has device 3.
///
/// # Errors
///
/// [`NoRankDevice`]. A machine without a driver has no device.
pub fn device_of_rank(
    local: Option<LocalRank>,
) -> std::result::Result<(RankDevice, Device), NoRankDevice> {
    let driver = driver().map_err(|_| NoRankDevice::Invisible)?;
    let visible = driver.device_count().unwrap_or(0);
    let current = driver.current_ordinal(visible).unwrap_or(None);
    let chosen = RankDevice::choose(visible, current, local)?;
    let device = driver.device(chosen.ordinal()).map_err(|_| NoRankDevice::Invisible)?;
    Ok((chosen, device))
}

impl Driver {
    /// Current device on this thread; `None` without a current context.
    fn current_ordinal(&self, visible: u32) -> Result<Option<u32>> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, cuCtxGetCurrent(&raw mut context)) }?;
        if context.is_null() {
            return Ok(None);
        }
        let mut handle = 0;
        // SAFETY: writes one integer.
        unsafe { call!(self, cuCtxGetDevice(&raw mut handle)) }?;
        let has_handle =
            |ordinal: &u32| self.device(*ordinal).is_ok_and(|it| it.properties.handle == handle);
        Ok((0..visible).find(has_handle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn local(rank: u32, size: u32) -> Option<LocalRank> {
        Some(LocalRank { rank, size })
    }

    #[test]
    fn a_launcher_s_rank_has_the_device_with_its_number_or_the_current_one() {
        let three = LocalRank { rank: 3, size: 8 };
        assert_eq!(RankDevice::choose(8, None, Some(three)), Ok(RankDevice::ByLocalRank(three)));
        assert_eq!(RankDevice::choose(8, Some(5), local(3, 8)), Ok(RankDevice::Current(5)));
        assert_eq!(RankDevice::choose(8, Some(5), None), Ok(RankDevice::Current(5)));
        // CUDA_VISIBLE_DEVICES has one for each rank.
        assert_eq!(RankDevice::choose(1, None, local(3, 8)), Ok(RankDevice::Only));
        assert_eq!(RankDevice::choose(1, None, local(0, 1)).map(RankDevice::ordinal), Ok(0));
    }

    #[test]
    fn a_device_that_is_only_a_guess_is_not_chosen() {
        let text = |visible, current, local| {
            RankDevice::choose(visible, current, local).unwrap_err().to_string()
        };
        assert_eq!(text(0, None, local(0, 1)), "no GPU is visible");
        // One process may drive all GPUs, whichever is current.
        let all = "8 GPUs are visible to the only rank on this host";
        assert_eq!(text(8, Some(0), local(0, 1)), all);
        assert_eq!(
            text(8, None, local(1, 4)),
            "8 GPUs are visible to 4 ranks on this host, and none is current"
        );
        assert_eq!(
            text(8, None, local(9, 16)),
            "8 GPUs are visible to 16 ranks on this host, and none is current"
        );
        assert_eq!(
            text(2, None, None),
            "2 GPUs are visible, none is current, and no local rank is known"
        );
    }
}
