//! Simulator under random traffic, and the simulator's checks under drivers with deliberate errors.

#[path = "sim/checks.rs"]
mod checks;
#[path = "sim/counters.rs"]
mod counters;
#[path = "sim/driver_scatters.rs"]
mod driver_scatters;
#[path = "sim/engine.rs"]
mod engine;
#[path = "sim/groups.rs"]
mod groups;
#[path = "sim/peer_groups.rs"]
mod peer_groups;
#[path = "sim/runs.rs"]
mod runs;
#[path = "sim/scenario.rs"]
mod scenario;
#[path = "sim/traffic.rs"]
mod traffic;
#[path = "sim/windows.rs"]
mod windows;
