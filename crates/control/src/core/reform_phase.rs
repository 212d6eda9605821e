//! Re-formation progress and result.

use crate::Member;
use std::sync::Arc;

/// A `reform` call's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ReformPhase {
    /// No call in progress.
    #[default]
    Idle,
    /// View change in progress.
    Agreeing,
    /// Group formed here; confirmation by the collective call with this sequence number in progress.
    Confirming(u64),
}

/// Group that all members have formed.
pub(crate) struct FormedGroup {
    pub generation: u32,
    pub members: Arc<[Member]>,
    /// Token for this generation's handles; while one exists, older handles cannot replace the group.
    pub handle: Arc<()>,
}
