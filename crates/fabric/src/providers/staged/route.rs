//! Route to a peer, with or without slots.

use super::wire::PairShape;
use crate::link::RouteRule;

/// Route to a peer, as both addresses determine it.
pub(super) struct StagedRoute<'a> {
    pub shape: PairShape,
    /// The inner link's rule.
    pub rule: RouteRule,
    /// The peer's inner address.
    pub inner: &'a [u8],
    /// Parts may take slots.
    pub has_slots: bool,
}

impl StagedRoute<'_> {
    /// The rule that the engine sees.
    pub(super) fn rule(&self) -> RouteRule {
        if self.has_slots {
            return self.shape.rule(self.rule);
        }
        // The longest part is the same on all routes over this provider.
        RouteRule { parts: self.shape.host_parts(self.rule.parts), ..self.rule }
    }
}
