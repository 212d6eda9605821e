//! Twin NIC limits and ports.

/// NIC limits and ports.
#[derive(Clone, Debug)]
pub struct TwinConfig {
    /// Completion queue entries.
    pub max_cqe: i32,
    /// Send queue work requests.
    pub max_qp_wr: i32,
    /// Shared queue receives.
    pub max_srq_wr: i32,
    /// Longest write that a work request holds itself.
    pub max_inline: u32,
    /// Longest message on a port.
    pub max_message: u32,
    /// It pages regions on demand.
    pub on_demand_paging: bool,
    /// Longest region whose memory can be locked.
    pub max_locked: u64,
    /// Longest region that is paged on demand.
    pub max_paged: u64,
    /// Port states.
    pub ports: Vec<TwinPort>,
}

impl Default for TwinConfig {
    fn default() -> TwinConfig {
        TwinConfig {
            max_cqe: 1 << 20,
            max_qp_wr: 1 << 14,
            max_srq_wr: 1 << 20,
            max_inline: 220,
            max_message: 1 << 30,
            on_demand_paging: false,
            max_locked: u64::MAX,
            max_paged: u64::MAX,
            ports: vec![TwinPort::default()],
        }
    }
}

/// NIC port.
#[derive(Clone, Copy, Debug)]
pub struct TwinPort {
    /// State ACTIVE; DOWN otherwise.
    pub is_active: bool,
    /// RoCE; InfiniBand otherwise.
    pub is_ethernet: bool,
}

impl Default for TwinPort {
    fn default() -> TwinPort {
        TwinPort { is_active: true, is_ethernet: true }
    }
}
