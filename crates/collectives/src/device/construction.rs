//! Construction on a rank: agreement among the ranks, programs, reservation and memory.

use super::call_board::CallBoard;
use super::config::DeviceConfig;
use super::error::DeviceError;
use super::family::FAMILY;
use super::layout::Layout;
use super::parts::{Backend, Parts};
use super::plan::Kernel;
use super::program::Programs;
use super::twin::Twin;
use std::sync::Arc;
use weft_gpu::MemoryLocation;
use weft_gpu::domain::{Block, Domain, OperatorLaunch, Reservation};

/// A rank's part before memory allocation.
pub(super) struct Prepared {
    domain: Arc<Domain>,
    pub layout: Layout,
    programs: Option<Programs>,
    reservation: Option<Reservation>,
}
/// Block count in the largest grid that a rank may launch.
pub(super) fn most_blocks(config: &DeviceConfig, domain: &Domain) -> Result<u32, DeviceError> {
    if config.num_sms == Some(0) {
        return Err(DeviceError::Zero { what: "num_sms" });
    }
    let MemoryLocation::Cuda { device, .. } = domain.location() else {
        return Ok(config.num_sms.unwrap_or(DeviceConfig::TWIN_BLOCKS));
    };
    let sms = device.sm_count();
    if let Some(given) = config.num_sms.filter(|given| *given > sms) {
        let (what, given, limit) = ("num_sms", given.into(), sms.into());
        return Err(DeviceError::TooLarge { what, given, limit });
    }
    let usual = config.num_sms.unwrap_or(DeviceConfig::usual_sms(domain.ranks()));
    Ok(usual.min((sms / domain.sharing().max(1)).max(1)))
}

/// A rank's block limit, and its options, which are equal on all ranks.
pub(super) struct Offer {
    limit: u32,
    options: [(&'static str, u64); 4],
}

impl Offer {
    pub fn new(config: &DeviceConfig, limit: u32) -> Offer {
        let skew = u64::try_from(config.skew_timeout.as_nanos()).unwrap_or(u64::MAX);
        let options = [
            ("num_sms (0: the default)", config.num_sms.unwrap_or(0).into()),
            ("skew_timeout in ns", skew),
            ("concurrent", config.concurrent.into()),
            ("copy_engine", config.copy_engine.into()),
        ];
        Offer { limit, options }
    }

    pub fn encode(&self) -> Vec<u8> {
        let options = self.options.iter().flat_map(|(_, value)| value.to_le_bytes());
        self.limit.to_le_bytes().into_iter().chain(options).collect()
    }

    /// The smallest limit, if all ranks have this rank's options. `encoded` is by rank.
    pub fn agree(&self, encoded: &[Vec<u8>]) -> Result<u32, DeviceError> {
        let mut least = self.limit;
        for (peer, theirs) in (0..).map(weft_fabric::Rank).zip(encoded) {
            let malformed = || DeviceError::Malformed { peer, bytes: theirs.len() };
            let (limit, options) = theirs.split_first_chunk::<4>().ok_or_else(malformed)?;
            let (options, rest) = options.as_chunks::<8>();
            if options.len() != self.options.len() || !rest.is_empty() {
                return Err(malformed());
            }
            for ((what, ours), theirs) in self.options.into_iter().zip(options) {
                let theirs = u64::from_le_bytes(*theirs);
                if ours != theirs {
                    return Err(DeviceError::Disagreement { peer, what, ours, theirs });
                }
            }
            least = least.min(u32::from_le_bytes(*limit));
        }
        Ok(least.max(1))
    }
}

impl Prepared {
    pub fn new(
        config: &DeviceConfig,
        domain: &Arc<Domain>,
        blocks: u32,
    ) -> Result<Prepared, DeviceError> {
        domain.register(&FAMILY)?;
        domain.raise_wait_limit(config.skew_timeout)?;
        let layout = Layout::new(domain.ranks(), blocks);
        let domain = domain.clone();
        let MemoryLocation::Cuda { device, .. } = domain.location() else {
            return Ok(Prepared { domain, layout, programs: None, reservation: None });
        };
        let programs = Programs::new(layout, device)?;
        let launch = OperatorLaunch {
            name: format!("device collectives with {} SMs", layout.blocks),
            grid: layout.blocks,
            // For the kernel with the most registers, by its launch bounds.
            per_sm: 1,
            threads: Kernel::AllReduceDirect.threads(),
            registers: 128,
            shared: programs.most_shared(),
            concurrent: config.concurrent,
        };
        let reservation = Some(domain.reserve(launch)?);
        Ok(Prepared { domain, layout, programs: Some(programs), reservation })
    }

    /// Completes the parts with the rank's memory block.
    pub fn finish(self, block: Block, board: Option<CallBoard>) -> (Layout, Parts) {
        let Prepared { domain, layout, programs, reservation } = self;
        let (peers, rank) = (block.addresses(), domain.rank());
        let backend = match programs {
            Some(programs) => Backend::Cuda(Box::new(programs)),
            None => {
                let watch = domain.failures().watch();
                let (record, abort) = (watch.record_address(), watch.abort_address());
                // SAFETY: the block is zeroed, aligned, has the layout's length, and only twins with this layout use
                // it; the block, the table and the watch outlive the twin (`Parts`).
                let twin = unsafe {
                    Twin::new(layout, rank, peers.clone(), domain.table(), record, abort)
                };
                Backend::Twin(twin)
            }
        };
        let board = board.map(Arc::new);
        if let Some(board) = &board {
            let board = Arc::downgrade(board);
            let is_ahead = move |rank| board.upgrade().is_some_and(|board| board.is_ahead_of(rank));
            domain.failures().end_hopeless_waits(Box::new(is_ahead));
        }
        (layout, Parts { backend, peers, block, board, _reservation: reservation, domain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn config(num_sms: Option<u32>, seconds: u64) -> DeviceConfig {
        let skew_timeout = Duration::from_secs(seconds);
        let location = MemoryLocation::Twin;
        DeviceConfig { location, num_sms, skew_timeout, concurrent: false, copy_engine: false }
    }

    #[test]
    fn ranks_with_equal_options_take_the_smallest_limit_of_blocks() {
        let offers = [32, 26, 32].map(|limit| Offer::new(&config(None, 30), limit).encode());
        let own = Offer::new(&config(None, 30), 32);
        assert_eq!(own.agree(&offers).unwrap(), 26);
    }

    #[test]
    fn the_first_option_that_differs_is_named() {
        let own = Offer::new(&config(Some(8), 30), 8);
        let others = [(Some(8), 20), (Some(9), 30), (None, 30)];
        for ((num_sms, seconds), what) in others.into_iter().zip(["skew", "num_sms", "num_sms"]) {
            let theirs = Offer::new(&config(num_sms, seconds), 8).encode();
            let error = own.agree(&[own.encode(), theirs]).unwrap_err().to_string();
            assert!(error.starts_with(what) && error.contains("at rank 1"), "{error}");
        }
    }

    #[test]
    fn garbage_of_a_peer_is_an_error() {
        let own = Offer::new(&config(None, 30), 32);
        for length in [0, 3, 4, 28, 35, 37, 44] {
            assert!(own.agree(&[vec![0; length]]).is_err(), "{length}");
        }
    }
}
