//! Collision: writes in one step that share a link.

use crate::op::Rank;
use std::fmt;
use weft_topology::LinkId;

/// Writes in one step that share a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collision {
    /// Step.
    pub step: u32,
    /// Link.
    pub link: LinkId,
    /// Link name.
    pub name: String,
    /// Write count.
    pub load: u32,
    /// Source and destination for the first 64 writes.
    pub pairs: Vec<(Rank, Rank)>,
}

impl fmt::Display for Collision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {} writes share {}:", self.step, self.load, self.name)?;
        for (i, (from, to)) in self.pairs.iter().enumerate() {
            write!(f, "{} {from} -> {to}", if i == 0 { "" } else { "," })?;
        }
        if self.pairs.len() < self.load as usize {
            f.write_str(", ...")?;
        }
        Ok(())
    }
}
