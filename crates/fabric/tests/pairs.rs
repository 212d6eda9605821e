//! Pair groups: formation, traffic, loss, unknown connections, processes.
#![cfg(not(any(miri, loom)))]

#[path = "pairs/common.rs"]
mod common;
#[path = "pairs/ends.rs"]
mod ends;
#[path = "pairs/forming.rs"]
mod forming;
#[path = "pairs/processes.rs"]
mod processes;
#[path = "pairs/tls.rs"]
mod tls;
