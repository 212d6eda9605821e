//! Workload interface: state machines over the events in a world.

use crate::error::Error;
use crate::world::World;

/// State machine that starts flows and timers and receives the completions.
///
/// Tags belong to the workload and have [`TAG_BITS`](crate::TAG_BITS) bits; a completion has the tag with which the
/// flow or timer started.
pub trait Workload {
    /// Called once, at the start of virtual time.
    fn start(&mut self, world: &mut World) -> Result<(), Error>;

    /// The flow or timer `tag` has completed, at `world.now()`.
    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error>;

    /// Virtual time when the workload ended; `None` before.
    fn finished(&self) -> Option<f64>;

    /// Error for an unfinished workload without a further event.
    fn deadlock(&self) -> Error;

    /// Name of flow `tag` in error messages, such as `rank 3 to rank 7`.
    fn flow_name(&self, tag: u64) -> String;

    /// Completed share of the work, from 0 to 1.
    fn progress(&self) -> f64 {
        0.0
    }
}
