//! What runs on a world: collectives, training, all-to-alls, and mixtures of them.

use crate::error::Error;
use crate::world::World;

/// Something that starts flows and timers, and is told when they end.
///
/// Every tag that a workload gives to the world is one of its own, of [`TAG_BITS`] bits; the world
/// brings it back to the workload that runs under the same number.
pub trait Workload {
    /// Called once, at the start of virtual time.
    fn start(&mut self, world: &mut World) -> Result<(), Error>;

    /// What was started with `tag` ended, at `world.now()`.
    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error>;

    /// Whether everything is done; `None` as long as it is not, and else the virtual time at which it was.
    fn finished(&self) -> Option<f64>;

    /// Called when nothing is left that could happen and the workload is not finished: why.
    fn stuck(&self) -> Error;

    /// Whose flow has this tag, for an error message: `rank 3 to rank 7`.
    fn describe(&self, tag: u64) -> String;

    /// The share of the work that is done, from 0 to 1.
    fn progress(&self) -> f64 {
        0.0
    }
}

/// A workload's tags are less than this power of two.
pub const TAG_BITS: u32 = 48;
