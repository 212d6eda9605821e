//! Endpoint options of EFA.

use super::objects::Endpoint;
use super::sys;

/// Sets EFA endpoint options: arrivals consume receives, which bounds how many there are, and writes to a
/// receiver that is not ready are retried. Libraries without an option keep the default.
pub fn prefer_bounded_queues(endpoint: &Endpoint, consumes_receives: bool) {
    if consumes_receives {
        let unsolicited = false;
        if let Err(why) = endpoint.set(sys::FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, &unsolicited) {
            log::debug!("unsolicited receives of RDMA writes stay enabled: {why}");
        }
    }
    /// Unlimited retries.
    const INFINITE_RETRIES: usize = 7;
    if let Err(why) = endpoint.set(sys::FI_OPT_EFA_RNR_RETRY, &INFINITE_RETRIES) {
        log::debug!("retries of receivers that are not ready keep the default: {why}");
    }
}

/// Forbids EFA what a link that may reach GPU memory must not have: CUDA calls, which a thread that polls
/// would make and which may wait for a kernel that waits for that thread, and libfabric's shared memory
/// within a host, by which payload would reach a GPU on another way than the flush covers. Libraries
/// without an option keep the default.
pub fn leave_gpus_to_the_nic(endpoint: &Endpoint) {
    let permitted = false;
    if let Err(why) = endpoint.set(sys::FI_OPT_CUDA_API_PERMITTED, &permitted) {
        log::warn!("libfabric may call CUDA while Weft polls: {why}");
    }
    if let Err(why) = endpoint.set(sys::FI_OPT_SHARED_MEMORY_PERMITTED, &permitted) {
        log::warn!("libfabric may use shared memory within this host: {why}");
    }
}
