//! Idle entry limits.

/// Limits for idle entries; both apply. For example, `IdleLimits { entries: 8, bytes: 1 << 30 }` keeps at
/// most 8 entries, and at most 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleLimits {
    /// Entry limit.
    pub entries: usize,
    /// Limit for the bytes that the entries cover.
    pub bytes: u64,
}

impl IdleLimits {
    /// No idle entries.
    pub const NONE: IdleLimits = IdleLimits { entries: 0, bytes: 0 };
}

impl Default for IdleLimits {
    /// 1024 entries, without a byte limit.
    fn default() -> IdleLimits {
        IdleLimits { entries: 1024, bytes: u64::MAX }
    }
}
