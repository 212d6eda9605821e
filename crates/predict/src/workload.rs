//! Interface of workloads: state machines over the events of a world.

use crate::error::Error;
use crate::world::World;

/// State machine that starts flows and timers and receives their completions.
///
/// Tags are the workload's own, of [`TAG_BITS`](crate::TAG_BITS) bits; a completion has the tag of its start.
pub trait Workload {
    /// Called once, at the start of virtual time.
    fn start(&mut self, world: &mut World) -> Result<(), Error>;

    /// Completion of the flow or timer `tag`, at `world.now()`.
    fn event(&mut self, world: &mut World, tag: u64) -> Result<(), Error>;

    /// Virtual time of the end; `None` before.
    fn finished(&self) -> Option<f64>;

    /// Error for an unfinished workload without a further event.
    fn deadlock(&self) -> Error;

    /// Name of the flow `tag` in error messages, such as `rank 3 to rank 7`.
    fn flow_name(&self, tag: u64) -> String;

    /// Completed share of the work, from 0 to 1.
    fn progress(&self) -> f64 {
        0.0
    }
}
